// Rules: what an operation of a Program may do at its place: nothing (it has lost its meaning), run
// as unsharded, or be refused. Follows the program from operation to operation, as docs/fsdp2.md
// says it; knows nothing of how fsdp works.
#pragma once

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "property/program.h"

namespace tessera::test {

enum class Expect : std::uint8_t { kNothing, kRuns, kRefused };

class ProgramRules {
 public:
  explicit ProgramRules(const Program& program)
      : program_(program), units_(program.units()), sync_(units_.size(), true) {
    for (const auto& parameter : program.parameters) trainable_.push_back(parameter.trainable);
  }

  struct Kept {
    int unit = 0;
    int from = -1;        ///< the result whose history it continues
    bool alive = true;    ///< the program still has it
    bool waiting = true;  ///< no backward has been there
    bool freed = false;   ///< its graph is gone
    bool stale = false;   ///< weights have changed since
    bool used = false;    ///< others depend on its values
  };
  const std::map<int, Kept>& kept() const { return kept_; }
  bool trains(std::size_t parameter) const { return trainable_[parameter]; }
  bool waits_for_tickets() const { return awaiting_; }
  /// Backwards since all tickets were redeemed.
  int backwards_since_redeemed() const { return backwards_; }
  bool waits_to_be_shown() const { return pending_ || awaiting_; }
  std::size_t node_of(const Op& op) const {
    return units_[static_cast<std::size_t>(op.unit) % units_.size()];
  }
  /// A result and those whose history it continues.
  std::set<int> reached(int result) const {
    std::set<int> all;
    for (int at = result; at >= 0 && kept_.count(at) > 0; at = kept_.at(at).from) all.insert(at);
    return all;
  }

  Expect expect(const Op& op) const {
    switch (op.act) {
      case Act::kForward:
        return when(op.node < 0 || drops(op)) && may_continue(op) ? Expect::kRuns
                                                                  : Expect::kNothing;
      case Act::kBackward:
        return expect_backward(op);
      case Act::kEvaluate:
      case Act::kUnshard:
      case Act::kUnshardAsync:
        return Expect::kRuns;
      case Act::kReshard:
      case Act::kRunWeights:
        return lingers_ && !program_.features.has(Feature::kIdleAfterFailure) ? Expect::kNothing
                                                                              : Expect::kRuns;
      case Act::kRedeem:
        return awaiting_ && op.rank < program_.ranks ? Expect::kRuns : Expect::kNothing;
      case Act::kForget:
        return when(lives(op.result)) ? Expect::kRuns : Expect::kNothing;
      case Act::kScaleResult:
        return lives(op.result) && !kept_.at(op.result).used && kept_.at(op.result).unit == 0
                   ? Expect::kRuns
                   : Expect::kNothing;
      case Act::kZeroGrad:
        return awaiting_ ? Expect::kNothing : Expect::kRuns;
      case Act::kHalveGradients:
        if (failed_ || awaiting_) return Expect::kNothing;
        if (!pending_) return Expect::kRuns;
        return surely_pending_ && shows_root_ ? Expect::kRefused : Expect::kNothing;
      case Act::kSync:
      case Act::kReplicaReduce:
      case Act::kLastBackward:
        return awaiting_ && !op.on ? Expect::kNothing : Expect::kRuns;
      case Act::kRead:
      case Act::kNorm:
      case Act::kStep:
        return expect_reader(op);
      case Act::kThrowInForward:
        return is_node(op.node) && op.rank < program_.ranks ? Expect::kRuns : Expect::kNothing;
      case Act::kThrowInBackward:
        return op.rank < program_.ranks ? Expect::kRuns : Expect::kNothing;
      case Act::kChangeArgument:
        return is_node(op.node) && program_.call_of(node(op)) != nullptr &&
                       program_.call_of(node(op))->unit && is_attached(node(op))
                   ? Expect::kRefused
                   : Expect::kNothing;
      case Act::kChangeHeldResult:
        return Expect::kRefused;
      case Act::kInputGradient:
        if (awaiting_ || !is_whole()) return Expect::kNothing;
        return reaches_recomputation() ? Expect::kRefused : Expect::kRuns;
      default:
        return expect_control(op);
    }
  }

