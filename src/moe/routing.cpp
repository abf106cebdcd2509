#include "moe/routing.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sign.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/pass_local.h"
#include "tessera/error.h"
#include "tessera/wide_scope.h"

namespace tessera::moe {
namespace {

at::Tensor ascending(const at::Tensor& indices) { return std::get<0>(at::sort(indices, 1)); }

void check_shape(const at::Tensor& indices, std::int64_t tokens, std::int64_t experts_per_token) {
  TESSERA_CHECK(indices.dim() == 2 && indices.size(0) == tokens &&
                    indices.size(1) == experts_per_token && indices.scalar_type() == at::kLong,
                ErrorKind::kFormat, "imposed routing: found ", indices.scalar_type(), " ",
                indices.sizes(), ", expected int64 [", tokens, ", ", experts_per_token, "]");
}

/// `indices` ascending.
void check_experts(const at::Tensor& indices, std::int64_t experts) {
  if (indices.numel() == 0) return;
  const std::int64_t least = indices.min().item<std::int64_t>();
  const std::int64_t most = indices.max().item<std::int64_t>();
  TESSERA_CHECK(least >= 0 && most < experts, ErrorKind::kFormat, "imposed routing: found expert ",
                least < 0 ? least : most, ", expected 0 to ", experts - 1);
  const std::int64_t k = indices.size(1);
  const at::Tensor twice = indices.narrow(1, 1, k - 1).eq(indices.narrow(1, 0, k - 1));
  TESSERA_CHECK(!twice.any().item<bool>(), ErrorKind::kFormat,
                "imposed routing: found an expert twice for one token, expected ", k,
                " different ones");
}

void check_options(std::int64_t experts, const RouteOptions& options) {
  TESSERA_CHECK(options.groups >= 1 && experts % options.groups == 0, ErrorKind::kConfig,
                "routing: found ", experts, " experts in ", options.groups,
                " groups, expected groups of equal size");
  TESSERA_CHECK(options.top_groups >= 1 && options.top_groups <= options.groups, ErrorKind::kConfig,
                "routing: found ", options.top_groups, " groups a token, expected 1 to ",
                options.groups);
  const std::int64_t within = experts / options.groups * options.top_groups;
  TESSERA_CHECK(options.experts_per_token >= 1 && options.experts_per_token <= within,
                ErrorKind::kConfig, "routing: found ", options.experts_per_token,
                " experts a token, expected 1 to ", within);
}

/// Returns [M, groups] from groups [M, groups, experts of one].
at::Tensor group_scores(const at::Tensor& grouped, Scoring scoring) {
  if (scoring != Scoring::kSigmoid) return grouped.amax(2);
  const std::int64_t counted = std::min<std::int64_t>(2, grouped.size(2));
  return std::get<0>(at::topk(grouped, counted, 2)).sum(2);
}

/// Sets scores [M, E] outside the best groups to -inf.
at::Tensor within_best_groups(const at::Tensor& scores, const RouteOptions& options) {
  if (options.top_groups == options.groups) return scores;
  const std::int64_t group_size = scores.size(1) / options.groups;
  const at::Tensor grouped = scores.view({scores.size(0), options.groups, group_size});
  const at::Tensor best =
      std::get<1>(at::topk(group_scores(grouped, options.scoring), options.top_groups, 1));
  const at::Tensor outside =
      at::ones({scores.size(0), options.groups}, scores.options().dtype(at::kBool))
          .scatter_(1, best, false);
  return grouped.masked_fill(outside.unsqueeze(2), -std::numeric_limits<double>::infinity())
      .view(scores.sizes());
}

/// Returns [M, K] in any order; the choice is made by `scores`.
at::Tensor choose(const at::Tensor& scores, const RouteOptions& options) {
  at::Tensor counted = scores.detach();
  if (options.expert_bias.defined()) counted = counted + options.expert_bias;
  counted = within_best_groups(counted, options);
  return std::get<1>(at::topk(counted, options.experts_per_token, 1));
}

/// Added to the sum of a token's sigmoids, which may all be 0 (the published models' code).
constexpr double kSigmoidFloor = 1e-20;

/// The scores by which experts are chosen, [M, E], and those from which loads are computed.
struct Ranked {
  at::Tensor values;
  at::Tensor probabilities;
};
Ranked ranked(const at::Tensor& wide, Scoring scoring) {
  if (scoring == Scoring::kSigmoid) {
    const at::Tensor each = at::sigmoid(wide);
    return {each, each / (each.sum(1, /*keepdim=*/true) + kSigmoidFloor)};
  }
  const at::Tensor probabilities = at::softmax(wide, 1);
  return {scoring == Scoring::kSoftmaxThenTopK ? probabilities : wide, probabilities};
}

/// Returns [] i64: a softmax is finite where its scores are, and one sum over all tells it for
/// every token; a sigmoid hides values that are not finite.
at::Tensor all_finite(const Ranked& ranked, const at::Tensor& wide, Scoring scoring) {
  const at::Tensor seen = scoring == Scoring::kSigmoid ? wide.detach() * 0.0  // NaN of what is not
                                                       : ranked.probabilities.detach();
  return seen.sum().isfinite().to(at::kLong);
}

using ChoiceHere = base::PassLocal<base::PassValue::kExpertChoice, const ChoiceScope*>;

}  // namespace

ChoiceScope::ChoiceScope(Choose choose)
    : choose_(std::move(choose)), outer_(std::exchange(ChoiceHere::here(), this)) {}
ChoiceScope::~ChoiceScope() { ChoiceHere::here() = outer_; }

Routing route(const at::Tensor& scores, const RouteOptions& options,
              const std::optional<at::Tensor>& imposed) {
  check_options(scores.size(1), options);
  Routing routing;
  const WideScope probabilities;
  const at::Tensor wide = scores.to(at::promote_types(scores.scalar_type(), at::kFloat));
  const Ranked by = ranked(wide, options.scoring);
  routing.probabilities = by.probabilities;
  routing.finite = all_finite(by, wide, options.scoring);
  routing.scores = scores.detach();
  if (imposed) {
    check_shape(*imposed, scores.size(0), options.experts_per_token);
    routing.indices = ascending(*imposed);
    if (imposed->is_cpu()) check_experts(routing.indices, scores.size(1));
  } else {
    const at::Tensor chosen = choose(by.values, options);
    if (ChoiceHere::here() != nullptr)
      ChoiceHere::here()->choose_({options.layer, scores.size(1)}, chosen);
    routing.indices = ascending(chosen);
  }
  const at::Tensor chosen = by.values.gather(1, routing.indices);
  routing.weights = chosen;
  if (options.scoring == Scoring::kTopKThenSoftmax) routing.weights = at::softmax(chosen, 1);
  if (options.scoring == Scoring::kTopKThenSigmoid) routing.weights = at::sigmoid(chosen);
  if (options.normalize) {
    const at::Tensor sum = routing.weights.sum(1, /*keepdim=*/true);
    routing.weights =
        routing.weights / (options.scoring == Scoring::kSigmoid ? sum + kSigmoidFloor : sum);
  }
  if (options.scaling_factor != 1.0) routing.weights = routing.weights * options.scaling_factor;
  return routing;
}

void check_imposed(const at::Tensor& indices, std::int64_t experts) {
  check_experts(ascending(indices), experts);
}

void check_finite(const Routing& routing, const at::Tensor& finite) {
  if (*finite.const_data_ptr<std::int64_t>() != 0) return;
  const at::Tensor bad = routing.scores.isfinite().all(1).logical_not();
  const std::int64_t first = bad.to(at::kByte).argmax().item<std::int64_t>();
  const at::Tensor row = routing.scores.select(0, first).to(at::kDouble);
  const std::int64_t expert =
      row.isfinite().logical_not().to(at::kByte).argmax().item<std::int64_t>();
  throw Error(
      ErrorKind::kNumeric,
      concat("routing: found ", bad.sum().item<std::int64_t>(), " of ", routing.scores.size(0),
             " tokens with scores that are not finite (token ", first, ", expert ", expert, ": ",
             row[expert].item<double>(),
             "), expected finite ones; the router's input or weights are not finite: lower the "
             "learning rate, or look at the step before"));
}

namespace {

using ChecksHere = base::PassLocal<base::PassValue::kScoreChecks, ScoreChecks*>;

}  // namespace

ScoreChecks::ScoreChecks() : outer_(std::exchange(ChecksHere::here(), this)) {}
ScoreChecks::~ScoreChecks() { ChecksHere::here() = outer_; }

at::Tensor NotedScores::flags() const { return flags_.empty() ? at::Tensor() : at::stack(flags_); }

void NotedScores::check(const at::Tensor& flags) const {
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    TESSERA_CHECK(flags.const_data_ptr<std::int64_t>()[i] != 0, ErrorKind::kNumeric, layers_[i],
                  ": found tokens with scores that are not finite, expected finite ones; the "
                  "router's input or weights are not finite: lower the learning rate, or look at "
                  "the step before");
  }
}

void ScoreChecks::note(const Routing& routing, const std::string& layer) {
  if (ChecksHere::here() == nullptr || !routing.finite.defined()) return;
  ChecksHere::here()->noted_.flags_.push_back(routing.finite);
  ChecksHere::here()->noted_.layers_.push_back(layer);
}

at::Tensor count_load(const at::Tensor& indices, std::int64_t experts) {
  // Not bincount: on a device it reads its result's size on the host.
  const at::Tensor rows = indices.reshape({-1});
  return at::zeros({experts}, indices.options()).scatter_add_(0, rows, at::ones_like(rows));
}

at::Tensor balanced_bias(const at::Tensor& bias, const at::Tensor& counts, double rate) {
  const at::Tensor wide = counts.to(at::kDouble);
  const at::Tensor change = at::sign(wide.mean() - wide) * rate;
  return bias + (change - change.mean()).to(bias.scalar_type());
}

double load_max_over_mean(const at::Tensor& counts) {
  const double mean = counts.to(at::kDouble).mean().item<double>();
  return mean == 0 ? 1.0 : counts.max().item<double>() / mean;
}

}  // namespace tessera::moe
