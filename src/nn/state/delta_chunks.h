// The parts of the gated delta rule that see no state: chunks of positions, the decays between
// their positions, and the inverses of the triangular systems within them.
//
// Nothing here reads a value on the host, and no size depends on one: borders of documents are
// factors of 0. Decays are differences of running sums. These are formed in fp64 and kept in two
// parts, so that a strong decay does not cost the precision of the weak ones behind it.
//
// Short symbols: B, T, G, H, K, V as in delta_rule.h, R = H / G value heads of a key head, M = B *
// G, C positions of a chunk, N chunks of a row, L chunks of a span.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "nn/documents.h"
#include "nn/state/delta_rule.h"

namespace tessera::nn {

/// Added to the sum of squares that a head of queries or keys is divided by the root of.
inline constexpr double kHeadNormEps = 1e-6;

struct DeltaSizes {
  explicit DeltaSizes(const DeltaInputs& in);
  std::int64_t B, T, G, R, K, V;
  std::int64_t M, C, N;
};

/// Chunks [first, first + count) of a row, each of `length` positions: C, fewer in a last one
/// alone.
struct SpanOfChunks {
  std::int64_t first, count, length;
};

/// x [B, T, heads, D] -> a view [count, repeat, B, heads / repeat, length, D].
at::Tensor chunks_of(const at::Tensor& x, const SpanOfChunks& span, const DeltaSizes& sizes,
                     std::int64_t repeat);

/// Factors of positions, [N, R, M, C] in the dtype of the computation.
struct DeltaGates {
  DeltaGates(const DeltaInputs& in, const Documents& documents, const DeltaSizes& sizes,
             at::ScalarType compute);
  at::Tensor sum, rest;   ///< The running sum of decays within a chunk is sum + rest.
  at::Tensor from_start;  ///< exp of it; 0 behind a border in the chunk
  at::Tensor to_end;      ///< exp of the decays behind the position; 0 before a border
  at::Tensor beta;
  at::Tensor apart;  ///< [N, B, 1, C, C] bool: pairs of different documents; or undefined
  at::Tensor ahead;  ///< [C, C] bool: keys behind their query
};

/// The products within L chunks.
struct DeltaSpan {
  at::Tensor qk;        ///< [L, M, 2C, K]: normalized queries, scaled, above normalized keys
  at::Tensor scale;     ///< [L, M, 2C, 1]: what they were multiplied by
  at::Tensor products;  ///< [L, M, 2C, C] = qk k^T
  at::Tensor decay;     ///< [L, R, M, C, C]: of row i and column j <= i; else, or across borders, 0
  at::Tensor inverse;   ///< [L, R, M, C, C]: (1 + strict lower part of beta * decay * k k^T)^-1
};
DeltaSpan delta_span(const DeltaInputs& in, const DeltaGates& gates, const DeltaSizes& sizes,
                     const SpanOfChunks& span);

/// Replaces matrices [..., C, C] by (1 + their strict lower part)^-1; contiguous. By substitution
/// on the CPU, elsewhere by inverse_by_products(): no power of a matrix is formed, so neither loses
/// digits where keys are alike.
void invert_unit_lower(at::Tensor& matrices);
/// The inverse of blocks of 1, 2, 4... positions, each out of two of half their size.
at::Tensor inverse_by_products(const at::Tensor& matrices);

}  // namespace tessera::nn
