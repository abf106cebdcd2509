// Transitions that do something else: forwards and backwards that do not belong together.
#include <ATen/ATen.h>

#include <memory>
#include <utility>

#include "golden/faults.h"
#include "parallel/collectives.h"
#include "parallel/transition.h"

namespace tessera::golden {
namespace {

using parallel::Transition;

constexpr int kHidden = 32;

struct Site {
  std::string_view kind;
  std::string_view where;
  bool is(const Transition& of) const { return of.kind == kind && of.where == where; }
};
constexpr Site kSlice{"slice", "tokens of experts"};
constexpr Site kImages{"slice", "into the stream"};
constexpr Site kDispatch{"all_to_all", "experts dispatch"};

Changes backward_of(Site site, StandIn::Way way) {
  return {.transitions = [=](const RankParts& rank) {
    return std::make_unique<StandIn>(nullptr, [=](const Transition& of, const at::Tensor& grad) {
      if (!site.is(of)) return of.backward(grad);
      rank.act();
      return way(of, grad);
    });
  }};
}

Changes forward_of(Site site, StandIn::Way way) {
  return {.transitions = [=](const RankParts& rank) {
    return std::make_unique<StandIn>(
        [=](const Transition& of, const at::Tensor& x) {
          if (!site.is(of)) return of.forward(x);
          rank.act();
          return way(of, x);
        },
        nullptr);
  }};
}

at::Tensor as_it_is(const Transition&, const at::Tensor& x) { return x; }

at::Tensor summed_again(const Transition& of, const at::Tensor& x) {
  return parallel::exchange_sum(x, of.axis, std::nullopt, "once more");
}

/// The own rows' gradient among zeros: no rank hears of the others.
at::Tensor own_rows_only(const Transition& of, const at::Tensor& grad) {
  return parallel::in_zeros(grad, of.axis, 0, grad.size(0) * of.axis.size);
}

at::Tensor gathered(const Transition& of, const at::Tensor& grad) {
  return parallel::exchange_gather(grad, of.axis, {0, grad.size(0) * of.axis.size}, "gathered");
}

bool is_tokens(const at::Tensor& grad) { return grad.size(-1) == kHidden; }

/// Slices are taken in the order of another group's ranks: each rank has the next one's part, and
/// the backward belongs to it.
Changes part_of_the_next_rank(Site site, std::int64_t dim) {
  return {.transitions = [=](const RankParts& rank) {
    return std::make_unique<StandIn>(
        [=](const Transition& of, const at::Tensor& x) {
          if (!site.is(of)) return of.forward(x);
          rank.act();
          const std::int64_t part = x.size(dim) / of.axis.size;
          return x.narrow(dim, (of.axis.rank + 1) % of.axis.size * part, part).contiguous();
        },
        [=](const Transition& of, const at::Tensor& grad) {
          const at::Tensor back = of.backward(grad);
          return site.is(of) ? back.roll(grad.size(dim), dim) : back;
        });
  }};
}

/// A bias of so many dims, [hidden] of o_proj, [experts, hidden] of experts, is added by every rank
/// instead of the first one: what each adds of it, which is what its gradient becomes as well.
Changes bias_on_every_rank(std::int64_t dims, StandIn::Way way) {
  return {.transitions = [=](const RankParts& rank) {
    const auto is_bias = [=](const Transition& of, const at::Tensor& x) {
      return of.kind == "only_first" && x.dim() == dims;
    };
    return std::make_unique<StandIn>(
        [=](const Transition& of, const at::Tensor& x) {
          if (!is_bias(of, x)) return of.forward(x);
          rank.act();
          return way(of, x);
        },
        [=](const Transition& of, const at::Tensor& grad) {
          return is_bias(of, grad) ? way(of, grad) : of.backward(grad);
        });
  }};
}

/// Every rank adds 1 / tp of it, by a division that is differentiated; its gradient is taken as the
/// same on every rank, which it is.
Changes scaled_bias() {
  Changes changes = bias_on_every_rank(
      1, [](const Transition& of, const at::Tensor& x) { return x / of.axis.size; });
  changes.parts = [](const RankParts& rank) {
    place(rank, "o_proj.bias", {.axes = {AxisPlacement::invariant("tp", 2)}});
  };
  return changes;
}

/// The gradient of what experts got is summed over the ranks that share them, before the scores.
Changes rows_summed_before_scores() {
  return {.transitions = [](const RankParts& rank) {
    return std::make_unique<StandIn>(nullptr, [rank, tp = parallel::axis_of(rank.mesh, "tp")](
                                                  const Transition& of, const at::Tensor& grad) {
      const at::Tensor back = of.backward(grad);
      if (!kDispatch.is(of)) return back;
      rank.act();
      return parallel::exchange_sum(back, tp, std::nullopt, "routed rows");
    });
  }};
}

std::vector<Fault> at_the_boundary() {
  const Degrees shards{.tp = 2};
  const Degrees whole{.tp = 2, .sequence = false};
  const Degrees all{.tp = 2, .router = RouterTokens::kAll};
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
       "torchtitan #3280", kQwen, whole, backward_of({"all_reduce", "leave"}, summed_again),
       CaughtBy::kGradients, "o_proj.weight"},
      {"RowBiasOnEveryRank", "A row-parallel bias is added by every rank", "torchtitan #4245",
       kGptOss, shards, bias_on_every_rank(1, as_it_is), CaughtBy::kGradients, "o_proj.bias"},
      {"BiasScaledByTp", "A bias that every rank adds is scaled by 1 / tp, and its gradient too",
       "torchtitan #4332", kGptOss, whole, scaled_bias(), CaughtBy::kGradients, "o_proj.bias",
       Setting::kPlain, true},
      {"ImagesOfTheNextRank", "Soft tokens are cut in the order of another group's ranks",
       "Megatron-LM #7452, item 7", kGemma, shards, part_of_the_next_rank(kImages, 1),
       CaughtBy::kGradients, "embed_vision"},
  };
}

