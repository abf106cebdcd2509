// How a Case is drawn: everything from one seed, with nothing that differs between machines.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "property/fsdp_case.h"

namespace tessera::test {
namespace detail {

/// Draws with nothing that differs between standard libraries.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : engine_(seed) {}
  std::size_t below(std::size_t bound) { return static_cast<std::size_t>(engine_() % bound); }
  bool one_in(std::size_t n) { return below(n) == 0; }
  template <class T>
  T of(std::initializer_list<T> values) {
    return *(values.begin() + static_cast<std::ptrdiff_t>(below(values.size())));
  }

 private:
  std::mt19937_64 engine_;
};

inline CaseParameter draw_parameter(Draw& draw, std::uint64_t seed, int ranks) {
  CaseParameter p;
  const auto shape = draw.of<std::vector<std::int64_t>>({{},
                                                         {1},
                                                         {kColumns},
                                                         {kColumns},
                                                         {3, kColumns},
                                                         {5, kColumns},
                                                         {7},
                                                         {13},
                                                         {3, 11},
                                                         {0},
                                                         {0, 3},
                                                         {2, 3, 5},
                                                         {67},
                                                         {129}});
  if (draw.one_in(12)) {
    p.initial = at::arange(5) - 2;
    p.trainable = false;
    return p;
  }
  const auto dtype = draw.of({at::kFloat, at::kFloat, at::kFloat, at::kFloat, at::kBFloat16,
                              at::kBFloat16, at::kBFloat16, at::kDouble, at::kHalf});
  p.initial = seeded(seed, shape, dtype);
  if (p.initial.dim() == 2 && draw.one_in(3)) p.initial = p.initial.t().contiguous().t();
  p.coefficients = seeded(seed + 500, shape);
  p.trainable = !draw.one_in(6);
  if (draw.one_in(5))
    p.used_by = draw.one_in(2) ? -1 : static_cast<int>(draw.below(static_cast<std::size_t>(ranks)));
  if (draw.one_in(8)) p.own_grad_dtype = draw.of({at::kFloat, at::kBFloat16, dtype});
  if (draw.one_in(8)) p.published = draw.of({DType::kFloat32, DType::kBFloat16});
  return p;
}

/// LoRA as it is used: a base that is mostly frozen and narrow, and two thin matrices in fp32.
inline void draw_adapter(Draw& draw, Case& c, CaseNode& node) {
  const auto rank = static_cast<std::int64_t>(1 + draw.below(3));
  const auto add = [&](at::IntArrayRef shape, at::ScalarType dtype, bool trainable) {
    const auto seed = c.seed * 100 + 50 + c.objects.size();
    c.parameters.push_back({seeded(seed, shape, dtype), {}, trainable});
    c.objects.push_back({c.parameters.size() - 1, /*in_adapter=*/true});
    node.objects.push_back(c.objects.size() - 1);
    return c.objects.size() - 1;
  };
  CaseAdapter adapter;
  adapter.base = add({kColumns, kColumns}, draw.of({at::kBFloat16, at::kBFloat16, at::kFloat}),
                     draw.one_in(4));
  const auto thin = draw.of({at::kFloat, at::kFloat, at::kFloat, at::kBFloat16});
  adapter.a = add({rank, kColumns}, thin, true);
  adapter.b = add({kColumns, rank}, thin, true);
  node.adapters.push_back(adapter);
}

inline void draw_tree(Draw& draw, Case& c) {
  const auto count = 1 + draw.below(6);
  for (std::size_t i = 0; i < count; ++i) {
    CaseNode node;
    if (i > 0) {
      const auto parent = draw.below(i);
      CaseChild child;
      child.node = i;
      child.handle = draw.one_in(2);
      child.recomputes = draw.one_in(4);
      child.mode = draw.of({RecomputeMode::kFull, RecomputeMode::kSelective});
      child.repeats = draw.one_in(6) ? 2 : 1;
      node.unit = child.handle ? i : c.nodes[parent].unit;
      c.nodes[parent].children.push_back(child);
    }
    for (auto left = draw.below(4) + (i == 0 ? 1 : 0); left > 0; --left) {
      node.objects.push_back(c.objects.size());
      c.objects.push_back({c.parameters.size(), /*in_adapter=*/false});
      c.parameters.push_back(draw_parameter(draw, c.seed * 100 + c.objects.size(), c.ranks));
    }
    if (draw.one_in(4)) draw_adapter(draw, c, node);
    if (draw.one_in(3))
      node.buffer = seeded(c.seed * 100 + 80 + i, {kColumns},
                           draw.of({at::kFloat, at::kFloat, at::kBFloat16, at::kDouble}));
    c.nodes.push_back(std::move(node));
  }
  auto& first = c.parameters[c.objects[c.nodes[0].objects[0]].parameter];
  first = {seeded(c.seed, {kColumns}), seeded(c.seed + 1, {kColumns}), true,
           -2};  // every loss depends on it
}

/// One object in a second node; or a second object over the same storage, in the same unit.
inline void draw_ties(Draw& draw, Case& c) {
  const auto own = c.objects.size();
  for (std::size_t object = 0; object < own; ++object) {
    if (!draw.one_in(6) || c.objects[object].in_adapter) continue;
    const auto target = draw.below(c.nodes.size());
    auto& node = c.nodes[target];
    if (std::find(node.objects.begin(), node.objects.end(), object) != node.objects.end()) continue;
    const auto home = std::find_if(c.nodes.begin(), c.nodes.end(), [&](const auto& n) {
      return std::find(n.objects.begin(), n.objects.end(), object) != n.objects.end();
    });
    const bool alias = home->unit == node.unit && draw.one_in(2) &&
                       c.parameters[c.objects[object].parameter].initial.numel() > 0;
    if (!alias) {
      node.objects.push_back(object);
    } else {
      node.objects.push_back(c.objects.size());
      c.objects.push_back(c.objects[object]);
    }
  }
}

inline bool appears_once(const Case& c, std::size_t object) {
  int nodes = 0, objects = 0;
  for (const auto& node : c.nodes)
    nodes += static_cast<int>(std::count(node.objects.begin(), node.objects.end(), object));
  for (const auto& other : c.objects)
    objects += other.parameter == c.objects[object].parameter ? 1 : 0;
  return nodes == 1 && objects == 1;
}

inline PrecisionRule draw_rule(Draw& draw, std::size_t object) {
  PrecisionRule rule;
  rule.match = {Case::name_of(object)};
  switch (draw.below(8)) {
    case 0:
      rule.grad_dtype = draw.of({DType::kBFloat16, DType::kBFloat16, DType::kFloat32});
      break;
    case 1:
      rule.pin = true;
      rule.widen = true;
      break;
    case 2:
      rule.param_dtype = draw.of({DType::kBFloat16, DType::kFloat32});
      break;
    case 3:
      rule.reduce_dtype = draw.of({DType::kBFloat16, DType::kFloat64});
      rule.accumulate_dtype = DType::kFloat64;
      break;
    case 4:
      rule.accumulate_dtype = DType::kFloat64;
      break;
    case 5:
      rule.storage_dtype = draw.of({DType::kBFloat16, DType::kFloat32});
      break;
    case 6:
      rule.frozen = FrozenRule::kNo;
      break;
    default:
      rule.frozen = draw.of({FrozenRule::kYes, FrozenRule::kShard, FrozenRule::kReplicate});
      break;
  }
  return rule;
}

inline PrecisionPolicy draw_policy(Draw& draw) {
  PrecisionPolicy policy;
  using Maybe = std::optional<DType>;
  if (draw.one_in(2))
    policy.param_dtype = draw.of({DType::kBFloat16, DType::kBFloat16, DType::kFloat32});
  if (draw.one_in(3))
    policy.reduce_dtype =
        draw.of({DType::kBFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64});
  if (draw.one_in(3)) policy.storage_dtype = draw.of({DType::kFloat32, DType::kBFloat16});
  policy.on_narrower_request = draw.of({NarrowerRequest::kKeep, NarrowerRequest::kNarrow});
  policy.intrinsic =
      draw.of({Intrinsic::kMinority, Intrinsic::kMinority, Intrinsic::kAll, Intrinsic::kNone});
  // A sum is never narrower than what crosses the wire.
  const bool narrow_wire = policy.reduce_dtype == DType::kBFloat16;
  policy.accumulate_dtype =
      draw.of<Maybe>({std::nullopt, std::nullopt, std::nullopt, DType::kFloat64,
                      narrow_wire ? Maybe(DType::kBFloat16) : std::nullopt});
  policy.final_dtype = draw.of<Maybe>({std::nullopt, std::nullopt, std::nullopt, std::nullopt,
                                       DType::kBFloat16, DType::kFloat32, DType::kFloat64});
  policy.cast_forward_inputs = draw.one_in(2);
  policy.optimizer.master = draw.of({MasterRequest::kAuto, MasterRequest::kNone});
  policy.param_rounding =
      draw.of({Rounding::kNearestEven, Rounding::kNearestEven, Rounding::kHalfAway});
  if (draw.one_in(4)) policy.output_dtype = draw.of({DType::kBFloat16, DType::kFloat32});
  if (draw.one_in(4)) {
    policy.param_dtype = DType::kFloat16;
    policy.loss_scaling = true;
    policy.optimizer.master = MasterRequest::kAuto;  // see leave_out_float16
    if (draw.one_in(3)) policy.reduce_dtype = DType::kFloat16;
    if (policy.accumulate_dtype == DType::kBFloat16) policy.accumulate_dtype.reset();
  }
  return policy;
}

/// Nothing may compute in fp16 without a loss scaler; and where a shard and its gradient are both
/// in it, half of a gradient may be one bit short (they are subnormal), which kernels round or not.
inline void leave_out_float16(Case& c) {
  const auto& policy = c.policies[0];
  const bool steps_wider =
      policy.optimizer.master == MasterRequest::kAuto || policy.final_dtype.has_value();
  if (policy.param_dtype && steps_wider) return;
  for (auto& parameter : c.parameters) {
    if (parameter.initial.scalar_type() == at::kHalf)
      parameter.initial = parameter.initial.to(at::kBFloat16);
    if (parameter.own_grad_dtype == at::kHalf) parameter.own_grad_dtype = at::kBFloat16;
  }
}

inline void draw_policies(Draw& draw, Case& c) {
  const auto base = draw_policy(draw);
  c.policies.assign(c.nodes.size(), base);
  c.options.assign(c.nodes.size(), {});
  const auto factor = draw.of<std::optional<double>>({std::nullopt, 1.0, 3.0});
  for (auto& options : c.options) {
    options.divide_factor = factor;
    options.reshard_after_forward = draw.of<std::optional<bool>>({std::nullopt, true, false});
  }
  c.options[0].merge_below_bytes = draw.of<std::int64_t>({0, 0, 300, 1 << 20});
  if (draw.one_in(3)) c.options[0].in_flight_bytes = 1;
  for (const auto& node : c.nodes) {
    for (const auto object : node.objects) {
      const bool first = &node == &c.nodes[0] && object == node.objects[0];
      if (first || !draw.one_in(5) || !appears_once(c, object)) continue;
      if (!c.parameters[c.objects[object].parameter].initial.is_floating_point()) continue;
      c.policies[node.unit].rules.push_back(draw_rule(draw, object));
    }
  }
  leave_out_float16(c);
  c.steps_by_hand = base.final_dtype.has_value();
  // The largest overflows now and then.
  if (base.loss_scaling) c.loss_scale = draw.of({0x1p4, 0x1p10, 0x1p15});
  if (draw.one_in(2)) c.file_bulk = draw.of({DType::kBFloat16, DType::kBFloat16, DType::kFloat32});
}

/// Parameters change hands between steps; the first one is always trained.
inline void draw_changes(Draw& draw, Case& c) {
  if (!draw.one_in(3)) return;
  c.changes.resize(3 + draw.below(2));
  auto trainable = [&](std::size_t p) { return c.parameters[p].trainable; };
  for (std::size_t step = 1; step < c.changes.size(); ++step) {
    for (std::size_t p = 1; p < c.parameters.size(); ++p) {
      if (!c.parameters[p].initial.is_floating_point() || !draw.one_in(3)) continue;
      // Sometimes what it is already: rules may have frozen it, and the same again changes nothing.
      const bool trained = draw.one_in(4) ? trainable(p) : draw.one_in(2);
      c.changes[step].push_back(
          {p, trained, draw.of({FrozenAs::kShard, FrozenAs::kShard, FrozenAs::kReplicate})});
    }
  }
}

}  // namespace detail

inline Case Case::make(std::uint64_t seed) {
  detail::Draw draw(seed);
  Case c;
  c.seed = seed;
  c.ranks = 1 + static_cast<int>(draw.below(4));
  c.replicas = c.ranks % 2 == 0 && draw.one_in(2) ? draw.of({2, c.ranks}) : 1;
  if (c.ranks > 1 && draw.one_in(20)) c.backend = ThreadBackend::kGloo;
  detail::draw_tree(draw, c);
  detail::draw_ties(draw, c);
  detail::draw_policies(draw, c);
  c.micro_batches = 1 + static_cast<int>(draw.below(3));
  c.syncs_every = draw.one_in(2);
  c.replicas_every = draw.one_in(2);
  c.input_requires_grad = draw.one_in(2);
  c.evaluates = draw.one_in(3);
  c.zero = draw.of({CaseZero::kNone, CaseZero::kZeros, CaseZero::kKeep});
  // A gradient that is kept would have another scale once the loss scale has changed.
  if (c.loss_scale) c.zero = CaseZero::kNone;
  c.input = draw.of({at::kFloat, at::kFloat, at::kBFloat16});
  detail::draw_changes(draw, c);
  return c;
}

}  // namespace tessera::test
