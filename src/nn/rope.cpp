#include "nn/rope.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numbers>
#include <vector>

#include "base/first_derivative.h"
#include "comm/host_read.h"
#include "kernels/kernels.h"
#include "nn/rms_norm.h"
#include "tessera/error.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct RopeHeadsFunction : torch::autograd::Function<RopeHeadsFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input,
                            const std::optional<at::Tensor>& weight, const at::Tensor& cos,
                            const at::Tensor& sin, std::int64_t heads, std::int64_t repeat,
                            double eps, bool rounds_first) {
    const at::Tensor x = input.contiguous();
    auto [y, scale] = kernels::rope_heads(x, weight, cos, sin, heads, repeat, eps, rounds_first);
    ctx->set_materialize_grads(false);
    // Without a norm the gradient does not depend on x.
    ctx->save_for_backward(
        {weight ? x : at::Tensor(), weight.value_or(at::Tensor()), cos, sin, scale});
    ctx->saved_data["rounds_first"] = rounds_first;
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(8);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    const auto of_norm = [&](std::size_t i) {
      return saved[1].defined() ? std::optional(saved[i]) : std::nullopt;
    };
    // Edges are counted over tensors: there is none for a weight that is not there.
    auto [grad_x, grad_weight] = kernels::rope_heads_backward(
        grads[0], of_norm(0), of_norm(1), saved[2], saved[3], of_norm(4),
        ctx->saved_data["rounds_first"].toBool(), saved[1].defined() && ctx->needs_input_grad(1));
    const at::Tensor none;
    return {grad_x, grad_weight, none, none, none, none, none, none};
  }
};

/// 1 where a pair keeps its speed, 0 where it is slowed by the whole factor: fp32 [D/2].
at::Tensor kept_part(const RopeOptions& options, std::int64_t head_dim) {
  const auto dim = static_cast<double>(head_dim);
  const auto context = static_cast<double>(options.original_max_position_embeddings);
  // The number of the pair that turns so many times in the original context.
  const auto pair = [&](double turns) {
    return dim * std::log(context / (turns * 2.0 * std::numbers::pi)) /
           (2.0 * std::log(options.theta));
  };
  double low = pair(options.yarn.beta_fast);
  double high = pair(options.yarn.beta_slow);
  if (options.yarn.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1.0);
  if (low == high) high += 0.001;  // transformers' way around a division by zero
  const at::Tensor ramp = (at::arange(head_dim / 2, at::kFloat) - low) / (high - low);
  return 1.0 - ramp.clamp(0.0, 1.0);
}

at::Tensor yarn_frequencies(const at::Tensor& powers, const RopeOptions& options,
                            std::int64_t head_dim) {
  const at::Tensor kept = kept_part(options, head_dim);
  return (options.factor * powers).reciprocal() * (1.0 - kept) + powers.reciprocal() * kept;
}

at::Tensor proportional_frequencies(const at::Tensor& plain, const RopeOptions& options,
                                    std::int64_t head_dim) {
  // In this order: transformers rounds down after the product.
  const auto rotated_pairs = static_cast<std::int64_t>(
      std::floor(options.partial_rotary_factor * static_cast<double>(head_dim) / 2.0));
  TESSERA_INVARIANT(rotated_pairs <= head_dim / 2, "rope of more pairs than there are");
  const at::Tensor turned = plain / options.factor;
  turned.slice(0, rotated_pairs).zero_();
  return turned;
}

at::Tensor llama3_frequencies(const at::Tensor& plain, const RopeOptions& options) {
  const auto context = static_cast<double>(options.original_max_position_embeddings);
  const at::Tensor wavelength = 2.0 * std::numbers::pi / plain;
  const at::Tensor blend = (context / wavelength - options.low_freq_factor) /
                           (options.high_freq_factor - options.low_freq_factor);
  const at::Tensor lengthened = plain / options.factor;
  const at::Tensor between = (1.0 - blend) * lengthened + blend * plain;
  const at::Tensor longer =
      at::where(wavelength > context / options.low_freq_factor, lengthened, between);
  return at::where(wavelength < context / options.high_freq_factor, plain, longer);
}