  /// `op` has run, or was refused as expected.
  void done(const Op& op, Expect expected) {
    if (expected == Expect::kNothing) return;
    const bool refused = expected == Expect::kRefused;
    switch (op.act) {
      case Act::kForward:
        failed_ = false;
        kept_[op.result] = {.unit = op.unit, .from = op.detached ? -1 : op.from};
        if (op.from >= 0) kept_.at(op.from).used = true;
        return;
      case Act::kEvaluate:
        failed_ = false;
        return;
      case Act::kBackward:
        return refused ? fail() : backward_done(op);
      case Act::kForget:
        kept_.at(op.result).alive = false;
        return;
      case Act::kScaleResult:
        return;
      case Act::kZeroGrad:
        maybe_lost_ = surely_lost_ = false;
        if (op.on) sum_of_root_ = false;
        if (op.on && !pending_) any_sum_ = false;
        shows_root_ = false;
        return;
      case Act::kStep:
        for (auto& [result, one] : kept_) one.stale = one.stale || !refused;
        return;
      case Act::kSync:
        for (std::size_t i = 0; i < units_.size(); ++i) {
          if (units_[i] == node_of(op) || (op.recurse && is_below(units_[i], node_of(op))))
            sync_[i] = op.on;
        }
        return;
      case Act::kReplicaReduce:
        replicas_too_ = op.on;
        return;
      case Act::kLastBackward:
        last_ = op.on;
        return;
      case Act::kDefer:
        if (!refused) defers_ = op.on;
        return;
      case Act::kRedeem:
        surely_awaiting_ = false;  // a backward that leaves none shows all then
        return;
      case Act::kRunWeights:
        return weights_done();
      case Act::kSetTrainable:
        if (refused) return;
        trainable_[static_cast<std::size_t>(op.parameter)] = op.on;
        kept_.clear();
        return;
      case Act::kHalveGradients:
        return refused ? fail() : void();
      case Act::kThrowInForward:
      case Act::kThrowInBackward:
      case Act::kChangeArgument:
      case Act::kChangeHeldResult:
        return fail();
      case Act::kInputGradient:
        if (refused) return fail();
        failed_ = pending_ = surely_pending_ = false;
        return;
      default:
        return;
    }
  }

 private:
  static bool when(bool condition) { return condition; }
  std::size_t node(const Op& op) const { return static_cast<std::size_t>(op.node); }
  bool is_node(int number) const {
    return number >= 0 && static_cast<std::size_t>(number) < program_.nodes.size();
  }
  bool is_below(std::size_t inner, std::size_t outer) const {
    for (auto at = inner; at != 0; at = program_.parent_of(at)) {
      if (program_.parent_of(at) == outer) return true;
    }
    return false;
  }
  /// Gradients flow through it to the model's input.
  bool is_attached(std::size_t number) const {
    for (auto at = number; at != 0; at = program_.parent_of(at)) {
      if (program_.call_of(at)->detached) return false;
    }
    return true;
  }
  bool drops(const Op& op) const {
    return is_node(op.node) && op.rank < program_.ranks && program_.call_of(node(op)) != nullptr &&
           !program_.call_of(node(op))->is_second;
  }
  bool lives(int result) const { return kept_.count(result) > 0 && kept_.at(result).alive; }
  bool may_continue(const Op& op) const {
    if (op.from < 0) return true;
    if (!lives(op.from)) return false;
    return op.detached || has_graph(op.from, /*stale=*/false);
  }
  bool has_graph(int result, bool stale_too) const {
    const auto all = reached(result);
    return std::none_of(all.begin(), all.end(), [&](int one) {
      return kept_.at(one).freed || (!stale_too && kept_.at(one).stale);
    });
  }
  bool is_ours() const {
    return program_.optimizer == ProgramOptimizer::kSgd ||
           program_.optimizer == ProgramOptimizer::kAdamW;
  }

