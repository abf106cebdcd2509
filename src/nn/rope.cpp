#include "nn/rope.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/functions.h"
#include "nn/rms_norm.h"
#include "tessera/error.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {
namespace {

/// 1 where a pair keeps its speed, 0 where it is slowed by the whole factor: fp32 [D/2].
at::Tensor kept_part(const YarnScaling& yarn, std::int64_t head_dim, double theta) {
  const auto dim = static_cast<double>(head_dim);
  const auto context = static_cast<double>(yarn.original_max_position_embeddings);
  // The number of the pair that turns so many times in the original context.
  const auto pair = [&](double turns) {
    return dim * std::log(context / (turns * 2.0 * std::numbers::pi)) / (2.0 * std::log(theta));
  };
  double low = pair(yarn.beta_fast);
  double high = pair(yarn.beta_slow);
  if (yarn.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1.0);
  if (low == high) high += 0.001;  // transformers' way around a division by zero
  const at::Tensor ramp = (at::arange(head_dim / 2, at::kFloat) - low) / (high - low);
  return 1.0 - ramp.clamp(0.0, 1.0);
}

}  // namespace

at::Tensor inverse_frequencies(const RopeOptions& options) {
  const auto dim = static_cast<double>(options.head_dim);
  const at::Tensor exponents = at::arange(0, options.head_dim, 2, at::kFloat) / dim;
  const at::Tensor powers = at::pow(options.theta, exponents);
  const at::Tensor plain = powers.reciprocal();
  TESSERA_INVARIANT(!options.yarn || (!options.llama3 && !options.turned_pairs),
                    "rope of two kinds");
  if (options.yarn) {
    const at::Tensor kept = kept_part(*options.yarn, options.head_dim, options.theta);
    return (options.yarn->factor * powers).reciprocal() * (1.0 - kept) + plain * kept;
  }
  if (options.turned_pairs) {
    TESSERA_INVARIANT(!options.llama3 && *options.turned_pairs <= options.head_dim / 2,
                      "rope of two kinds, or more pairs than there are");
    const at::Tensor turned = plain / options.factor;
    turned.slice(0, *options.turned_pairs).zero_();
    return turned;
  }
  if (!options.llama3) return plain;
  const Llama3Scaling& scaling = *options.llama3;
  const auto context = static_cast<double>(scaling.original_max_position_embeddings);
  const at::Tensor wavelength = 2.0 * std::numbers::pi / plain;
  const at::Tensor blend = (context / wavelength - scaling.low_freq_factor) /
                           (scaling.high_freq_factor - scaling.low_freq_factor);
  const at::Tensor stretched = plain / scaling.factor;
  const at::Tensor between = (1.0 - blend) * stretched + blend * plain;
  const at::Tensor longer =
      at::where(wavelength > context / scaling.low_freq_factor, stretched, between);
  return at::where(wavelength < context / scaling.high_freq_factor, plain, longer);
}

Rope::Rope(const RopeOptions& options)
    : frequencies_(inverse_frequencies(options)), table_factor_(options.table_factor) {}

RopeTable Rope::table(std::int64_t positions, at::ScalarType dtype, at::Device device) {
  const std::int64_t place = (static_cast<std::int64_t>(device.type()) << 16) + device.index();
  RopeTable& kept = tables_[{dtype, place}];
  if (!kept.cos.defined() || kept.cos.size(0) < positions) {
    const at::Tensor angles = at::outer(at::arange(positions, at::kFloat), frequencies_);
    const auto finished = [&](const at::Tensor& x) {
      return (table_factor_ == 1.0 ? x : x * table_factor_).to(device, dtype);
    };
    kept = {finished(angles.cos()), finished(angles.sin())};
  }
  return {kept.cos.narrow(0, 0, positions), kept.sin.narrow(0, 0, positions)};
}

at::Tensor rope_heads_composite(const at::Tensor& x, const HeadLayout& layout, const HeadNorm& norm,
                                const RopeTable& table) {
  const std::int64_t head_dim = x.size(2) / layout.heads;
  at::Tensor split =
      x.reshape({x.size(0), x.size(1), layout.heads / layout.repeat, layout.repeat, head_dim});
  if (norm.weight.defined())
    split = rms_norm_composite(split, norm.weight, norm.eps, norm.rounding);
  const at::Tensor turned = split.transpose(1, 2);  // [B, G, T, R, D]
  const at::Tensor first = turned.narrow(4, 0, head_dim / 2);
  const at::Tensor second = turned.narrow(4, head_dim / 2, head_dim / 2);
  const at::Tensor cos = table.cos.unsqueeze(1);
  const at::Tensor sin = table.sin.unsqueeze(1);
  return at::cat({first * cos - second * sin, second * cos + first * sin}, /*dim=*/4);
}

at::Tensor rope_heads(const at::Tensor& x, const HeadLayout& layout, const HeadNorm& norm,
                      const RopeTable& table) {
  return cpu::has_kernels(x, norm.weight) ? cpu::rope_heads(x, layout, norm, table)
                                          : rope_heads_composite(x, layout, norm, table);
}

at::Tensor turn_neighbours(const at::Tensor& x, const RopeTable& table) {
  const WideScope turning;
  const at::Tensor wide = x.to(at::promote_types(x.scalar_type(), table.cos.scalar_type()));
  const at::Tensor pairs = wide.unflatten(3, {-1, 2});  // [B, T, H, D/2, 2]
  const at::Tensor first = pairs.select(4, 0);
  const at::Tensor second = pairs.select(4, 1);
  const at::Tensor cos = table.cos.unsqueeze(1);
  const at::Tensor sin = table.sin.unsqueeze(1);
  return at::stack({first * cos - second * sin, second * cos + first * sin}, /*dim=*/4)
      .flatten(3, 4)
      .to(x.scalar_type());
}

}  // namespace tessera::nn