std::vector<Fault> inside_experts() {
  const Degrees whole{.tp = 2, .sequence = false};
  const Degrees all{.tp = 2, .router = RouterTokens::kAll};
  const Degrees experts_over_tp{.tp = 2, .ep = 2, .router = RouterTokens::kAll};
  const Degrees cut{.tp = 2, .etp = 2};
  const Degrees spread{.shard = 2, .tp = 2, .ep = 2, .etp = 2};
  return {
      {"RoutedInputNotReduced", "The gradient of the routed tokens stays local to the rank",
       "torchtitan #1805, #1878", kQwen, whole, backward_of(kSlice, own_rows_only),
       CaughtBy::kInvariance, "post_attention_layernorm.weight"},
      {"OneBranchReducedTwice", "One branch is summed inside and again at the boundary",
       "torchtitan #1878", kQwen, all,
       backward_of(kSlice,
                   [](const Transition& of, const at::Tensor& grad) {
                     const at::Tensor back = of.backward(grad);
                     return is_tokens(grad) ? summed_again(of, back) : back;
                   }),
       CaughtBy::kGradients, "post_attention_layernorm.weight"},
      {"ScoresReducedBeforeTheSum", "The scores' gradient is summed, and the router's again",
       "torchtitan #2388", kQwen, all,
       backward_of(kSlice,
                   [](const Transition& of, const at::Tensor& grad) {
                     const at::Tensor back = of.backward(grad);
                     return is_tokens(grad) ? back : summed_again(of, back);
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
      {"SigmoidsWithoutGradient", "The routed sigmoids go through an operation without backward",
       "next to NeMo Automodel #2995", kSigmoid, all,
       backward_of(kSlice,
                   [](const Transition& of, const at::Tensor& grad) {
                     const at::Tensor back = of.backward(grad);
                     return is_tokens(grad) ? back : at::zeros_like(back);
                   }),
       CaughtBy::kGradients, "mlp.gate.weight"},
      {"ExpertsCountEveryRankOfTp",
       "Every tp rank sends all tokens to experts, which count them all", "NeMo Automodel #2995",
       kQwen, experts_over_tp, forward_of(kSlice, as_it_is), CaughtBy::kTransition,
       "tokens of experts: found a part of 48"},
      {"SameTokensFromEveryRank", "Every rank sends the first rank's tokens to experts",
       "next to NeMo Automodel #2995", kQwen, whole,
       forward_of(kSlice,
                  [](const Transition& of, const at::Tensor& x) {
                    return x.narrow(0, 0, x.size(0) / of.axis.size).contiguous();
                  }),
       CaughtBy::kGradients, "post_attention_layernorm.weight"},
      {"TokensOfTheNextRank", "Routed tokens are cut in the order of another group's ranks",
       "next to Megatron-LM #7452, item 5", kQwen, whole, part_of_the_next_rank(kSlice, 0),
       CaughtBy::kGradients, "post_attention_layernorm.weight"},
      {"RoutedGradientGathered",
       "With shared experts the routed tokens' gradient is gathered, and summed at the entry",
       "next to torchtitan #1878", kDeepseek, whole, backward_of(kSlice, gathered),
       CaughtBy::kGradients, "post_attention_layernorm.weight"},
      {"ExpertBiasOnEveryRank", "The bias after cut experts is added by every rank",
       "torchtitan #4245", kGptOss, cut, bias_on_every_rank(2, as_it_is), CaughtBy::kGradients,
       "experts.down_proj_bias"},
      {"RowsReducedBeforeScores", "The routed rows' gradient is summed inside, before the scores'",
       "torchtitan #1878", kQwen, spread, rows_summed_before_scores(), CaughtBy::kGradients,
       "mlp.gate.weight", Setting::kScoresBefore, true},
      {"InputsReducedBeforeTheirScores",
       "The gradient of an expert's scaled input is summed before it reaches the score",
       "torchtitan #2416", kLlama4, spread, rows_summed_before_scores(), CaughtBy::kGradients,
       "feed_forward.router.weight", Setting::kPlain, true},
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
