#include "train/small/small_spec.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>
#include <vector>

#include "layout/range.h"

namespace tessera::train {
namespace {

using models::DeltaNetSpec;
using models::Gemma4Layer;
using models::Gemma4Spec;
using models::Gemma4Vision;
using models::LayerType;
using models::MambaSpec;
using models::MlaSpec;
using models::ModelSpec;
using models::MoeSpec;

constexpr std::int64_t kHidden = 64;
constexpr std::int64_t kInner = 48;  // of an MLP, an expert
constexpr std::int64_t kHeadDim = 16;
constexpr std::int64_t kVocabulary = 128;
constexpr std::int64_t kSeen = kSmallPositions / 2;  // by a window, in a chunk

/// Whether ranks of tp share key heads: some layer has fewer than there are ranks.
bool shares_heads(const ModelSpec& spec, int tp) {
  const auto heads = key_value_heads(spec);
  return std::ranges::any_of(heads, [&](std::int64_t one) { return one < tp; });
}

bool has_one_head(const ModelSpec& spec) {
  const auto heads = key_value_heads(spec);
  return std::ranges::any_of(heads, [](std::int64_t one) { return one == 1; });
}

/// Returns what makes layers of a model different.
auto kind_of(const ModelSpec& spec, std::int64_t layer) {
  const auto at = static_cast<std::size_t>(layer);
  const Gemma4Layer of_gemma = spec.gemma4 ? spec.gemma4->layers.at(at) : Gemma4Layer();
  return std::tuple(spec.type_of(layer), spec.is_moe(layer), spec.has_rope(layer), of_gemma.type,
                    of_gemma.key_is_value, of_gemma.head_dim, of_gemma.num_key_value_heads);
}

/// Numbers of layers of the whole model: the first of each kind, and as many more as are asked for,
/// kind after kind.
std::vector<std::int64_t> layers_of_kinds(const ModelSpec& spec, std::int64_t layers) {
  std::set<decltype(kind_of(spec, 0))> known;
  std::vector<std::int64_t> firsts;
  for (std::int64_t layer = 0; layer < spec.num_hidden_layers; ++layer) {
    if (known.insert(kind_of(spec, layer)).second) firsts.push_back(layer);
  }
  const auto kinds = std::ssize(firsts);
  const std::int64_t count = std::max<std::int64_t>(layers, kinds);
  std::vector<std::int64_t> chosen;
  for (std::int64_t i = 0; i < count; ++i) {
    // Layers of a kind stay together: dense ones come before those with experts.
    chosen.push_back(firsts[static_cast<std::size_t>(i * kinds / count)]);
  }
  return chosen;
}

/// `dims`: the small degrees.
std::int64_t small_heads(std::int64_t heads, const ParallelDims& dims) {
  if (heads == 1) return 1;
  if (dims.context_form == ContextForm::kHeads) return std::max(2, dims.cp * dims.tp);
  return dims.tp > 2 ? 2 : std::max(2, dims.tp);
}

void make_small(MoeSpec& moe, const ModelSpec& spec, const std::vector<std::int64_t>& chosen) {
  moe.mlp_only_layers.clear();
  // Where layers have one part, layer_types says which have experts.
  for (std::size_t i = 0; i < chosen.size() && !spec.has_one_part(); ++i) {
    if (!spec.is_moe(chosen[i])) moe.mlp_only_layers.push_back(static_cast<std::int64_t>(i));
  }
  moe.first_dense_layers = 0;
  moe.sparse_step = 1;
  moe.num_experts = 8;
  moe.experts_per_token = std::min<std::int64_t>(moe.experts_per_token, 2);
  if (moe.n_group > 1) {
    moe.topk_group = moe.topk_group < moe.n_group ? 2 : 4;
    moe.n_group = 4;
  }
  moe.moe_intermediate_size = kInner;
  if (moe.shared_intermediate_size > 0) moe.shared_intermediate_size = kInner;
}

void make_small(Gemma4Spec& gemma, const ModelSpec& spec, const std::vector<std::int64_t>& chosen,
                const ParallelDims& dims) {
  std::vector<Gemma4Layer> layers;
  for (const std::int64_t layer : chosen) {
    Gemma4Layer one = spec.gemma4->layers.at(static_cast<std::size_t>(layer));
    one.head_dim = kHeadDim;
    one.num_key_value_heads = small_heads(one.num_key_value_heads, dims);
    layers.push_back(one);
  }
  gemma.layers = std::move(layers);
  gemma.sliding_window = kSeen;
  gemma.image_token_id = kVocabulary - 1;
  for (auto* const token : {&gemma.video_token_id, &gemma.audio_token_id, &gemma.boi_token_id,
                            &gemma.eoi_token_id, &gemma.boa_token_id, &gemma.eoa_token_index}) {
    token->reset();
  }
  if (!gemma.vision) return;
  Gemma4Vision& vision = *gemma.vision;
  vision.hidden_size = kHidden;
  vision.intermediate_size = kInner;
  vision.num_hidden_layers = 1;
  vision.num_attention_heads = vision.num_key_value_heads = 4;
  vision.head_dim = kHeadDim;
  vision.patch_size = 2;
  vision.pooling_kernel_size = 2;
  vision.position_embedding_size = 16;
}

void make_small(DeltaNetSpec& linear, int tp) {
  const std::int64_t each = linear.linear_num_value_heads / linear.linear_num_key_heads;
  linear.linear_num_key_heads = std::max(2, tp);
  linear.linear_num_value_heads = std::min<std::int64_t>(each, 2) * linear.linear_num_key_heads;
  linear.linear_key_head_dim = 8;
  linear.linear_value_head_dim = 12;
}

void make_small(MambaSpec& mamba, int tp) {
  const std::int64_t each = mamba.mamba_num_heads / mamba.n_groups;
  mamba.n_groups = std::max(2, tp);
  mamba.mamba_num_heads = std::min<std::int64_t>(each, 2) * mamba.n_groups;
  mamba.mamba_head_dim = 12;
  mamba.ssm_state_size = 8;
  mamba.chunk_size = kSeen;
}

void make_small(MlaSpec& mla) {
  if (mla.q_lora_rank) mla.q_lora_rank = 24;
  mla.kv_lora_rank = 16;
  mla.qk_nope_head_dim = 8;
  mla.qk_rope_head_dim = 8;
  mla.v_head_dim = 8;
}

}  // namespace

ParallelDims small_degrees(const ModelSpec& spec, const ParallelDims& full) {
  ParallelDims small = full;
  for (int* const degree :
       {&small.pp, &small.dp_replicate, &small.dp_shard, &small.cp, &small.tp, &small.ep}) {
    *degree = std::min(*degree, 2);
  }
  small.context_parts = small.cp == 1 ? 1 : 2 * small.cp;
  if (full.tp > 2 && shares_heads(spec, full.tp) && !has_one_head(spec)) small.tp = 4;
  if (full.etp > 1) small.etp = small.tp;
  // As in the whole layout: ranks of ep hold several of the data ranks, or share the ranks of tp.
  while (small.dp_shard * small.cp * small.tp % (small.ep * small.etp) != 0) small.dp_shard *= 2;
  return small;
}

ModelSpec small_spec(const ModelSpec& spec, const ParallelDims& full, std::int64_t layers) {
  const ParallelDims dims = small_degrees(spec, full);
  const int tp = dims.tp;
  ModelSpec small = spec;
  const auto chosen = layers_of_kinds(spec, layers);
  small.num_hidden_layers = std::ssize(chosen);
  small.layer_types.clear();
  if (!spec.layer_types.empty()) {
    for (const std::int64_t layer : chosen) small.layer_types.push_back(spec.type_of(layer));
  }
  small.layers_without_rope.clear();
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    if (!spec.has_rope(chosen[i]))
      small.layers_without_rope.push_back(static_cast<std::int64_t>(i));
  }
  const std::int64_t group =
      spec.num_attention_heads / std::max<std::int64_t>(1, spec.num_key_value_heads);
  const auto heads = small_heads(spec.num_key_value_heads, dims);
  small.num_key_value_heads = heads;
  small.num_attention_heads = std::lcm<std::int64_t>(heads * std::min<std::int64_t>(group, 2), 4);
  if (group == 1) small.num_key_value_heads = small.num_attention_heads;
  small.head_dim = kHeadDim;
  small.hidden_size = kHidden;
  small.intermediate_size = kInner;
  small.vocab_size = kVocabulary;
  small.max_position_embeddings = 2 * kSmallPositions;
  if (small.sliding_window > 0) small.sliding_window = kSeen;
  if (small.query_pre_attn_scalar) small.query_pre_attn_scalar = kHeadDim;
  small.initializer_range = 0.1;
  if (small.pad_token_id) small.pad_token_id = 0;
  if (small.bos_token_id) small.bos_token_id = 1;
  if (!small.eos_token_ids.empty()) small.eos_token_ids = {2};
  if (small.moe) make_small(*small.moe, spec, chosen);
  if (small.gemma4) make_small(*small.gemma4, spec, chosen, dims);
  if (small.mla) {
    make_small(*small.mla);
    small.head_dim = small.mla->qk_rope_head_dim;
  }
  if (small.delta_net) make_small(*small.delta_net, tp);
  if (small.mamba) make_small(*small.mamba, tp);
  // The gated norm of a value head divides by next to nothing where little is read of a state:
  // rounding would look like a mistake.
  if (small.delta_net) small.rms_norm_eps = 1e-2;
  if (small.chunked) {
    small.chunked->attention_chunk_size = kSeen;
    small.chunked->floor_scale = 4;
  }
  return small;
}

}  // namespace tessera::train
