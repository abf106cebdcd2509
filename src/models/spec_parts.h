// The records that a ModelSpec is made of, as a config.json gives them: which earlier positions a
// layer sees (LayerType), latent attention (MlaSpec), linear attention (DeltaNetSpec), state-space
// layers (MambaSpec), a mixture of experts (MoeSpec) of a family whose layers have one instead of
// the MLP or in addition to it, and what a batch must know of a model with a vision tower
// (ImageTokens).
//
// Pure. Next: model_spec.h, moe_layer.h, patch_grid.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace tessera::models {

/// How one layer sees the positions before; for Nemotron-H, whose layers have one part each, that
/// part.
enum class LayerType : std::uint8_t {
  kSliding,  ///< query i sees key j where i - window < j <= i
  kChunked,  ///< query i sees key j where j <= i and both lie in one chunk of positions
  kFull,
  kLinear,   ///< a state of fixed size that every position changes (nn/state/)
  kMlp,      ///< sees nothing: the layer is an MLP alone
  kExperts,  ///< sees nothing: the layer is experts alone
};

// As transformers' `layer_types` spell them.
inline constexpr const char* kSlidingAttention = "sliding_attention";
inline constexpr const char* kChunkedAttention = "chunked_attention";
inline constexpr const char* kFullAttention = "full_attention";
inline constexpr const char* kLinearAttention = "linear_attention";

/// Llama 4's attention (nn/attention/chunked_attention.h): chunked layers turn their heads, full
/// ones warm their queries. The fields carry the names of the file's keys.
struct ChunkedSpec {
  std::int64_t attention_chunk_size = 0;
  bool use_qk_norm = true;  ///< of chunked layers, without a weight
  bool attn_temperature_tuning = true;
  double attn_scale = 0.1;
  std::int64_t floor_scale = 8192;
  bool operator==(const ChunkedSpec&) const = default;
};

/// The sizes of multi-head latent attention (nn/attention/mla.h). The fields carry the names of the
/// file's keys.
struct MlaSpec {
  std::optional<std::int64_t> q_lora_rank = std::nullopt;  ///< none = queries straight from x
  std::int64_t kv_lora_rank = 0;
  std::int64_t qk_nope_head_dim = 0;
  std::int64_t qk_rope_head_dim = 0;
  std::int64_t v_head_dim = 0;

  std::int64_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
  bool operator==(const MlaSpec&) const = default;
};

/// The sizes of layers of kind kLinear (nn/state/delta_net.h). The fields carry the names of the
/// file's keys.
struct DeltaNetSpec {
  std::int64_t linear_conv_kernel_dim = 4;
  std::int64_t linear_key_head_dim = 128;
  std::int64_t linear_value_head_dim = 128;
  std::int64_t linear_num_key_heads = 16;
  std::int64_t linear_num_value_heads = 32;  ///< a multiple of the key heads

  std::int64_t key_size() const { return linear_num_key_heads * linear_key_head_dim; }
  std::int64_t value_size() const { return linear_num_value_heads * linear_value_head_dim; }
  bool operator==(const DeltaNetSpec&) const = default;
};

/// The sizes of Mamba-2, the layers of kind kLinear of Nemotron-H (nn/state/mamba.h). The fields
/// carry the names of the file's keys.
struct MambaSpec {
  std::int64_t mamba_num_heads = 128;
  std::int64_t mamba_head_dim = 64;
  std::int64_t n_groups = 8;  ///< of heads; divides them
  std::int64_t ssm_state_size = 128;
  std::int64_t conv_kernel = 4;
  std::int64_t chunk_size = 128;
  bool use_conv_bias = true;
  double time_step_min = 0.001;  ///< the least step of a state
  // The range of initial values: first steps lie from time_step_min to time_step_max, and are at
  // least time_step_floor; out_proj is narrower the more layers there are.
  double time_step_max = 0.1;
  double time_step_floor = 1e-4;
  bool rescale_prenorm_residual = true;

  std::int64_t inner_size() const { return mamba_num_heads * mamba_head_dim; }
  bool operator==(const MambaSpec&) const = default;
};

/// The shares that GPT-2's config.json says are dropped: kept for readers of the folder that is
/// written, nothing here drops anything. In ModelSpec max_position_embeddings is the number of
/// learned positions, rms_norm_eps that of the LayerNorms, attention_dropout attn_pdrop.
struct Gpt2Spec {
  double embd_pdrop = 0.1;
  double resid_pdrop = 0.1;
  bool operator==(const Gpt2Spec&) const = default;
};

