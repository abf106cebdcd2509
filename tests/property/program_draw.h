// How a Program is drawn: everything from one seed, with nothing that differs between machines.
#pragma once

#include <array>
#include <utility>

#include "property/fsdp_case_draw.h"
#include "property/program_rules.h"

namespace tessera::test {
namespace detail {

class ProgramDraw {
 public:
  ProgramDraw(std::uint64_t seed, const Features& features) : draw_(seed) {
    program_.seed = seed;
    program_.features = features;
  }

  Program make() {
    draw_layout();
    draw_model();
    draw_ties();
    ProgramRules rules(program_);
    rules_ = &rules;
    for (auto left = 8 + draw_.below(25); left > 0; --left) draw_op();
    draw_end();
    return std::move(program_);
  }

 private:
  bool may(Feature feature, std::size_t one_in) {
    const bool drawn = draw_.one_in(one_in);
    return program_.features.has(feature) && drawn;
  }

  void draw_layout() {
    program_.ranks = draw_.of({1, 2, 2, 2, 3, 3});
    if (may(Feature::kReplicas, 3)) {
      program_.ranks = draw_.of({2, 2, 4});
      program_.replicas = 2;
    }
    if (may(Feature::kGloo, 12) && program_.ranks > 1) program_.backend = ThreadBackend::kGloo;
    program_.doubles = draw_.one_in(2);
    if (may(Feature::kPolicies, 5)) {
      program_.doubles = false;
      program_.policy = draw_.of({ProgramPolicy::kNarrowCompute, ProgramPolicy::kNarrowWire});
    }
    program_.optimizer =
        draw_.of({ProgramOptimizer::kSgd, ProgramOptimizer::kSgd, ProgramOptimizer::kAdamW,
                  ProgramOptimizer::kTorchSgd, ProgramOptimizer::kTorchAdamW});
    // Where a gradient is nearly 0, AdamW's step is its sign.
    if (!program_.doubles && program_.optimizer == ProgramOptimizer::kAdamW)
      program_.optimizer = ProgramOptimizer::kSgd;
    if (!program_.doubles && program_.optimizer == ProgramOptimizer::kTorchAdamW)
      program_.optimizer = ProgramOptimizer::kTorchSgd;
    program_.in_flight_bytes =
        draw_.of<std::int64_t>({1, 1, 300, 1000, std::int64_t{32} << 20, std::int64_t{32} << 20});
    program_.merge_below_bytes = draw_.of<std::int64_t>({0, 0, 0, 100, 1 << 20});
    program_.lockstep = draw_.one_in(2);
    if (!program_.features.has(Feature::kDropDefer)) (draw_.one_in(2) ? drops_ : defers_) = false;
  }

  std::size_t draw_parameter() {
    ProgramParameter parameter;
    parameter.kind = draw_.of({ParameterKind::kScale, ParameterKind::kBias, ParameterKind::kMatrix,
                               ParameterKind::kLinear, ParameterKind::kLinear});
    parameter.trainable = !may(Feature::kFrozen, 6);
    program_.parameters.push_back(parameter);
    return program_.parameters.size() - 1;
  }
  RecomputeMode draw_mode(std::size_t one_in) {
    const auto mode = draw_.of({RecomputeMode::kFull, RecomputeMode::kSelective});
    return may(Feature::kRecompute, one_in) ? mode : RecomputeMode::kNone;
  }
  void draw_model() {
    const auto count = 1 + draw_.below(5);
    for (std::size_t i = 0; i < count; ++i) {
      ProgramNode node;
      if (i == 0) {
        // Every result depends on it, and it is always trained.
        program_.parameters.push_back({ParameterKind::kScale, true});
        node.parameters.push_back(0);
      }
      for (auto left = draw_.below(3) + (i == 0 ? 0 : 1); left > 0; --left)
        node.parameters.push_back(draw_parameter());
      node.inside = draw_mode(6);
      node.in_place = may(Feature::kInPlace, 5);
      program_.nodes.push_back(node);
      program_.reshard_after_forward.push_back(
          draw_.of<std::optional<bool>>({std::nullopt, std::nullopt, true, false}));
      if (i == 0) continue;
      ProgramChild child;
      const auto parent = draw_.one_in(2) ? 0 : draw_.below(i);
      child.node = i;
      child.unit = !draw_.one_in(5);
      child.outside = draw_mode(5);
      child.detached = may(Feature::kDetached, 6);
      child.is_second =
          may(Feature::kPartial, 4) && parent == 0 && !child.detached && !has_second_result();
      child.residual = !draw_.one_in(3);
      child.repeats = draw_.one_in(6) ? 2 : 1;
      program_.nodes[parent].children.push_back(child);
    }
  }
  bool has_second_result() const { return program_.has_second_result(); }
  /// A parameter of one node in another one too.
  void draw_ties() {
    for (std::size_t p = 1; p < program_.parameters.size(); ++p) {
      if (!may(Feature::kTies, 8)) continue;
      auto& target = program_.nodes[draw_.below(program_.nodes.size())].parameters;
      if (std::find(target.begin(), target.end(), p) == target.end()) target.push_back(p);
    }
  }

