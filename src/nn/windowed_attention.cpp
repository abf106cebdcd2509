#include "nn/windowed_attention.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <vector>

#include "kernels/cpu/functions.h"
#include "nn/masked_attention.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {
namespace {

// Of one product: enough rows to be worth it, few enough that its scores stay small.
constexpr std::int64_t kBlock = 256;

}  // namespace

at::Tensor windowed_attention_composite(const at::Tensor& q, const at::Tensor& keys,
                                        const at::Tensor& values, const AttentionReach& reach,
                                        double scale) {
  // Sinks get their gradient out of sums that nearly cancel: 16-bit scores would leave little of
  // it.
  const WideScope scores;
  const at::ScalarType inside = at::promote_types(q.scalar_type(), at::kFloat);
  const at::Tensor wide_q = q.to(inside);
  const at::Tensor wide_keys = keys.to(inside);
  const at::Tensor wide_values = values.to(inside);
  const std::int64_t queries = q.size(2);
  const std::int64_t first = keys.size(2) - queries;
  const at::Tensor positions = at::arange(keys.size(2), q.device());
  std::vector<at::Tensor> blocks;
  std::int64_t begin = 0;
  do {
    const std::int64_t end = std::min(begin + kBlock, queries);
    const std::int64_t seen_from =
        reach.window ? std::max<std::int64_t>(0, first + begin - *reach.window + 1) : 0;
    const std::int64_t seen = first + end - seen_from;
    const at::Tensor key = positions.narrow(0, seen_from, seen);
    const at::Tensor own =
        positions.narrow(0, first + begin, end - begin).view({end - begin, 1, 1});
    at::Tensor hidden = key > own;
    if (reach.window) hidden = hidden.logical_or(key <= own - *reach.window);
    blocks.push_back(attention_composite(
        wide_q.narrow(2, begin, end - begin), wide_keys.narrow(2, seen_from, seen),
        wide_values.narrow(2, seen_from, seen), {.hidden = hidden, .sinks = reach.sinks}, scale));
    begin = end;
  } while (begin < queries);
  return (blocks.size() == 1 ? blocks.front() : at::cat(blocks, 1)).to(q.scalar_type());
}

at::Tensor windowed_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                              const AttentionReach& reach, double scale) {
  if (!q.device().is_cpu()) return windowed_attention_composite(q, keys, values, reach, scale);
  const WideScope inside;
  return cpu::windowed_attention(q, keys, values, reach, scale);
}

}  // namespace tessera::nn
