// A random case of the property test of fully_shard: a module tree, a policy, a schedule and a
// layout, all from one seed. A value: fsdp_reference.h computes what it must give,
// fsdp_property_test.cpp runs it sharded.
//
// A *parameter* has values; an *object* is a tensor of the user's module that shows them (two
// objects over one storage are tied); a node registers objects, also one that another node has.
#pragma once

#include <ATen/ATen.h>

#include <random>
#include <string>
#include <vector>

#include "dist/ranks.h"
#include "tessera/shard.h"

namespace tessera::test {

constexpr std::int64_t kColumns = 4;  // of the activations [2, kColumns]

struct CaseParameter {
  at::Tensor initial, coefficients;
  bool trainable = true;
  int used_by = -2;  ///< -2 all ranks, -1 none, else that rank only
};

struct CaseObject {
  std::size_t parameter = 0;
};

struct CaseChild {
  std::size_t node = 0;
  bool handle = false;      ///< a unit of its own
  bool recomputes = false;  ///< called through checkpoint()
  int repeats = 1;
};

struct CaseNode {
  std::size_t unit = 0;  ///< the node at the top of its unit
  std::vector<std::size_t> objects;
  std::vector<CaseChild> children;
};

enum class CaseZero { kNone, kZeros, kKeep };

struct Case {
  std::uint64_t seed = 0;
  std::vector<CaseParameter> parameters;
  std::vector<CaseObject> objects;
  std::vector<CaseNode> nodes;            ///< children come after their parents
  std::vector<PrecisionPolicy> policies;  ///< by unit (node number)
  std::vector<ShardOptions> options;      ///< by unit
  int ranks = 1, replicas = 1;
  ThreadBackend backend = ThreadBackend::kInProcess;
  int micro_batches = 1;
  bool syncs_every = true, replicas_every = true, input_requires_grad = false, evaluates = false;
  CaseZero zero = CaseZero::kNone;
  at::ScalarType input = at::kFloat;

  static Case make(std::uint64_t seed);
  std::string describe() const;

  at::Tensor batch(int rank, int step, int micro_batch) const {
    const auto number = static_cast<std::uint64_t>(rank + 10 * micro_batch + 100 * step);
    return seeded(seed * 1000 + number, {2, kColumns}, input);
  }
  static std::string name_of(std::size_t object) { return concat("p", object); }
};

/// What a node does with one of its parameters; the same code sharded and plain.
inline at::Tensor apply_parameter(const CaseParameter& parameter, const at::Tensor& x,
                                  const at::Tensor& w) {
  if (!at::isFloatingType(w.scalar_type())) return x + w.sum().to(x.scalar_type()) * 0.0625;
  // A product with the activations as they are: raw gradients of another dtype than the
  // parameter's.
  if (w.dim() == 1 && w.size(0) == kColumns) return (x * (w * 0.25 + 1.0)).to(x.scalar_type());
  if (w.dim() == 2 && w.size(1) == kColumns) {
    const auto y = at::tanh(at::matmul(x.to(w.scalar_type()), w.t())).sum(-1, /*keepdim=*/true);
    return x + y.to(x.scalar_type()) * 0.25;
  }
  const auto s = at::tanh((w * parameter.coefficients.to(w.scalar_type())).sum());
  return x * (s.to(x.scalar_type()) * 0.25 + 1.0);
}

inline at::Tensor case_loss(const at::Tensor& y) { return at::sin(y.to(at::kFloat)).sum(); }

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
  const auto dtype =
      draw.of({at::kFloat, at::kFloat, at::kFloat, at::kBFloat16, at::kBFloat16, at::kDouble});
  p.initial = seeded(seed, shape, dtype);
  if (p.initial.dim() == 2 && draw.one_in(3)) p.initial = p.initial.t().contiguous().t();
  p.coefficients = seeded(seed + 500, shape);
  p.trainable = !draw.one_in(6);
  if (draw.one_in(5))
    p.used_by = draw.one_in(2) ? -1 : static_cast<int>(draw.below(static_cast<std::size_t>(ranks)));
  return p;
}

inline void draw_tree(Draw& draw, Case& c) {
  const auto count = 1 + draw.below(6);
  for (std::size_t i = 0; i < count; ++i) {
    CaseNode node;
    if (i > 0) {
      const auto parent = draw.below(i);
      CaseChild child{i, draw.one_in(2), draw.one_in(4), draw.one_in(6) ? 2 : 1};
      node.unit = child.handle ? i : c.nodes[parent].unit;
      c.nodes[parent].children.push_back(child);
    }
    for (auto left = draw.below(4) + (i == 0 ? 1 : 0); left > 0; --left) {
      node.objects.push_back(c.objects.size());
      c.objects.push_back({c.parameters.size()});
      c.parameters.push_back(draw_parameter(draw, c.seed * 100 + c.objects.size(), c.ranks));
    }
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
    if (!draw.one_in(6)) continue;
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
  switch (draw.below(5)) {
    case 0:
      rule.grad_dtype = DType::kBFloat16;
      break;
    case 1:
      rule.pin = true;
      break;
    case 2:
      rule.param_dtype = draw.of({DType::kBFloat16, DType::kFloat32});
      break;
    case 3:
      rule.reduce_dtype = DType::kBFloat16;
      break;
    default:
      rule.frozen = FrozenRule::kYes;
      break;
  }
  return rule;
}

inline void draw_policies(Draw& draw, Case& c) {
  PrecisionPolicy base;
  if (draw.one_in(2))
    base.param_dtype = draw.of({DType::kBFloat16, DType::kBFloat16, DType::kFloat32});
  if (draw.one_in(3)) base.reduce_dtype = draw.of({DType::kBFloat16, DType::kFloat32});
  if (draw.one_in(5)) base.storage_dtype = DType::kFloat32;
  if (draw.one_in(6)) base.accumulate_dtype = DType::kFloat64;
  base.cast_forward_inputs = draw.one_in(2);
  base.optimizer.master = MasterRequest::kNone;  // the reference steps shards as SGD does
  if (draw.one_in(4)) base.output_dtype = draw.of({DType::kBFloat16, DType::kFloat32});
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
  c.input = draw.of({at::kFloat, at::kFloat, at::kBFloat16});
  return c;
}

inline std::string Case::describe() const {
  auto text =
      concat("seed ", seed, ": ", ranks, " ranks, ", replicas, " replicas",
             backend == ThreadBackend::kGloo ? ", Gloo" : "", ", ", micro_batches, " micro-batches",
             syncs_every ? "" : " synced last", replicas_every ? "" : ", replicas last",
             input_requires_grad ? ", input requires grad" : "", ", zero mode ",
             static_cast<int>(zero), ", merge below ", options[0].merge_below_bytes, "\n");
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    text += concat("  node ", i, " (unit ", nodes[i].unit, "):");
    for (const auto object : nodes[i].objects) {
      const auto& p = parameters[objects[object].parameter];
      text += concat(" ", name_of(object), "=", objects[object].parameter, ":",
                     c10::toString(p.initial.scalar_type()), p.initial.sizes(),
                     p.trainable ? "" : " frozen",
                     p.used_by == -2 ? "" : concat(" used by ", p.used_by));
    }
    for (const auto& child : nodes[i].children) {
      text += concat(" -> ", child.node, child.handle ? " handle" : "",
                     child.recomputes ? " recomputed" : "", child.repeats > 1 ? " twice" : "");
    }
    text += "\n";
  }
  return text;
}

}  // namespace tessera::test
