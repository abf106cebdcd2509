#include "nn/grouped_linear.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>

#include "nn/first_derivative.h"
#include "tessera/dtype_watch.h"
#include "tessera/error.h"
#include "tessera/recompute.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor rows_of(const at::Tensor& x, const GroupOffsets& offsets, std::size_t group) {
  return x.narrow(0, offsets[group], offsets[group + 1] - offsets[group]);
}

void check_offsets(const at::Tensor& x, const at::Tensor& weight, const GroupOffsets& offsets) {
  TESSERA_INVARIANT(static_cast<std::int64_t>(offsets.size()) == weight.size(0) + 1 &&
                        offsets.front() == 0 && offsets.back() == x.size(0),
                    "offsets that are not those of the groups");
}

at::Tensor products(const at::Tensor& x, const at::Tensor& weight, const GroupOffsets& offsets) {
  const at::Tensor y = at::empty({x.size(0), weight.size(1)}, x.options());
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
    at::Tensor part = rows_of(y, offsets, e);
    if (part.size(0) == 0) continue;
    at::mm_out(part, rows_of(x, offsets, e), weight.select(0, static_cast<std::int64_t>(e)).t());
  }
  return y;
}

struct GroupedLinearFunction : torch::autograd::Function<GroupedLinearFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input, const at::Tensor& weight,
                            const GroupOffsets& offsets) {
    weight.const_data_ptr();    // a parameter without data says so here, not from inside a product
    const WideScope own_dtype;  // the result has the input's
    const at::Tensor x = input.to(weight.scalar_type());
    const at::Tensor y =
        keep({x.size(0), weight.size(1)}, [&] { return products(x, weight, offsets); });
    ctx->save_for_backward({x, weight});
    ctx->saved_data["offsets"] = offsets;
    ctx->saved_data["input_dtype"] = input.scalar_type();
    return y.to(input.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward();
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& weight = saved[1];
    const GroupOffsets offsets = ctx->saved_data["offsets"].toIntVector();
    const at::Tensor grad = grads[0].to(weight.scalar_type()).contiguous();
    variable_list result(3);
    if (ctx->needs_input_grad(0)) {
      const at::Tensor grad_x = at::empty(x.sizes(), x.options());
      for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
        at::Tensor part = rows_of(grad_x, offsets, e);
        if (part.size(0) == 0) continue;
        at::mm_out(part, rows_of(grad, offsets, e), weight.select(0, static_cast<std::int64_t>(e)));
      }
      result[0] = grad_x.to(ctx->saved_data["input_dtype"].toScalarType());
    }
    if (ctx->needs_input_grad(1)) {
      result[1] = at::empty(weight.sizes(), weight.options());
      for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
        at::Tensor part = result[1].select(0, static_cast<std::int64_t>(e));
        if (offsets[e] == offsets[e + 1]) {
          part.zero_();
        } else {
          at::mm_out(part, rows_of(grad, offsets, e).t(), rows_of(x, offsets, e));
        }
      }
    }
    return result;
  }
};

}  // namespace

at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight,
                          const GroupOffsets& offsets) {
  check_offsets(x, weight, offsets);
  return GroupedLinearFunction::apply(x, weight, offsets);
}

at::Tensor grouped_linear_composite(const at::Tensor& x, const at::Tensor& weight,
                                    const GroupOffsets& offsets) {
  check_offsets(x, weight, offsets);
  std::vector<at::Tensor> parts;
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
    parts.push_back(at::mm(rows_of(x, offsets, e).to(weight.scalar_type()),
                           weight.select(0, static_cast<std::int64_t>(e)).t()));
  }
  return at::cat(parts, 0).to(x.scalar_type());
}

}  // namespace tessera::nn
