// Attention over the ranks of a context region, each of which has its queries of the same rows.
//
// Two forms (ContextForm). kGather: a rank gathers the keys and values that its queries see and
// computes each part of its positions by itself; in backward each part's addends to the gradients
// of keys and values go to their owner in fp32, who adds them in the order of the parts. So results
// and gradients depend on the parts of the cut alone, not on the ranks: with as many parts they are
// those of one rank, bit for bit, where the kernels' are. kHeads: an all-to-all gives a rank all
// positions of a part of the heads, with which it computes as one rank would. Gathered keys and
// values are not kept: backward gathers them again. Source: docs/context.md; DeepSpeed-Ulysses
// (arXiv 2309.14509). Short symbols: B rows, T positions of a row, n own ones, G key/value heads, R
// query heads of each, D head_dim. Next: attention.h, ../../parallel/context_exchange.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "nn/attention/masked_attention.h"
#include "nn/context_region.h"
#include "nn/documents.h"

namespace tessera::nn {

/// Which kernels compute with the scores.
enum class Scores : std::uint8_t {
  kOfInputs,  ///< of the inputs' dtype (causal_attention); no sinks
  kWide,      ///< fp32 (windowed_attention)
};

/// Queries, keys and values of own positions, as causal_attention takes them.
struct AttentionHeads {
  at::Tensor q;  ///< [B, G, n, R, D]
  at::Tensor k;  ///< [B, G, n, 1, D]
  at::Tensor v;  ///< [B, n, G*D']
};

/// -> [B, n, G*R*D'] of own positions. The mask is that of whole rows, begins and ends [B, T], and
/// its sinks those of all heads given. Without a cut it is causal_attention or windowed_attention
/// itself. Collective where ranks share rows, as all functions here.
at::Tensor context_attention(const AttentionHeads& heads, double scale, const AttentionMask& mask,
                             Scores scores, const ContextRegion& region,
                             const Documents& documents);

/// own [B, n, C] -> [B, T, C] where the queries of this rank see it (mask), zeros elsewhere. In
/// backward the addends of all ranks are summed in fp32, in the order of the ranks' first parts.
at::Tensor whole_of_context(const at::Tensor& own, const AttentionMask& mask,
                            const ContextRegion& region, const Documents& documents);

/// As context_attention in the form kGather with keys and values that are whole on this rank, k [B,
/// G, T, 1, D] and v [B, T, G*D']: made of what whole_of_context gives. Their gradients are this
/// rank's addends.
at::Tensor attention_to_whole(const AttentionHeads& heads, double scale, const AttentionMask& mask,
                              const ContextRegion& region, const Documents& documents);

/// The form kHeads with an attention of the caller's, which sees whole rows and a part of the
/// heads: heads [B, G / ranks, T, ...] -> [B, T, G / ranks * R * D'].
at::Tensor over_heads(const AttentionHeads& heads, const ContextRegion& region,
                      const ContextRows& rows,
                      const std::function<at::Tensor(const AttentionHeads&)>& attend);

}  // namespace tessera::nn