  // --- operations ---

  static constexpr std::array<std::pair<Act, int>, 31> kWeights = {{
      {Act::kForward, 40},
      {Act::kBackward, 44},
      {Act::kEvaluate, 6},
      {Act::kForget, 6},
      {Act::kScaleResult, 4},
      {Act::kZeroGrad, 8},
      {Act::kHalveGradients, 4},
      {Act::kRead, 10},
      {Act::kNorm, 3},
      {Act::kStep, 12},
      {Act::kSync, 7},
      {Act::kReplicaReduce, 3},
      {Act::kLastBackward, 5},
      {Act::kDefer, 8},
      {Act::kRedeem, 20},
      {Act::kRunWeights, 7},
      {Act::kReshardAfterForward, 3},
      {Act::kReshardAfterBackward, 3},
      {Act::kUnshardInBackward, 2},
      {Act::kForwardPrefetch, 2},
      {Act::kBackwardPrefetch, 2},
      {Act::kDivideFactor, 2},
      {Act::kUnshard, 2},
      {Act::kUnshardAsync, 2},
      {Act::kReshard, 2},
      {Act::kSetTrainable, 4},
      {Act::kThrowInForward, 1},
      {Act::kThrowInBackward, 1},
      {Act::kChangeArgument, 1},
      {Act::kChangeHeldResult, 1},
      {Act::kInputGradient, 2},
  }};
  static_assert(kWeights.size() == static_cast<std::size_t>(Act::kCount));

  bool allows(Act act) const {
    const auto has = [this](Feature feature) { return program_.features.has(feature); };
    switch (act) {
      case Act::kScaleResult:
        return has(Feature::kInPlace);
      case Act::kSync:
      case Act::kReplicaReduce:
      case Act::kLastBackward:
        return has(Feature::kAccumulate);
      case Act::kDefer:
      case Act::kRunWeights:
        return has(Feature::kDefer) && defers_;
      case Act::kRedeem:
        return rules_->waits_for_tickets();
      case Act::kReshardAfterForward:
      case Act::kReshardAfterBackward:
      case Act::kUnshardInBackward:
      case Act::kForwardPrefetch:
      case Act::kBackwardPrefetch:
      case Act::kDivideFactor:
      case Act::kUnshard:
      case Act::kUnshardAsync:
      case Act::kReshard:
        return has(Feature::kControls);
      case Act::kSetTrainable:
        return has(Feature::kChanges);
      case Act::kThrowInForward:
      case Act::kThrowInBackward:
        return has(Feature::kFailures);
      case Act::kChangeArgument:
      case Act::kChangeHeldResult:
      case Act::kInputGradient:
        return has(Feature::kForbidden);
      default:
        return true;
    }
  }
  Act draw_act() {
    int all = 0;
    for (const auto& [act, weight] : kWeights) all += allows(act) ? weight : 0;
    auto at = static_cast<int>(draw_.below(static_cast<std::size_t>(all)));
    for (const auto& [act, weight] : kWeights) {
      if (!allows(act)) continue;
      at -= weight;
      if (at < 0) return act;
    }
    return Act::kForward;
  }

  void draw_op() {
    for (int attempt = 0; attempt < 8; ++attempt) {
      if (add(fill(draw_act()))) return;
    }
  }
  bool add(const Op& op) {
    const auto expected = rules_->expect(op);
    if (expected == Expect::kNothing) return false;
    if (expected == Expect::kRefused && !program_.features.has(Feature::kForbidden)) return false;
    rules_->done(op, expected);
    program_.ops.push_back(op);
    return true;
  }
  int below(std::size_t bound) { return static_cast<int>(draw_.below(bound)); }
  int draw_rank() { return below(static_cast<std::size_t>(program_.ranks)); }
  int draw_unit() { return below(program_.units().size()); }