  Expect expect_backward(const Op& op) const {
    if (op.roots.empty()) return Expect::kNothing;
    std::set<int> of_all, of_others;
    for (const auto& root : op.roots) {
      if (!lives(root.result) || !has_graph(root.result, /*stale_too=*/true))
        return Expect::kNothing;
      const auto& one = kept_.at(root.result);
      if (root.output == 1 && (one.unit != 0 || !program_.has_second_result()))
        return Expect::kNothing;
      of_others = of_all;
      of_all.merge(reached(root.result));
    }
    if (op.rank >= 0 && (of_others.size() < of_all.size() || op.rank >= program_.ranks))
      return Expect::kNothing;
    const bool stale =
        std::any_of(of_all.begin(), of_all.end(), [&](int one) { return kept_.at(one).stale; });
    if (!stale) return Expect::kRuns;
    return is_ours() ? Expect::kRefused : Expect::kNothing;
  }

  Expect expect_reader(const Op& op) const {
    if (failed_) return Expect::kNothing;
    const bool steps = op.act == Act::kStep;
    if (maybe_lost_ && op.act != Act::kRead && (is_ours() || !steps)) {
      return surely_lost_ ? Expect::kRefused : Expect::kNothing;
    }
    if (steps && !is_ours() && (waits_to_be_shown() || is_outstanding())) return Expect::kNothing;
    if (steps && is_outstanding()) return Expect::kRefused;
    if (awaiting_) return surely_awaiting_ ? Expect::kRefused : Expect::kNothing;
    if (pending_)
      return surely_pending_ && op.act != Act::kRead ? Expect::kRefused : Expect::kNothing;
    return steps && !sum_of_root_ ? Expect::kNothing : Expect::kRuns;
  }

  /// Returns what to expect of controls for an idle model.
  Expect expect_control(const Op& op) const {
    if (op.act == Act::kUnshardInBackward && !op.on && !reads_nothing(node_of(op)))
      return Expect::kNothing;
    if (op.act == Act::kSetTrainable &&
        (failed_ || op.parameter <= 0 ||
         static_cast<std::size_t>(op.parameter) >= program_.parameters.size()))
      return Expect::kNothing;
    if (is_outstanding()) return Expect::kRefused;
    if (lingers_ && !program_.features.has(Feature::kIdleAfterFailure)) return Expect::kNothing;
    if (awaiting_) return surely_awaiting_ ? Expect::kRefused : Expect::kNothing;
    if (op.act == Act::kDivideFactor || op.act == Act::kSetTrainable) {
      if (pending_) return surely_pending_ ? Expect::kRefused : Expect::kNothing;
      if (any_sum_) return sum_of_root_ ? Expect::kRefused : Expect::kNothing;
    }
    return Expect::kRuns;
  }

  /// The unit's backward, and nothing recomputes it.
  bool reads_nothing(std::size_t unit) const {
    if (unit == 0 || program_.recomputes()) return false;
    for (std::size_t i = 0; i < program_.nodes.size(); ++i) {
      if (i != unit && !is_below(i, unit)) continue;
      for (const auto parameter : program_.nodes[i].parameters) {
        if (program_.parameters[parameter].kind != ParameterKind::kBias) return false;
      }
    }
    return true;
  }
  bool reaches_recomputation() const {
    for (std::size_t i = 0; i < program_.nodes.size(); ++i) {
      const auto* call = program_.call_of(i);
      const bool outside = call != nullptr && call->outside != RecomputeMode::kNone;
      if (is_attached(i) && (outside || program_.nodes[i].inside != RecomputeMode::kNone))
        return true;
    }
    return false;
  }
  bool is_whole() const {
    return last_ && (replicas_too_ || program_.replicas == 1) &&
           std::find(sync_.begin(), sync_.end(), false) == sync_.end();
  }
  bool is_outstanding() const {
    return std::any_of(kept_.begin(), kept_.end(), [&](const auto& holder) {
      if (!holder.second.alive) return false;
      const auto all = reached(holder.first);
      return std::any_of(all.begin(), all.end(), [&](int one) { return kept_.at(one).waiting; });
    });
  }