/// The scales of Granite. The fields carry the names of the file's keys.
struct GraniteSpec {
  double embedding_multiplier = 1.0;  ///< of the embedding's result
  double attention_multiplier = 1.0;  ///< of the scores of queries and keys
  double residual_multiplier = 1.0;   ///< of the addends of attention and MLP
  double logits_scaling = 1.0;        ///< logits are divided by it
  bool operator==(const GraniteSpec&) const = default;
};

/// How the routing weights of a token are computed.
enum class ExpertScores : std::uint8_t {
  kSoftmaxOfAll,     ///< softmax over all experts, then the choice
  kSoftmaxOfChosen,  ///< the choice by raw scores, then softmax over the chosen
  kSigmoidOfChosen,  ///< the choice by raw scores, then the sigmoid of each chosen one
  /// The sigmoid of each score; the choice by that and a stored bias an expert, no part of the
  /// weights (models/expert_bias.h).
  kSigmoid,
};

/// The dtype that the router computes in.
enum class RouterDtype : std::uint8_t {
  kWeight,   ///< its weight's
  kFloat32,  ///< with weights of any dtype
};

enum class ExpertActivation : std::uint8_t {
  kSwiglu,         ///< gate rows first, then up rows
  kClampedSwiglu,  ///< gate and up in turn, clamped (gpt-oss)
  kGeglu,          ///< gate rows first, then up rows (Gemma 4)
  kReluSquared,    ///< up rows alone: there is no gate (Nemotron-H)
};

/// The layout of experts' matrices in files and in parameters.
enum class ExpertLayout : std::uint8_t {
  /// [E, 2I, H], without a gate [E, I, H], and [E, H, I]; one tensor an expert and projection in
  /// files.
  kOutIn,
  kOutInAsOne,  ///< the same; in files as in parameters
  kInOut,       ///< [E, H, 2I] and [E, I, H]; in files as in parameters
};

struct MoeSpec {
  std::int64_t num_experts = 0;
  std::int64_t experts_per_token = 0;
  std::int64_t moe_intermediate_size = 0;
  /// Width of the one MLP that every token also goes through; 0 = none.
  std::int64_t shared_intermediate_size = 0;
  /// That MLP's result is multiplied by the sigmoid of one product a token.
  bool shared_gate = false;

  ExpertScores scores = ExpertScores::kSoftmaxOfAll;
  RouterDtype router_dtype = RouterDtype::kWeight;
  /// Weights multiply the input of an expert, with any model.score_before_experts.
  bool scores_before_experts = false;
  bool norm_topk_prob = false;  ///< the weights of a token are divided by their sum
  double routed_scaling_factor = 1.0;
  /// The experts of a token come from `topk_group` of `n_group` equal groups, those with the best
  /// experts (by sigmoids: with the two best ones together); 1 of 1 = from all.
  std::int64_t n_group = 1;
  std::int64_t topk_group = 1;
  bool router_bias = false;

  ExpertActivation activation = ExpertActivation::kSwiglu;
  double swiglu_alpha = 1.702;  ///< of kClampedSwiglu, as the limit
  double swiglu_limit = 7.0;
  bool expert_bias = false;
  ExpertLayout layout = ExpertLayout::kOutIn;

  std::int64_t first_dense_layers = 0;             ///< so many layers have an MLP instead
  std::int64_t sparse_step = 1;                    ///< then every n-th has experts
  std::vector<std::int64_t> mlp_only_layers = {};  ///< but not these, ascending

  /// The published coefficient, and whether the published model is trained with it.
  double router_aux_loss_coef = 0.0;
  bool output_router_logits = false;

  /// Weights of experts stay fp32 where the router computes narrower; else they are rounded to its
  /// dtype.
  bool wide_weights = false;

  bool is_gated() const { return activation != ExpertActivation::kReluSquared; }
  bool has_stored_bias() const { return scores == ExpertScores::kSigmoid; }
  bool is_moe(std::int64_t layer) const {
    if (std::ranges::binary_search(mlp_only_layers, layer)) return false;
    return layer >= first_dense_layers && (layer + 1) % sparse_step == 0;
  }
  bool operator==(const MoeSpec&) const = default;
};

/// How a picture becomes soft tokens. The names are those of config.json's keys.
struct ImagePatches {
  std::int64_t patch_size = 0;               ///< pixels along each side of a patch
  std::int64_t pooling_kernel_size = 0;      ///< patches along each side of a soft token
  std::int64_t position_embedding_size = 0;  ///< positions along each side of a picture
};

struct ImageTokens {
  std::int64_t id = 0;  ///< stands in input_ids where a soft token goes
  ImagePatches patches;
};

}  // namespace tessera::models
