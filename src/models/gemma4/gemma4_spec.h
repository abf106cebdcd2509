// Gemma4Spec: what Gemma 4's config.json says beyond the fields that every family has.
//
// ModelSpec's own head_dim, num_key_value_heads and rope are those of the sliding layers; a layer's
// true ones stand in `layers`. Its experts are ModelSpec's. Read in this folder only: what others
// want to know goes through the family's row (family.h). Next: gemma4.cpp.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "models/spec_parts.h"
#include "nn/rope_options.h"

namespace tessera::models {

/// The scale of scores, in text and images: queries and keys are normed.
inline constexpr double kGemma4ScoreScale = 1.0;

struct Gemma4Layer {
  LayerType type = LayerType::kSliding;
  std::int64_t head_dim = 0;
  std::int64_t num_key_value_heads = 0;
  bool key_is_value = false;  ///< no v_proj: values are the raw keys
  bool operator==(const Gemma4Layer&) const = default;
};

/// The fields carry the names of vision_config's keys.
struct Gemma4Vision {
  std::int64_t hidden_size = 768;
  std::int64_t intermediate_size = 3072;
  std::int64_t num_hidden_layers = 16;
  std::int64_t num_attention_heads = 12;
  std::int64_t num_key_value_heads = 12;
  std::int64_t head_dim = 64;
  double rms_norm_eps = 1e-6;
  std::int64_t patch_size = 16;
  std::int64_t pooling_kernel_size = 3;
  std::int64_t position_embedding_size = 10240;
  bool standardize = false;
  double rope_theta = 100.0;       ///< axial
  double attention_dropout = 0.0;  ///< as ModelSpec's
  ImagePatches patches() const {
    return {patch_size, pooling_kernel_size, position_embedding_size};
  }
  bool operator==(const Gemma4Vision&) const = default;
};

/// Who sees whom among the tokens of one image, in sliding layers.
enum class ImageAttention : std::uint8_t {
  kCausal,
  kBothWays,  ///< use_bidirectional_attention = "vision"
};

struct Gemma4Spec {
  std::vector<Gemma4Layer> layers;  ///< one a layer
  std::int64_t sliding_window = 512;
  bool attention_k_eq_v = false;
  ImageAttention image_attention = ImageAttention::kCausal;
  nn::RopeOptions full_rope;  ///< of kFull layers
  std::optional<double> final_logit_softcapping;
  std::optional<Gemma4Vision> vision;  ///< none = text only
  std::int64_t image_token_id = 258880;
  // Here and below: none = there is no such token (null in the file).
  std::optional<std::int64_t> video_token_id = 258884;
  std::optional<std::int64_t> audio_token_id = 258881;
  // The tokenizer's ids: kept for readers of the folder, without effect here.
  std::optional<std::int64_t> boi_token_id = 255999;
  std::optional<std::int64_t> eoi_token_id = 258882;
  std::optional<std::int64_t> boa_token_id = 256000;
  std::optional<std::int64_t> eoa_token_index = 258883;
  bool operator==(const Gemma4Spec&) const = default;
};

}  // namespace tessera::models