  void backward_done(const Op& op) {
    bool of_root = false, of_first = false;
    for (std::size_t i = 0; i < op.roots.size(); ++i) {
      const auto& root = op.roots[i];
      kept_.at(root.result).used = true;
      const bool on_all = op.rank < 0 || i + 1 < op.roots.size();
      for (const int one : reached(root.result)) {
        auto& kept = kept_.at(one);
        kept.waiting = false;
        kept.freed = kept.freed || !op.retain;
        of_root = of_root || (kept.unit == 0 && on_all);
      }
      of_first = of_first || (on_all && root.output == 0 && kept_.at(root.result).unit == 0);
    }
    any_sum_ = true;
    lingers_ = false;
    sum_of_root_ = sum_of_root_ || of_root;
    ++backwards_;
    if (defers_ && leaves_weights()) {
      awaiting_ = true;
      surely_awaiting_ = surely_awaiting_ || (of_first && leaves_weights(0));
    }
    was_whole_ = is_whole();
    pending_ = !was_whole_;
    shows_root_ = shows_root_ || (of_root && was_whole_ && !awaiting_);
    // At least what the model's own unit holds.
    surely_pending_ = of_root && (!sync_[0] || !last_ || (!replicas_too_ && program_.replicas > 1));
  }
  void weights_done() {
    backwards_ = 0;
    if (!awaiting_) return;
    const bool settles = is_whole() && (was_whole_ || surely_awaiting_);
    pending_ = pending_ && !settles;
    surely_pending_ = surely_pending_ && !is_whole();
    awaiting_ = surely_awaiting_ = false;
  }
  bool leaves_weights(std::optional<std::size_t> only = std::nullopt) const {
    for (std::size_t i = 0; i < program_.nodes.size(); ++i) {
      if (only && i != *only) continue;
      for (const auto p : program_.nodes[i].parameters) {
        if (program_.parameters[p].kind == ParameterKind::kLinear && trainable_[p]) return true;
      }
    }
    return false;
  }
  void fail() {
    kept_.clear();
    surely_lost_ = surely_lost_ || (sum_of_root_ && !waits_to_be_shown());
    maybe_lost_ = maybe_lost_ || any_sum_;
    pending_ = surely_pending_ = awaiting_ = surely_awaiting_ = any_sum_ = sum_of_root_ =
        shows_root_ = false;
    failed_ = lingers_ = true;
    backwards_ = 0;
  }

  const Program& program_;
  std::vector<std::size_t> units_;
  std::vector<bool> sync_, trainable_;
  std::map<int, Kept> kept_;
  bool replicas_too_ = true, last_ = true, defers_ = false;
  bool awaiting_ = false, surely_awaiting_ = false;  ///< tickets are open
  int backwards_ = 0;
  bool pending_ = false, surely_pending_ = false;  ///< sums that no gradient shows
  bool was_whole_ = true;                          ///< the last backward showed all
  bool any_sum_ = false, sum_of_root_ = false;     ///< since gradients were last set to none
  bool maybe_lost_ = false, surely_lost_ = false;  ///< to a failure, since zero_grad
  bool shows_root_ = false;                        ///< a gradient that is not 0
  bool failed_ = false;                            ///< nothing has begun since
  bool lingers_ = false;  ///< a thread's queue may hold nodes of a backward that has failed
};

}  // namespace tessera::test
