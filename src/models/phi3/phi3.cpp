// Phi-3, Phi-4 and Phi-4-mini: Llama whose projections are fused, with a window in every layer or
// none, and, where the context was extended, frequencies that differ between short and long rows.
#include <nlohmann/json.hpp>

#include "models/family.h"
#include "models/keys/layer_keys.h"
#include "models/spec_keys.h"

namespace tessera::models {
namespace {

constexpr const char* kNoDropout = "dropout is not supported in training";
constexpr std::int64_t kOriginalContext = 4096;  // transformers' value where the key is absent

void read_phi3_ropes(ConfigReader& keys, ModelSpec& spec, LeftKeys& left) {
  spec.rope = read_rope(keys,
                        {.theta = spec.rope.theta,
                         .max_position_embeddings = spec.max_position_embeddings,
                         .original_max_position_embeddings = kOriginalContext,
                         .partial_rotary_factor = 1.0,
                         .long_rope_of_head = spec.head_dim},
                        left);
}

void read_phi3(ConfigReader& keys, ModelSpec& spec) {
  check_turned_part(keys, spec);
  if (spec.sliding_window > 0) set_all_sliding(spec);
}

Json long_rope_json(const ModelSpec& spec) {
  Json json = rope_scaling_json(spec.rope, "type");
  const bool follows =
      spec.rope.type != nn::RopeType::kLongRope ||
      spec.rope.factor == static_cast<double>(spec.max_position_embeddings) /
                              static_cast<double>(spec.rope.original_max_position_embeddings);
  if (!follows) json["factor"] = spec.rope.factor;
  return json;
}

}  // namespace

const FamilyTraits& phi3_traits() {
  static const FamilyTraits traits{
      .model_type = "phi3",
      .architecture = "Phi3ForCausalLM",
      .spec = {.family = Family::kPhi3,
               .max_position_embeddings = kOriginalContext,
               .rms_norm_eps = 1e-5,
               .pad_token_id = 32000},
      .rows = decoder_rows({
          only("attention_bias", false, kNoBiases),
          only("embd_pdrop", 0.0, kNoDropout),
          only("resid_pdrop", 0.0, kNoDropout),
          only("full_attn_mod", 1, "every layer attends alike"),
          only("interpolate_factor", 1, "positions are those of the tokens"),
          only("lm_head_bias", false, "the head of this family has no bias"),
          only("layer_types", nullptr, "sliding_window holds for all layers of this family"),
          written({"original_max_position_embeddings"},
                  [](const ModelSpec& spec) {
                    return spec.rope.type == nn::RopeType::kLongRope
                               ? Json(spec.rope.original_max_position_embeddings)
                               : left_out();
                  }),
          // An absent padding token is not null.
          written("pad_token_id", &ModelSpec::pad_token_id),
          written({"partial_rotary_factor"},
                  [](const ModelSpec& spec) {
                    const double part = spec.rope.partial_rotary_factor;
                    return part == 1.0 ? left_out() : Json(part);
                  }),
          written({"rope_scaling"}, long_rope_json),
          window_row(),
      }),
      .read = read_phi3,
      .read_ropes = read_phi3_ropes,
      .fused_projections = true,
  };
  return traits;
}

}  // namespace tessera::models
