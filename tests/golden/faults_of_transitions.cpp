// Transitions that do something else: forwards and backwards that do not belong together.
#include <ATen/ATen.h>

#include <memory>
#include <utility>

#include "golden/faults.h"
#include "parallel/exchange.h"
#include "parallel/slices.h"

namespace tessera::golden {
namespace {

using parallel::Transition;

constexpr const char* kQwen = "qwen3-moe-fp32";
constexpr const char* kGptOss = "gpt-oss-fp32";
constexpr int kHidden = 32;

struct Site {
  std::string_view kind;
  std::string_view where;
  bool is(const Transition& of) const { return of.kind == kind && of.where == where; }
};
constexpr Site kSlice{"slice", "tokens of experts"};

Changes backward_of(Site site, StandIn::Way way) {
  return {.transitions = [=](const RankParts&) {
    return std::make_unique<StandIn>(nullptr, [=](const Transition& of, const at::Tensor& grad) {
      return site.is(of) ? way(of, grad) : of.backward(grad);
    });
  }};
}

Changes forward_of(Site site, StandIn::Way way) {
  return {.transitions = [=](const RankParts&) {
    return std::make_unique<StandIn>(
        [=](const Transition& of, const at::Tensor& x) {
          return site.is(of) ? way(of, x) : of.forward(x);
        },
        nullptr);
  }};
}

at::Tensor as_it_is(const Transition&, const at::Tensor& x) { return x; }

at::Tensor summed(const Transition& of, const at::Tensor& x) {
  return parallel::exchange_sum(x, of.axis, std::nullopt, "once more");
}

/// The own rows' gradient among zeros: no rank hears of the others.
at::Tensor own_rows_only(const Transition& of, const at::Tensor& grad) {
  return parallel::in_zeros(grad, of.axis, 0, grad.size(0) * of.axis.size);
}

bool is_tokens(const at::Tensor& grad) { return grad.size(-1) == kHidden; }

/// A bias of so many dims that all ranks add: [hidden] of o_proj, [experts, hidden] of experts.
Changes bias_on_every_rank(std::int64_t dims) {
  return {.transitions = [=](const RankParts&) {
    const auto is_bias = [=](const Transition& of, const at::Tensor& x) {
      return of.kind == "only_first" && x.dim() == dims;
    };
    return std::make_unique<StandIn>(
        [=](const Transition& of, const at::Tensor& x) {
          return is_bias(of, x) ? x : of.forward(x);
        },
        [=](const Transition& of, const at::Tensor& grad) {
          return is_bias(of, grad) ? grad : of.backward(grad);
        });
  }};
}

std::vector<Fault> at_the_boundary() {
  const Degrees shards{.tp = 2};
  const Degrees whole{.tp = 2, .sequence = false};
  const Degrees all{.tp = 2, .router = models::RouterTokens::kAll};
  return {
      {"BoundaryAssumesReplicate", "The gradient at a region's entry is sliced, not reduced",
       "torchtitan #2416, second defect", kQwen, all,
       backward_of({"all_gather", "enter"},
                   [](const Transition& of, const at::Tensor& grad) {
                     return parallel::own_part(grad, of.axis, 1);
                   }),
       CaughtBy::kGradients, "input_layernorm.weight"},
      {"EntryNotReduced", "The gradient at a region's entry is not summed", "torchtitan #1805",
       kQwen, whole, backward_of({"copy", "enter"}, as_it_is), CaughtBy::kInvariance,
       "input_layernorm.weight"},
      {"ExitReducedTwice", "The sum at a region's exit is summed again in backward",
       "torchtitan #3280", kQwen, whole, backward_of({"all_reduce", "leave"}, summed),
       CaughtBy::kGradients, "o_proj.weight"},
      {"RowBiasOnEveryRank", "A row-parallel bias is added by every rank", "torchtitan #4245",
       kGptOss, shards, bias_on_every_rank(1), CaughtBy::kGradients, "o_proj.bias"},
  };
}

std::vector<Fault> inside_experts() {
  const Degrees whole{.tp = 2, .sequence = false};
  const Degrees all{.tp = 2, .router = models::RouterTokens::kAll};
  const Degrees cut{.tp = 2, .etp = 2};
  return {
      {"RoutedInputNotReduced", "The gradient of the routed tokens stays the rank's own",
       "torchtitan #1805, #1878", kQwen, whole, backward_of(kSlice, own_rows_only),
       CaughtBy::kInvariance, "post_attention_layernorm.weight"},
      {"OneBranchReducedTwice", "One branch is summed inside and again at the boundary",
       "torchtitan #1878", kQwen, all,
       backward_of(kSlice,
                   [](const Transition& of, const at::Tensor& grad) {
                     const at::Tensor back = of.backward(grad);
                     return is_tokens(grad) ? summed(of, back) : back;
                   }),
       CaughtBy::kGradients, "post_attention_layernorm.weight"},
      {"ScoresReducedBeforeTheSum", "The scores' gradient is summed, and the router's again",
       "torchtitan #2388", kQwen, all,
       backward_of(kSlice,
                   [](const Transition& of, const at::Tensor& grad) {
                     const at::Tensor back = of.backward(grad);
                     return is_tokens(grad) ? back : summed(of, back);
                   }),
       CaughtBy::kGradients, "mlp.gate.weight"},
      {"ScoresWithoutGradient", "The routed scores go through an operation without backward",
       "NeMo Automodel #2995", kQwen, all,
       backward_of(kSlice,
                   [](const Transition& of, const at::Tensor& grad) {
                     const at::Tensor back = of.backward(grad);
                     return is_tokens(grad) ? back : at::zeros_like(back);
                   }),
       CaughtBy::kGradients, "mlp.gate.weight"},
      {"SameTokensFromEveryRank", "Every rank sends the first rank's tokens to experts",
       "NeMo Automodel #2995", kQwen, whole,
       forward_of(kSlice,
                  [](const Transition& of, const at::Tensor& x) {
                    return x.narrow(0, 0, x.size(0) / of.axis.size).contiguous();
                  }),
       CaughtBy::kGradients, "post_attention_layernorm.weight"},
      {"ExpertBiasOnEveryRank", "The bias after cut experts is added by every rank",
       "torchtitan #4245", kGptOss, cut, bias_on_every_rank(2), CaughtBy::kGradients,
       "experts.down_proj_bias"},
  };
}

}  // namespace

std::vector<Fault> faults_of_transitions() {
  std::vector<Fault> faults = at_the_boundary();
  const auto experts = inside_experts();
  faults.insert(faults.end(), experts.begin(), experts.end());
  return faults;
}

}  // namespace tessera::golden
