// Routing: which experts a token goes to, with which weights, how evenly, and the bias that evens
// the load without an auxiliary loss.
//
// The router's scores come from the family; this file has the common part: a softmax, the best k,
// and their weights. Everything is fp32 from the scores on (fp64 for fp64 scores); a family that
// needs narrower weights casts them. Gradients flow through the weights, never through the choice.
// Load balance is pure functions of tensors: the caller sums counts over layers and ranks, and
// leaves out places that packed rows leave empty. Nothing is padded on the way to the experts.
// Short symbols: M tokens, E experts, K experts a token. Next: experts.h, train/expert_balance.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace tessera::moe {

enum class Scoring : std::uint8_t {
  kSoftmaxThenTopK,  ///< probabilities over all experts, the largest k of them
  kTopKThenSoftmax,  ///< the largest k scores, probabilities over those alone
  kTopKThenSigmoid,  ///< the largest k scores, the sigmoid of each (Llama 4)
  kSigmoid,          ///< the sigmoid of each score, the largest k of them (DeepSeek V3)
};

struct RouteOptions {
  std::int64_t experts_per_token = 1;
  Scoring scoring = Scoring::kSoftmaxThenTopK;
  bool normalize = false;       ///< weights divided by their sum (norm_topk_prob)
  double scaling_factor = 1.0;  ///< then times this (routed_scaling_factor)
  /// Experts are in `groups` groups of consecutive numbers and equal size; a token chooses within
  /// the `top_groups` whose best expert scores most (group_limited_greedy); with kSigmoid within
  /// those whose two best score most together, the bias included (noaux_tc).
  std::int64_t groups = 1;
  std::int64_t top_groups = 1;
  /// [E] fp32, added to the scores for the choice only; undefined: none.
  at::Tensor expert_bias = {};
  std::int64_t layer = 0;  ///< the layer's number, for a ChoiceScope
};

struct Routing {
  at::Tensor indices;        ///< [M, K] i64, ascending: a token meets an expert at most once
  at::Tensor weights;        ///< [M, K]
  at::Tensor probabilities;  ///< [M, E]: the softmax over all experts; for sigmoids their shares
  /// i64: 1 where all scores are finite, else 0; undefined: not requested
  at::Tensor finite = {};
  at::Tensor scores = {};  ///< [M, E], without gradient: for check_finite
};

/// scores [M, E]. `imposed` [M, K] i64 replaces the choice, in any order. Errors: kFormat for
/// imposed indices of another shape, outside 0..E-1, or twice in a row (unchecked on a device: the
/// code that copies them there calls check_imposed before); kConfig for options that E does not
/// fit. Reads no value on the host unless routing is imposed; code that reads values (experts.h)
/// calls check_finite.
Routing route(const at::Tensor& scores, const RouteOptions& options,
              const std::optional<at::Tensor>& imposed = std::nullopt);

/// Checks imposed indices [M, K] i64 on the CPU, in any order. Errors: kFormat for an expert
/// outside 0..experts-1, or twice in a row.
void check_imposed(const at::Tensor& indices, std::int64_t experts);

/// `finite` is Routing's, as the host has read it. Errors: kNumeric, naming the first token whose
/// scores are not finite.
void check_finite(const Routing& routing, const at::Tensor& finite);

/// The notes of experts on a device about their scores, not read yet.
class NotedScores {
 public:
  /// [calls] i64 on their device; undefined where nothing was noted.
  at::Tensor flags() const;
  /// flags(), as the host has read it. Errors: kNumeric naming the first layer whose scores are not
  /// finite.
  void check(const at::Tensor& flags) const;

 private:
  friend class ScoreChecks;
  std::vector<at::Tensor> flags_;
  std::vector<std::string> layers_;
};

/// While one lives, experts on a device do not make the host wait to learn whether their scores are
/// finite: they note it here, and code that reads values of a step anyway reads this with them.
/// Without one the scores are not checked. It belongs to the thread that makes it; the last one
/// made gets the notes.
class ScoreChecks {
 public:
  ScoreChecks();
  ~ScoreChecks();
  ScoreChecks(const ScoreChecks&) = delete;
  ScoreChecks& operator=(const ScoreChecks&) = delete;

  const NotedScores& noted() const { return noted_; }

  static void note(const Routing& routing, const std::string& layer);

 private:
  ScoreChecks* const outer_;
  NotedScores noted_;
};

/// While one lives, it chooses the experts of this thread's tokens where nothing is imposed: in a
/// dry run scores have no values.
class ChoiceScope {
 public:
  struct Asked {
    std::int64_t layer = 0;  ///< RouteOptions::layer
    std::int64_t experts = 0;
  };
  /// Writes chosen [M, K] i64, contiguous, each row in any order, an expert at most once in a row.
  using Choose = std::function<void(const Asked& asked, const at::Tensor& chosen)>;

  explicit ChoiceScope(Choose choose);
  ~ChoiceScope();
  ChoiceScope(const ChoiceScope&) = delete;
  ChoiceScope& operator=(const ChoiceScope&) = delete;

 private:
  friend Routing route(const at::Tensor& scores, const RouteOptions& options,
                       const std::optional<at::Tensor>& imposed);
  const Choose choose_;
  const ChoiceScope* const outer_;
};

/// indices [M, K] -> [E] i64: how often each expert was chosen. No gradient.
at::Tensor count_load(const at::Tensor& indices, std::int64_t experts);

/// bias [E] fp32 after a step in which experts had `counts` [E] rows: those below the mean rise by
/// `rate`, those above it fall, and the mean of all changes is subtracted.
at::Tensor balanced_bias(const at::Tensor& bias, const at::Tensor& counts, double rate);

/// Returns the busiest expert's rows over the mean; 1 where there are no rows.
double load_max_over_mean(const at::Tensor& counts);

}  // namespace tessera::moe