at::Tensor long_rope_frequencies(const at::Tensor& powers, const RopeOptions& options,
                                 std::int64_t positions) {
  const LongRopeOptions& factors = *options.long_rope;
  const bool is_long = positions > options.original_max_position_embeddings;
  const std::vector<double>& of_pairs = is_long ? factors.long_factor : factors.short_factor;
  TESSERA_INVARIANT(std::ssize(of_pairs) == powers.size(0), "a factor of every pair");
  // Made by operations: a dry step has no memory that values could be written into.
  std::vector<at::Tensor> each;
  for (const double factor : of_pairs) each.push_back(at::full({1}, factor, at::kFloat));
  return (at::cat(each) * powers).reciprocal();
}

/// Returns how many elements of a head, from the first, have the frequencies: all for
/// kProportional.
std::int64_t turned_dim(const RopeOptions& options, std::int64_t head_dim) {
  if (options.type == RopeType::kProportional) return head_dim;
  return static_cast<std::int64_t>(static_cast<double>(head_dim) * options.partial_rotary_factor);
}

/// The table times its factor where it turns: what does not turn keeps cos = 1, as transformers
/// leaves it out of the table.
at::Tensor scaled(const at::Tensor& x, const RopeOptions& options, std::int64_t head_dim) {
  const double factor = table_factor(options);
  if (factor == 1.0) return x;
  const std::int64_t pairs = turned_dim(options, head_dim) / 2;
  return at::cat({x.narrow(1, 0, pairs) * factor, x.narrow(1, pairs, x.size(1) - pairs)}, 1);
}

std::int64_t key_of(at::Device device) {
  return (static_cast<std::int64_t>(device.type()) << 16) + device.index();
}

RopeTable first_rows(const RopeTable& table, std::int64_t rows) {
  return {table.cos.narrow(0, 0, rows), table.sin.narrow(0, 0, rows)};
}

}  // namespace

at::Tensor inverse_frequencies(const RopeOptions& options, std::int64_t head_dim,
                               std::int64_t positions) {
  const std::int64_t turned = turned_dim(options, head_dim);
  if (turned != head_dim) {
    // An element that does not turn has the angle 0.
    RopeOptions whole = options;
    whole.partial_rotary_factor = 1.0;
    return at::constant_pad_nd(inverse_frequencies(whole, turned, positions),
                               {0, (head_dim - turned) / 2});
  }
  const auto dim = static_cast<double>(head_dim);
  const at::Tensor exponents = at::arange(0, head_dim, 2, at::kFloat) / dim;
  const at::Tensor powers = at::pow(options.theta, exponents);
  switch (options.type) {
    case RopeType::kDefault:
      return powers.reciprocal();
    case RopeType::kLlama3:
      return llama3_frequencies(powers.reciprocal(), options);
    case RopeType::kProportional:
      return proportional_frequencies(powers.reciprocal(), options, head_dim);
    case RopeType::kYarn:
      return yarn_frequencies(powers, options, head_dim);
    case RopeType::kLinear:
      return powers.reciprocal() / options.factor;
    case RopeType::kLongRope:
      return long_rope_frequencies(powers, options, positions);
  }
  TESSERA_INVARIANT(false, "a kind of rope that has no frequencies");
}

Rope::Rope(const RopeOptions& options, std::int64_t head_dim)
    : options_(options), head_dim_(head_dim) {}

RopeTable Rope::table(std::int64_t positions, std::int64_t length, at::ScalarType dtype,
                      at::Device device) {
  const bool is_long = length > longest_short_row(options_).value_or(length);
  Tables& tables = is_long ? long_ : short_;
  RopeTable& kept = tables.by_place[{dtype, key_of(device)}];
  if (!kept.cos.defined() || kept.cos.size(0) < positions) {
    if (!tables.frequencies.defined()) {
      tables.frequencies = inverse_frequencies(options_, head_dim_, length);
    }
    const at::Tensor angles = at::outer(at::arange(positions, at::kFloat), tables.frequencies);
    const auto finished = [&](const at::Tensor& x) {
      return comm::uploaded(scaled(x, options_, head_dim_).to(dtype), device);
    };
    kept = {finished(angles.cos()), finished(angles.sin())};
  }
  return first_rows(kept, positions);
}

