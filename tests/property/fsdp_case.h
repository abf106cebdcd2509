// A case of the property test of fully_shard: a module tree, a policy, a schedule and a layout. A
// value: fsdp_case_draw.h draws it from one seed, fsdp_reference.h computes what it must give,
// fsdp_property_test.cpp runs it sharded.
//
// A *parameter* has values; an *object* is a tensor of the user's module that shows them (two
// objects over one storage are tied); a node registers objects, also one that another node has.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <vector>

#include "support/ranks.h"
#include "tessera/recompute_mode.h"
#include "tessera/shard.h"

namespace tessera::test {

constexpr std::int64_t kColumns = 4;  // of the activations [2, kColumns]

struct CaseParameter {
  at::Tensor initial, coefficients;
  bool trainable = true;
  int used_by = -2;  ///< -2 all ranks, -1 none, else that rank only
  std::optional<at::ScalarType> own_grad_dtype = {};  ///< set on its tensors before sharding
  std::optional<DType> published = {};                ///< of the file that training began with
};

struct CaseObject {
  std::size_t parameter = 0;
  bool in_adapter = false;  ///< used by a CaseAdapter only
};

/// x + W x + B A x, of low rank: objects.
struct CaseAdapter {
  std::size_t base = 0, a = 0, b = 0;  ///< [kColumns, kColumns], [r, kColumns], [kColumns, r]
};

struct CaseChild {
  std::size_t node = 0;
  bool handle = false;      ///< a unit of its own
  bool recomputes = false;  ///< called through checkpoint()
  RecomputeMode mode = RecomputeMode::kFull;
  int repeats = 1;
};

struct CaseNode {
  std::size_t unit = 0;  ///< the node at the top of its unit
  std::vector<std::size_t> objects;
  std::vector<CaseAdapter> adapters;
  at::Tensor buffer = {};  ///< [kColumns] or undefined
  std::vector<CaseChild> children;
};

enum class CaseZero { kNone, kZeros, kKeep };

/// Before a step.
struct CaseChange {
  std::size_t parameter = 0;
  bool trainable = true;
  FrozenAs frozen_as = FrozenAs::kShard;
};

struct Case {
  std::uint64_t seed = 0;
  std::vector<CaseParameter> parameters;
  std::vector<CaseObject> objects;
  std::vector<CaseNode> nodes;            ///< children come after their parents
  std::vector<PrecisionPolicy> policies;  ///< by unit (node number)
  std::vector<ShardOptions> options;      ///< by unit
  /// The contracts are resolved beforehand for the whole model, as of a file with the parameters'
  /// dtypes, most of it of this one.
  std::optional<DType> file_bulk;
  int ranks = 1, replicas = 1;
  ThreadBackend backend = ThreadBackend::kInProcess;
  int micro_batches = 1;
  bool syncs_every = true, replicas_every = true, input_requires_grad = false, evaluates = false;
  CaseZero zero = CaseZero::kNone;
  /// By step: what is frozen and unfrozen before it. Gradients are set to none then.
  std::vector<std::vector<CaseChange>> changes{2};
  /// The loss is multiplied by it, in fp16; a step that overflows is left out and halves it.
  std::optional<double> loss_scale;
  /// Shards are stepped as a user's own loop would; optimizers want a dtype that fits theirs.
  bool steps_by_hand = false;
  at::ScalarType input = at::kFloat;

  static Case make(std::uint64_t seed);
  /// Ranks of the axis cp, over which gradients are summed as over dp_shard.
  int context() const { return ranks / replicas % 2 == 0 && seed % 2 == 1 ? 2 : 1; }
  std::string describe() const;

  at::Tensor batch(int rank, int step, int micro_batch) const {
    const auto number = static_cast<std::uint64_t>(rank + 10 * micro_batch + 100 * step);
    return seeded(seed * 1000 + number, {2, kColumns}, input);
  }
  static std::string name_of(std::size_t object) { return concat("p", object); }
  static std::string name_of_buffer(std::size_t node) { return concat("b", node); }
  int steps() const { return static_cast<int>(changes.size()); }
};

/// Applies one of a node's parameters; the same code sharded and plain.
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
  const auto s = at::tanh((w * parameter.coefficients.to(w.options())).sum());
  return x * (s.to(x.scalar_type()) * 0.25 + 1.0);
}