  Op fill(Act act) {
    Op op;
    op.act = act;
    op.on = draw_.one_in(2);
    op.recurse = !draw_.one_in(3);
    op.seed = program_.seed * 1000 + program_.ops.size();
    switch (act) {
      case Act::kForward:
        fill_forward(op);
        break;
      case Act::kBackward:
        fill_backward(op);
        break;
      case Act::kForget:
      case Act::kScaleResult:
        op.result = next_ > 0 ? below(static_cast<std::size_t>(next_)) : 0;
        break;
      case Act::kZeroGrad:
        op.on = !draw_.one_in(3);
        break;
      case Act::kSync:
        op.on = !draw_.one_in(3);
        op.unit = draw_.one_in(2) ? 0 : draw_unit();
        break;
      case Act::kReshardAfterForward:
      case Act::kReshardAfterBackward:
      case Act::kUnshardInBackward:
      case Act::kUnshard:
      case Act::kUnshardAsync:
      case Act::kReshard:
        op.unit = draw_unit();
        break;
      case Act::kForwardPrefetch:
      case Act::kBackwardPrefetch:
        op.unit = draw_unit();
        for (auto left = draw_.below(3); left > 0; --left) op.units.push_back(draw_unit());
        break;
      case Act::kDivideFactor:
        op.factor = draw_.of({1.0, 2.0, 3.0, 0.5});
        break;
      case Act::kSetTrainable:
        op.parameter = below(program_.parameters.size());
        break;
      case Act::kInputGradient:
        op.input_grad = true;
        break;
      case Act::kRedeem:
        op.result = below(static_cast<std::size_t>(rules_->backwards_since_redeemed()) + 1);
        op.rank = draw_.one_in(2) ? -1 : draw_rank();
        break;
      default:
        op.node = below(program_.nodes.size());
        op.rank = draw_.one_in(3) ? -1 : draw_rank();
        break;
    }
    return op;
  }

  void fill_forward(Op& op) {
    op.result = next_++;
    op.input_grad = draw_.one_in(4);
    if (may(Feature::kInner, 10)) op.unit = draw_unit();
    // All that it holds may be frozen.
    op.input_grad = op.input_grad || op.unit != 0;
    if (op.result > 0 && draw_.one_in(3)) {
      op.from =
          op.result - 1 - below(std::min<std::size_t>(3, static_cast<std::size_t>(op.result)));
      op.detached = draw_.one_in(3) || !program_.features.has(Feature::kRetain);
    }
    if (drops_ && may(Feature::kDrop, 3) && program_.nodes.size() > 1 && op.unit == 0) {
      op.node = 1 + below(program_.nodes.size() - 1);
      op.rank = draw_rank();
    }
    if (op.node >= 0 && program_.call_of(static_cast<std::size_t>(op.node))->is_second)
      op.node = op.rank = -1;
  }
  void fill_backward(Op& op) {
    std::vector<ProgramRoot> candidates;
    for (const auto& [result, kept] : rules_->kept()) {
      if (!kept.alive || (kept.freed && !draw_.one_in(4))) continue;
      candidates.push_back({result, 0});
      if (kept.unit == 0 && has_second_result()) candidates.push_back({result, 1});
    }
    op.retain = may(Feature::kRetain, 3);
    if (candidates.empty()) return;
    const bool several = program_.features.has(Feature::kSeveral);
    const auto first = candidates[draw_.below(candidates.size())];
    for (const auto& one : candidates) {
      const bool same = one.result == first.result;
      const bool is_first = same && one.output == first.output;
      if (is_first || (same ? !may(Feature::kPartial, 3) : several && draw_.one_in(3)))
        op.roots.push_back(one);
    }
    if (op.roots.size() > 1 && draw_.one_in(3)) std::swap(op.roots.front(), op.roots.back());
    if (may(Feature::kDropRoot, 3)) op.rank = draw_rank();
    if (rules_->expect(op) == Expect::kNothing) op.rank = -1;
  }

  /// Draws the end of every program: controls as they were, and two plain steps.
  void draw_end() {
    for (const auto act : {Act::kSync, Act::kReplicaReduce, Act::kLastBackward}) {
      Op on;
      on.act = act;
      add(on);
    }
    const auto plain = [this](Act act) {
      Op op;
      op.act = act;
      op.seed = program_.seed * 1000 + program_.ops.size();
      if (act == Act::kForward) op.result = next_++;
      if (act == Act::kBackward) op.roots = {{next_ - 1, 0}};
      if (act == Act::kForget) op.result = next_ - 1;
      add(op);
    };
    for (int result = 0; result < next_; ++result) {
      Op forget;
      forget.act = Act::kForget;
      forget.result = result;
      add(forget);
    }
    for (int step = 0; step < 3; ++step) {
      plain(Act::kForward);
      plain(Act::kBackward);
      plain(Act::kForget);
      plain(Act::kRunWeights);
      plain(Act::kRead);
      plain(Act::kStep);
      plain(Act::kZeroGrad);
    }
  }

  Draw draw_;
  Program program_;
  ProgramRules* rules_ = nullptr;
  int next_ = 0;
  bool drops_ = true, defers_ = true;
};

}  // namespace detail

inline Program Program::draw(std::uint64_t seed, const Features& features) {
  return detail::ProgramDraw(seed, features).make();
}

}  // namespace tessera::test