RopeTable Rope::short_and_long_table(std::int64_t positions, at::ScalarType dtype,
                                     at::Device device) {
  const std::int64_t longest_short = longest_short_row(options_).value();
  RopeTable& kept = both_[{dtype, key_of(device)}];
  if (!kept.cos.defined() || kept.cos.size(0) < longest_short + positions) {
    const RopeTable brief = table(longest_short, dtype, device);
    const RopeTable whole = table(positions, dtype, device);
    kept = {at::cat({brief.cos, whole.cos}), at::cat({brief.sin, whole.sin})};
  }
  return first_rows(kept, longest_short + positions);
}

at::Tensor pairs_of_part(const at::Tensor& x, std::int64_t heads, std::int64_t turned) {
  // An order of what is there, of a norm whose weights may be wider than their layer, too.
  const WideScope own_dtype;
  const at::Tensor by_head = x.unflatten(-1, {heads, -1});
  const std::int64_t half = turned / 2, rest = (by_head.size(-1) - turned) / 2;
  const auto parts = by_head.split_with_sizes({half, half, rest, rest}, -1);
  return at::cat({parts[0], parts[2], parts[1], parts[3]}, -1).flatten(-2);
}

at::Tensor rope_heads(const at::Tensor& x, const HeadLayout& layout, const HeadNorm& norm,
                      const RopeTable& table) {
  const std::optional<at::Tensor> weight =
      norm.weight.defined() ? std::optional(norm.weight) : std::nullopt;
  const bool rounds_first = norm.rounding == NormRounding::kBeforeWeight;
  if (base::has_second_derivatives(x)) {
    return std::get<0>(kernels::rope_heads(x, weight, table.cos, table.sin, layout.heads,
                                           layout.repeat, norm.eps, rounds_first));
  }
  return RopeHeadsFunction::apply(x, weight, table.cos, table.sin, layout.heads, layout.repeat,
                                  norm.eps, rounds_first);
}

at::Tensor rotate_interleaved(const at::Tensor& x, const RopeTable& table) {
  const WideScope turning;
  const at::Tensor wide = x.to(at::promote_types(x.scalar_type(), table.cos.scalar_type()));
  const at::Tensor pairs = wide.unflatten(3, {-1, 2});  // [B, T, H, D/2, 2]
  const at::Tensor first = pairs.select(4, 0);
  const at::Tensor second = pairs.select(4, 1);
  const at::Tensor cos = table.cos.unsqueeze(-2);
  const at::Tensor sin = table.sin.unsqueeze(-2);
  return at::stack({first * cos - second * sin, second * cos + first * sin}, /*dim=*/4)
      .flatten(3, 4)
      .to(x.scalar_type());
}

AxialTable axial_table(const at::Tensor& positions, std::int64_t head_dim, double theta,
                       at::ScalarType dtype) {
  const at::Tensor frequencies =
      comm::uploaded(inverse_frequencies({.theta = theta}, head_dim / 2), positions.device());
  const at::Tensor angles = positions.to(at::kFloat).unsqueeze(3) * frequencies;
  return {angles.cos().to(dtype), angles.sin().to(dtype)};
}

at::Tensor axial_rope_heads(const at::Tensor& x, const HeadLayout& layout, const HeadNorm& norm,
                            const AxialTable& table) {
  const std::int64_t head_dim = x.size(2) / layout.heads;
  at::Tensor heads =
      x.reshape({x.size(0), x.size(1), layout.heads / layout.repeat, layout.repeat, head_dim});
  if (norm.weight.defined()) heads = rms_norm(heads, norm.weight, norm.eps, norm.rounding);
  // [N, P, G, R, 2 axes, 2 of a pair, D/4]
  const at::Tensor pairs =
      heads.view({heads.size(0), heads.size(1), heads.size(2), heads.size(3), 2, 2, head_dim / 4});
  const at::Tensor first = pairs.select(5, 0);
  const at::Tensor second = pairs.select(5, 1);
  const at::Tensor cos = table.cos.unsqueeze(2).unsqueeze(2);
  const at::Tensor sin = table.sin.unsqueeze(2).unsqueeze(2);
  const at::Tensor turned =
      at::cat({first * cos - second * sin, second * cos + first * sin}, /*dim=*/5);
  return turned.reshape(heads.sizes()).transpose(1, 2).contiguous();
}

}  // namespace tessera::nn
