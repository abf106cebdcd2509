#include "models/model_layout.h"

#include <charconv>
#include <optional>

#include "models/lora_table.h"
#include "tessera/error.h"
#include "tessera/mesh.h"

namespace tessera::models {
namespace {

struct NamedRole {
  std::string_view ending;  ///< of the name, whole components
  TensorRole role;
};

/// The first that fits counts.
constexpr NamedRole kRoles[] = {
    {"embed_tokens.weight", TensorRole::kColumn},
    {"lm_head.weight", TensorRole::kColumn},
    {"self_attn.q_proj.weight", TensorRole::kColumn},
    {"self_attn.q_proj.bias", TensorRole::kColumn},
    {"self_attn.k_proj.weight", TensorRole::kKeyValue},
    {"self_attn.k_proj.bias", TensorRole::kKeyValue},
    {"self_attn.v_proj.weight", TensorRole::kKeyValue},
    {"self_attn.v_proj.bias", TensorRole::kKeyValue},
    {"self_attn.o_proj.weight", TensorRole::kRow},
    {"self_attn.o_proj.bias", TensorRole::kInside},
    {"self_attn.sinks", TensorRole::kColumn},
    {"self_attn.q_norm.weight", TensorRole::kInside},
    {"self_attn.k_norm.weight", TensorRole::kInside},
    {"self_attn.q_a_proj.weight", TensorRole::kInside},
    {"self_attn.q_a_proj.bias", TensorRole::kInside},
    {"self_attn.q_a_layernorm.weight", TensorRole::kInside},
    {"self_attn.q_b_proj.weight", TensorRole::kColumn},
    {"self_attn.kv_a_proj_with_mqa.weight", TensorRole::kInside},
    {"self_attn.kv_a_proj_with_mqa.bias", TensorRole::kInside},
    {"self_attn.kv_a_layernorm.weight", TensorRole::kInside},
    {"self_attn.kv_b_proj.weight", TensorRole::kColumn},
    {"experts.gate_up_proj", TensorRole::kExpertIn},
    {"experts.gate_up_proj_bias", TensorRole::kExpertIn},
    {"experts.down_proj", TensorRole::kExpertOut},
    {"experts.down_proj_bias", TensorRole::kExpertSum},
    {"gate_proj.weight", TensorRole::kColumn},
    {"gate_proj.bias", TensorRole::kColumn},
    {"up_proj.weight", TensorRole::kColumn},
    {"up_proj.bias", TensorRole::kColumn},
    {"down_proj.weight", TensorRole::kRow},
    {"down_proj.bias", TensorRole::kInside},
    {"mlp.gate.weight", TensorRole::kInside},
    {"mlp.router.weight", TensorRole::kInside},
    {"mlp.router.bias", TensorRole::kInside},
    {"router.proj.weight", TensorRole::kInside},
    {"router.scale", TensorRole::kInside},
    {"router.per_expert_scale", TensorRole::kInside},
    {"input_layernorm.weight", TensorRole::kStream},
    {"post_attention_layernorm.weight", TensorRole::kStream},
    {"pre_feedforward_layernorm.weight", TensorRole::kStream},
    {"pre_feedforward_layernorm_2.weight", TensorRole::kStream},
    {"post_feedforward_layernorm.weight", TensorRole::kStream},
    {"post_feedforward_layernorm_1.weight", TensorRole::kStream},
    {"post_feedforward_layernorm_2.weight", TensorRole::kStream},
    {"model.norm.weight", TensorRole::kStream},
    {"language_model.norm.weight", TensorRole::kStream},
};

bool ends_in(std::string_view name, std::string_view ending) {
  return name.ends_with(ending) &&
         (name.size() == ending.size() || name[name.size() - ending.size() - 1] == '.');
}

/// A lies between the layer's inputs and the rank, B between the rank and its outputs: whichever
/// meets what is cut is cut as the layer's weight; the product of both is linear in either, so the
/// other's gradients are partial.
TensorRole role_of_adapter(std::string_view name, TensorRole base) {
  if (base == TensorRole::kEverywhere) return base;
  const bool is_a = name.ends_with("lora_A.weight");
  if (base == TensorRole::kRow) return is_a ? TensorRole::kRow : TensorRole::kInside;
  return is_a ? TensorRole::kInside : base;
}

/// Key and value heads of the layer that a parameter stands in.
std::int64_t kv_heads(const ModelSpec& spec, std::string_view name) {
  if (!spec.gemma4) return spec.num_key_value_heads;
  constexpr std::string_view kLayers = ".layers.";
  const auto begin = name.find(kLayers) + kLayers.size();
  std::size_t layer = 0;
  std::from_chars(name.data() + begin, name.data() + name.size(), layer);
  return spec.gemma4->layers.at(layer).num_key_value_heads;
}

ParameterLayout of_key_value(std::int64_t heads, int tp) {
  ParameterLayout layout;
  const HeadAxes axes = tensor_axis_of_heads(tp, static_cast<int>(heads));
  if (axes.heads.size > 1) {
    layout.axes.push_back(AxisPlacement::cut(axes.heads.name, axes.heads.size, 0));
  }
  if (axes.copies.size > 1) {
    layout.axes.push_back(AxisPlacement::summed(axes.copies.name, axes.copies.size));
  }
  return layout;
}

/// The dim along which an expert's inner size lies, of what is not cut as two halves.
int inner_dim(const ParameterSpec& row, TensorRole role, bool in_out) {
  if (row.shape.size() == 2) return 1;  // a bias
  return role == TensorRole::kExpertOut && in_out ? 1 : 2;
}

ParameterLayout of_expert(const ModelSpec& spec, const ParameterSpec& row, TensorRole role,
                          const ModelDegrees& degrees) {
  ParameterLayout layout;
  // With ep 1 the sparse mesh is the dense one: dp_shard, and tp for what experts are cut over.
  const bool sparse = degrees.ep > 1;
  layout.mesh = sparse ? MeshKind::kSparse : MeshKind::kDense;
  if (sparse) layout.axes.push_back(AxisPlacement::cut(axis::kExpert, degrees.ep, 0));
  const std::string_view inner = sparse ? axis::kExpertTensor : axis::kTensor;
  if (degrees.etp == 1) {
    if (!sparse && degrees.tp > 1) layout.axes.push_back(AxisPlacement::summed(inner, degrees.tp));
    return layout;
  }
  if (role == TensorRole::kExpertSum) {
    layout.axes.push_back(AxisPlacement::summed(inner, degrees.etp));
    return layout;
  }
  const bool in_out = spec.moe && spec.moe->layout == ExpertLayout::kInOut;
  if (role == TensorRole::kExpertIn && !in_out) {
    // Gates first, then ups: both are cut. In turn (in_out) they are cut together.
    layout.cut_shape = {row.shape[0], 2, row.shape[1] / 2, row.shape[2]};
    layout.axes.push_back(AxisPlacement::cut(inner, degrees.etp, 2));
    return layout;
  }
  layout.axes.push_back(AxisPlacement::cut(inner, degrees.etp, inner_dim(row, role, in_out)));
  return layout;
}

void check_divides(std::string_view key, int degree, std::string_view what, std::int64_t size) {
  TESSERA_CHECK(size % degree == 0, ErrorKind::kConfig, "parallelism.", key, ": found ", degree,
                ", expected a divisor of ", what, " = ", size);
}

constexpr std::string_view kTp = "tensor_parallel_degree";
constexpr std::string_view kEp = "expert_parallel_degree";
constexpr std::string_view kEtp = "expert_tensor_parallel_degree";

void check_heads(std::int64_t kv, int tp) {
  TESSERA_CHECK(kv % tp == 0 || tp % kv == 0, ErrorKind::kConfig, "parallelism.", kTp, ": found ",
                tp, ", expected a divisor or a multiple of num_key_value_heads = ", kv);
}

struct ExpertSizes {
  std::int64_t experts = 0;
  std::int64_t inner = 0;
};

std::optional<ExpertSizes> experts_of(const ModelSpec& spec) {
  if (spec.moe) return ExpertSizes{spec.moe->num_experts, spec.moe->moe_intermediate_size};
  if (spec.gemma4 && spec.gemma4->experts) {
    return ExpertSizes{spec.gemma4->experts->num_experts,
                       spec.gemma4->experts->moe_intermediate_size};
  }
  return std::nullopt;
}

void check_expert_degrees(const ModelSpec& spec, const ModelDegrees& degrees) {
  const auto experts = experts_of(spec);
  TESSERA_CHECK(experts || (degrees.ep == 1 && degrees.etp == 1), ErrorKind::kConfig,
                "parallelism.", degrees.ep > 1 ? kEp : kEtp, ": found ",
                degrees.ep > 1 ? degrees.ep : degrees.etp,
                " for a model without experts, expected 1");
  TESSERA_CHECK(degrees.etp == 1 || degrees.etp == degrees.tp, ErrorKind::kConfig, "parallelism.",
                kEtp, ": found ", degrees.etp,
                ", expected 1 or tensor_parallel_degree = ", degrees.tp);
  if (!experts) return;
  check_divides(kEp, degrees.ep, "the number of experts", experts->experts);
  check_divides(kEtp, degrees.etp, "moe_intermediate_size", experts->inner);
}

}  // namespace

TensorRole role_of(std::string_view name) {
  if (name.starts_with("model.vision_tower.") || name.starts_with("model.embed_vision.")) {
    return TensorRole::kEverywhere;
  }
  if (is_adapter(name)) return role_of_adapter(name, role_of(adapted_weight(name)));
  for (const NamedRole& row : kRoles) {
    if (ends_in(name, row.ending)) return row.role;
  }
  TESSERA_INVARIANT(false, "no role for the parameter ", name);
}

void check_degrees(const ModelSpec& spec, const ModelDegrees& degrees) {
  check_expert_degrees(spec, degrees);
  const int tp = degrees.tp;
  check_divides(kTp, tp, "num_attention_heads", spec.num_attention_heads);
  check_divides(kTp, tp, "vocab_size", spec.vocab_size);
  check_divides(kTp, tp, "intermediate_size", spec.intermediate_size);
  if (spec.moe && spec.moe->shared_intermediate_size > 0) {
    check_divides(kTp, tp, "the inner size of shared experts", spec.moe->shared_intermediate_size);
  }
  if (!spec.gemma4) return check_heads(spec.num_key_value_heads, tp);
  for (const Gemma4Layer& layer : spec.gemma4->layers) check_heads(layer.num_key_value_heads, tp);
}

ParameterLayout layout_of(const ModelSpec& spec, const ParameterSpec& row,
                          const ModelDegrees& degrees) {
  const TensorRole role = role_of(row.name);
  const bool of_experts = role == TensorRole::kExpertIn || role == TensorRole::kExpertOut ||
                          role == TensorRole::kExpertSum;
  if (of_experts) return of_expert(spec, row, role, degrees);
  const int tp = degrees.tp;
  ParameterLayout layout;
  if (tp == 1) return layout;
  switch (role) {
    case TensorRole::kColumn:
      layout.axes.push_back(AxisPlacement::cut(axis::kTensor, tp, 0));
      break;
    case TensorRole::kRow:
      layout.axes.push_back(AxisPlacement::cut(axis::kTensor, tp, 1));
      break;
    case TensorRole::kKeyValue:
      return of_key_value(kv_heads(spec, row.name), tp);
    case TensorRole::kStream:
      layout.axes.push_back(degrees.sequence == SequenceParallel::kYes
                                ? AxisPlacement::summed(axis::kTensor, tp)
                                : AxisPlacement::invariant(axis::kTensor, tp));
      break;
    case TensorRole::kEverywhere:
      layout.axes.push_back(AxisPlacement::invariant(axis::kTensor, tp));
      break;
    default:
      layout.axes.push_back(AxisPlacement::summed(axis::kTensor, tp));
  }
  return layout;
}

}  // namespace tessera::models
