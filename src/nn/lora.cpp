#include "nn/lora.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>

#include "base/first_derivative.h"
#include "base/hash.h"
#include "base/parallel.h"
#include "base/random.h"
#include "tessera/error.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The counter's last word says what is drawn, as in base/random.cpp.
constexpr std::uint32_t kDropoutPurpose = 4;
constexpr std::int64_t kRowsOfAThread = 16;

/// [..., K] as [M, K]; M may be 0.
at::Tensor by_token(const at::Tensor& x) {
  const auto sizes = x.sizes();
  return x.reshape({c10::multiply_integers(sizes.begin(), sizes.end() - 1), sizes.back()});
}

/// [..., K] as [M, K] in the adapter's dtype, what is dropped left out.
at::Tensor adapter_input(const at::Tensor& x, const DropoutDraw& draw, at::ScalarType dtype) {
  at::Tensor wide = x.to(dtype);
  if (draw.probability > 0) wide = wide * dropout_factors(draw, x.sizes().vec(), dtype);
  return by_token(wide);
}

/// Saved for backward: x in its own dtype, which the frozen layer beside holds too, and [M, R].
struct AdapterFunction : torch::autograd::Function<AdapterFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& base, const at::Tensor& x,
                            const at::Tensor& a, const at::Tensor& b, double scale,
                            const DropoutDraw& draw) {
    const WideScope own_dtype;  // the result has the layer's
    const at::Tensor input = adapter_input(x, draw, a.scalar_type());
    const at::Tensor hidden = at::mm(input, a.t());
    const at::Tensor delta = at::mm(hidden, b.t()).mul_(scale).view(base.sizes());
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({x, a, b, hidden});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["probability"] = draw.probability;
    ctx->saved_data["stream"] = static_cast<std::int64_t>(draw.stream);
    ctx->saved_data["first_row"] = draw.first_row;
    return (base.to(a.scalar_type()) + delta).to(base.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(6);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& a = saved[1];
    const at::Tensor& b = saved[2];
    const DropoutDraw draw{ctx->saved_data["probability"].toDouble(),
                           static_cast<std::uint64_t>(ctx->saved_data["stream"].toInt()),
                           ctx->saved_data["first_row"].toInt()};
    const at::Tensor grad =
        by_token(grads[0]).to(a.scalar_type()) * ctx->saved_data["scale"].toDouble();
    const at::Tensor grad_hidden = at::mm(grad, b);
    variable_list result(6);
    if (ctx->needs_input_grad(0)) result[0] = grads[0];
    if (ctx->needs_input_grad(1)) {
      at::Tensor grad_x = at::mm(grad_hidden, a).view(x.sizes());
      if (draw.probability > 0) {
        grad_x.mul_(dropout_factors(draw, x.sizes().vec(), a.scalar_type()));
      }
      result[1] = grad_x.to(x.scalar_type());
    }
    if (ctx->needs_input_grad(2)) {
      result[2] = at::mm(grad_hidden.t(), adapter_input(x, draw, a.scalar_type()));
    }
    if (ctx->needs_input_grad(3)) result[3] = at::mm(grad.t(), saved[3]);
    return result;
  }
};

/// One row of one position: a block of the generator is four columns.
template <class T>
void fill_factors(T* out, std::int64_t columns, std::int64_t row, std::int64_t position,
                  const DropoutDraw& draw) {
  const PhiloxKey key{static_cast<std::uint32_t>(draw.stream),
                      static_cast<std::uint32_t>(draw.stream >> 32)};
  const double limit = std::ldexp(draw.probability, 32);
  const T kept = static_cast<T>(1.0 / (1.0 - draw.probability));
  for (std::int64_t column = 0; column < columns; column += 4) {
    const PhiloxCounter words =
        philox({static_cast<std::uint32_t>(column / 4), static_cast<std::uint32_t>(position),
                static_cast<std::uint32_t>(row), kDropoutPurpose},
               key);
    const std::int64_t lanes = std::min<std::int64_t>(4, columns - column);
    for (std::int64_t lane = 0; lane < lanes; ++lane) {
      const bool drops = static_cast<double>(words[static_cast<std::size_t>(lane)]) < limit;
      out[column + lane] = drops ? T{0} : kept;
    }
  }
}

template <class T>
void fill_all(const at::Tensor& factors, const DropoutDraw& draw) {
  const std::int64_t positions = factors.size(1);
  const std::int64_t columns = factors.size(2);
  T* const out = factors.mutable_data_ptr<T>();
  base::for_ranges(factors.size(0) * positions, kRowsOfAThread,
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t i = begin; i < end; ++i) {
                       fill_factors(out + i * columns, columns, draw.first_row + i / positions,
                                    i % positions, draw);
                     }
                   });
}

}  // namespace

DropoutDraw dropout_draw(const LoraOptions& options, const SamplePlace& place) {
  Hasher stream;
  stream.add(place.seed).add(place.step).add(options.layer);
  return {options.dropout, stream.digest(), place.first_row};
}

at::Tensor dropout_factors(const DropoutDraw& draw, const std::vector<std::int64_t>& shape,
                           at::ScalarType dtype) {
  TESSERA_INVARIANT(shape.size() == 3, "dropout of an adapter's input with ", shape.size(),
                    " dims, expected rows, positions and columns");
  const bool twice = dtype == at::kDouble;
  at::Tensor factors = at::empty(shape, at::TensorOptions().dtype(twice ? dtype : at::kFloat));
  twice ? fill_all<double>(factors, draw) : fill_all<float>(factors, draw);
  return factors.to(dtype);
}

at::Tensor add_adapter(const at::Tensor& base, const at::Tensor& x, const at::Tensor& a,
                       const at::Tensor& b, const LoraOptions& options) {
  a.const_data_ptr();  // a parameter without data says so here, not from inside a product
  b.const_data_ptr();
  const auto place = sample_place();
  const bool drops = options.dropout > 0 && place;
  return AdapterFunction::apply(base, x, a, b, options.scale,
                                drops ? dropout_draw(options, *place) : DropoutDraw{});
}

}  // namespace tessera::nn