inline at::Tensor apply_adapter(const at::Tensor& x, const at::Tensor& base, const at::Tensor& a,
                                const at::Tensor& b) {
  const auto product = [](const at::Tensor& in, const at::Tensor& w) {
    return at::linear(in.to(w.scalar_type()), w);
  };
  const auto low = product(product(x, a), b).to(x.scalar_type());
  return x + at::tanh(product(x, base).to(x.scalar_type()) + low) * 0.25;
}

/// All that a node does before its children; `tensor_of` gives the tensor of an object.
template <class TensorOf>
at::Tensor apply_node(const Case& c, const CaseNode& node, int rank, at::Tensor x,
                      const at::Tensor& buffer, const TensorOf& tensor_of) {
  if (buffer.defined()) x = (x * (buffer * 0.25 + 1.0)).to(x.scalar_type());
  for (const auto object : node.objects) {
    const auto& parameter = c.parameters[c.objects[object].parameter];
    if (c.objects[object].in_adapter) continue;
    if (parameter.used_by == -2 || parameter.used_by == rank)
      x = apply_parameter(parameter, x, tensor_of(object));
  }
  for (const auto& adapter : node.adapters)
    x = apply_adapter(x, tensor_of(adapter.base), tensor_of(adapter.a), tensor_of(adapter.b));
  return x;
}

inline at::Tensor case_loss(const at::Tensor& y) { return at::sin(y.to(at::kFloat)).sum(); }

inline std::string describe_policy(const PrecisionPolicy& policy) {
  const auto text = [](const std::optional<DType>& dtype) {
    return dtype ? std::string(to_string(*dtype)) : std::string("-");
  };
  auto all =
      concat("  param ", text(policy.param_dtype), ", reduce ", text(policy.reduce_dtype),
             ", storage ", text(policy.storage_dtype), " (", to_string(policy.on_narrower_request),
             "), accumulate ", text(policy.accumulate_dtype), ", final ", text(policy.final_dtype),
             ", output ", text(policy.output_dtype), ", intrinsic ", to_string(policy.intrinsic),
             policy.param_rounding == Rounding::kHalfAway ? ", half away" : "",
             policy.optimizer.master == MasterRequest::kAuto ? ", masters" : "");
  for (const auto& rule : policy.rules) all += concat(", rule of ", rule.match[0]);
  return all;
}

inline std::string Case::describe() const {
  auto text =
      concat("seed ", seed, ": ", ranks, " ranks, ", replicas, " replicas, cp ", context(),
             backend == ThreadBackend::kGloo ? ", Gloo" : "", ", ", micro_batches, " micro-batches",
             syncs_every ? "" : " synced last", replicas_every ? "" : ", replicas last",
             input_requires_grad ? ", input requires grad" : "", ", zero mode ",
             static_cast<int>(zero), ", merge below ", options[0].merge_below_bytes,
             loss_scale ? concat(", loss scale ", *loss_scale) : "",
             steps_by_hand ? ", stepped by hand" : "",
             file_bulk ? concat(", of a file of ", to_string(*file_bulk)) : "", "\n",
             describe_policy(policies[0]), "\n");
  for (std::size_t step = 0; step < changes.size(); ++step) {
    for (const auto& change : changes[step])
      text += concat("  before step ", step, " parameter ", change.parameter,
                     change.trainable                           ? " is trained\n"
                     : change.frozen_as == FrozenAs::kReplicate ? " is frozen, whole\n"
                                                                : " is frozen\n");
  }
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    text += concat("  node ", i, " (unit ", nodes[i].unit, "):");
    for (const auto object : nodes[i].objects) {
      const auto& p = parameters[objects[object].parameter];
      text += concat(" ", name_of(object), "=", objects[object].parameter, ":",
                     c10::toString(p.initial.scalar_type()), p.initial.sizes(),
                     p.trainable ? "" : " frozen",
                     p.own_grad_dtype ? concat(" grad_dtype ", c10::toString(*p.own_grad_dtype))
                                      : std::string(),
                     p.used_by == -2 ? "" : concat(" used by ", p.used_by));
    }
    if (nodes[i].buffer.defined())
      text += concat(" buffer ", c10::toString(nodes[i].buffer.scalar_type()));
    for (const auto& adapter : nodes[i].adapters)
      text += concat(" adapter(", adapter.base, ",", adapter.a, ",", adapter.b, ")");
    for (const auto& child : nodes[i].children) {
      text += concat(" -> ", child.node, child.handle ? " handle" : "",
                     child.recomputes ? " recomputed" : "", child.repeats > 1 ? " twice" : "");
    }
    text += "\n";
  }
  return text;
}

}  // namespace tessera::test
