#include "nn/state/delta_chunks.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/threads/parallel.h"
#include "base/threads/product.h"
#include "kernels/on_cpu.h"

namespace tessera::nn {
namespace {

constexpr std::int64_t kChunk = 64;
/// The factor is 0 in every dtype from here on; finite, so that differences are numbers.
constexpr double kLeastDecay = -1e6;
constexpr double kNever = -std::numeric_limits<double>::infinity();

/// [B, T, ...] with zeros behind T, as [B, N, C, ...].
at::Tensor padded_chunks(const at::Tensor& x, const DeltaSizes& sizes) {
  const std::int64_t missing = sizes.N * sizes.C - sizes.T;
  if (missing == 0) return x.unflatten(1, {sizes.N, sizes.C});
  std::vector<std::int64_t> pad(static_cast<std::size_t>(2 * (x.dim() - 1)), 0);
  pad.back() = missing;
  return at::constant_pad_nd(x, pad, 0).unflatten(1, {sizes.N, sizes.C});
}

/// [B, T, H] -> [N, R, M, C].
at::Tensor gate_of_chunks(const at::Tensor& gate, const DeltaSizes& sizes) {
  return padded_chunks(gate, sizes)
      .unflatten(3, {sizes.G, sizes.R})
      .permute({1, 4, 0, 3, 2})
      .reshape({sizes.N, sizes.R, sizes.M, sizes.C});
}

/// Sets gates of [N, R, M, C] to 0 where flags [B, N, C] say so.
void clear_where(const at::Tensor& gate, const at::Tensor& flags, const DeltaSizes& sizes) {
  gate.view({sizes.N, sizes.R, sizes.B, sizes.G, sizes.C})
      .masked_fill_(flags.transpose(0, 1).unsqueeze(1).unsqueeze(3), 0);
}

template <class T>
void invert_unit_lower_here(T* matrix, std::int64_t size, T* row) {
  for (std::int64_t i = 0; i < size; ++i) {
    T* const out = matrix + i * size;
    std::copy(out, out + i, row);
    std::fill(out, out + size, T{0});
    out[i] = T{1};
    for (std::int64_t j = 0; j < i; ++j) {
      const T factor = row[j];
      const T* const above = matrix + j * size;
      for (std::int64_t c = 0; c <= j; ++c) out[c] -= factor * above[c];
    }
  }
}

template <class T>
void invert_all(const at::Tensor& matrices) {
  const std::int64_t size = matrices.size(-1), count = matrices.numel() / (size * size);
  T* const data = matrices.mutable_data_ptr<T>();
  base::for_ranges(count, 4, [&](std::int64_t begin, std::int64_t end) {
    std::vector<T> row(static_cast<std::size_t>(size));
    for (std::int64_t i = begin; i < end; ++i) {
      invert_unit_lower_here(data + i * size * size, size, row.data());
    }
  });
}

}  // namespace

DeltaSizes::DeltaSizes(const DeltaInputs& in)
    : B(in.q.size(0)),
      T(in.q.size(1)),
      G(in.q.size(2)),
      R(in.v.size(2) / in.q.size(2)),
      K(in.q.size(3)),
      V(in.v.size(3)),
      M(B * G),
      C(0),
      N((T + kChunk - 1) / kChunk) {
  C = (T + N - 1) / N;
}

at::Tensor chunks_of(const at::Tensor& x, const SpanOfChunks& span, const DeltaSizes& sizes,
                     std::int64_t repeat) {
  return x.narrow(1, span.first * sizes.C, span.count * span.length)
      .unflatten(1, {span.count, span.length})
      .unflatten(3, {sizes.G, repeat})
      .permute({1, 4, 0, 3, 2, 5});
}

DeltaGates::DeltaGates(const DeltaInputs& in, const Documents& documents, const DeltaSizes& sizes,
                       at::ScalarType compute) {
  const at::Tensor logs =
      gate_of_chunks(in.decay.to(at::kDouble).clamp_min(kLeastDecay), sizes).cumsum(3);
  sum = logs.to(compute);
  rest = (logs - sum).to(compute);
  from_start = at::exp(logs).to(compute);
  to_end = at::exp(logs.narrow(3, sizes.C - 1, 1) - logs).to(compute);
  beta = gate_of_chunks(in.beta, sizes).to(compute);
  const at::Tensor place = at::arange(sizes.C, in.q.options().dtype(at::kLong));
  ahead = place.unsqueeze(1) < place;
  if (!documents.are_packed()) return;
  const at::Tensor starts = padded_chunks(documents.starts, sizes);
  const at::Tensor first = at::arange(0, sizes.N * sizes.C, sizes.C, starts.options()).unsqueeze(1);
  clear_where(from_start, starts >= first, sizes);
  clear_where(to_end, starts != starts.narrow(2, sizes.C - 1, 1), sizes);
  apart = (starts.unsqueeze(3) != starts.unsqueeze(2)).transpose(0, 1).unsqueeze(2);
}

DeltaSpan delta_span(const DeltaInputs& in, const DeltaGates& gates, const DeltaSizes& sizes,
                     const SpanOfChunks& span) {
  const auto& [B, T, G, R, K, V, M, C, N] = sizes;
  const std::int64_t L = span.count;
  const auto options = gates.beta.options();
  const auto of_span = [&](const at::Tensor& gate) { return gate.narrow(0, span.first, L); };
  DeltaSpan result;
  result.qk = at::empty({L, M, 2 * C, K}, options);
  if (span.length < C) result.qk.zero_();
  const at::Tensor parts = result.qk.view({L, B, G, 2, C, K}).narrow(4, 0, span.length);
  parts.select(3, 0).copy_(chunks_of(in.q, span, sizes, 1).select(1, 0));
  parts.select(3, 1).copy_(chunks_of(in.k, span, sizes, 1).select(1, 0));
  result.scale = at::mul(result.qk, result.qk).sum(3, /*keepdim=*/true).add_(kHeadNormEps).rsqrt_();
  result.scale.narrow(2, 0, C).mul_(1.0 / std::sqrt(static_cast<double>(K)));
  result.qk.mul_(result.scale);

  result.products = at::empty({L, M, 2 * C, C}, options);
  at::Tensor flat = result.products.flatten(0, 1);
  const at::Tensor qk = result.qk.flatten(0, 1);
  base::bmm_out(flat, qk, qk.narrow(1, C, C).transpose(1, 2));

  const at::Tensor sum = of_span(gates.sum), rest = of_span(gates.rest);
  result.decay = at::sub(sum.unsqueeze(4), sum.unsqueeze(3));
  result.decay.add_(rest.unsqueeze(4)).sub_(rest.unsqueeze(3)).masked_fill_(gates.ahead, kNever);
  if (gates.apart.defined()) {
    result.decay.view({L, R, B, G, C, C}).masked_fill_(of_span(gates.apart).unsqueeze(1), kNever);
  }
  result.decay.exp_();

  result.inverse = at::mul(result.decay, result.products.narrow(2, C, C).unsqueeze(1));
  result.inverse.mul_(of_span(gates.beta).unsqueeze(4));
  invert_unit_lower(result.inverse);
  return result;
}

void invert_unit_lower(at::Tensor& matrices) {
  if (matrices.numel() == 0) return;
  if (!kernels::on_cpu(matrices)) {
    matrices = inverse_by_products(matrices);
  } else if (matrices.scalar_type() == at::kDouble) {
    invert_all<double>(matrices);
  } else {
    invert_all<float>(matrices);
  }
}

at::Tensor inverse_by_products(const at::Tensor& matrices) {
  const std::int64_t size = matrices.size(-1);
  const at::Tensor place = at::arange(size, matrices.options().dtype(at::kLong));
  const at::Tensor row = place.unsqueeze(1);
  at::Tensor result = at::zeros_like(matrices).add_(at::eye(size, matrices.options()));
  for (std::int64_t half = 1; half < size; half *= 2) {
    // Rows of the second half of a block, columns of its first half.
    const at::Tensor below = (row.div(2 * half, "floor") == place.div(2 * half, "floor"))
                                 .logical_and(row.div(half, "floor") > place.div(half, "floor"));
    const at::Tensor couples = matrices * below.to(matrices.scalar_type());
    result = result - result.matmul(couples).matmul(result);
  }
  return result;
}

}  // namespace tessera::nn
