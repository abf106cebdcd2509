#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <vector>

#include "base/parallel.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/functions.h"

namespace tessera::nn::cpu {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct SwigluFunction : torch::autograd::Function<SwigluFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate_input,
                            const at::Tensor& up_input) {
    const at::Tensor gate = gate_input.contiguous();
    const at::Tensor up = up_input.contiguous();
    const at::Tensor out = at::empty_like(gate);
    with_kernels(gate.scalar_type(), [&](auto types, const auto& kernels) {
      using T = typename decltype(types)::T;
      Swiglu<T> job{};
      job.gate = data<T>(gate);
      job.up = data<T>(up);
      job.out = mutable_data<T>(out);
      base::for_ranges(gate.numel(), rows_a_thread(1), [&](std::int64_t begin, std::int64_t end) {
        kernels.swiglu_forward(job, begin, end);
      });
    });
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({gate, up});
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward();
    if (!grads[0].defined()) return variable_list(2);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor grad = grads[0].contiguous();
    const at::Tensor grad_gate = at::empty_like(saved[0]);
    const at::Tensor grad_up = at::empty_like(saved[1]);
    with_kernels(grad.scalar_type(), [&](auto types, const auto& kernels) {
      using T = typename decltype(types)::T;
      Swiglu<T> job{};
      job.gate = data<T>(saved[0]);
      job.up = data<T>(saved[1]);
      job.grad = data<T>(grad);
      job.grad_gate = mutable_data<T>(grad_gate);
      job.grad_up = mutable_data<T>(grad_up);
      base::for_ranges(grad.numel(), rows_a_thread(1), [&](std::int64_t begin, std::int64_t end) {
        kernels.swiglu_backward(job, begin, end);
      });
    });
    return {grad_gate, grad_up};
  }
};

/// The two halves of a row lie side by side: read and written where they are.
struct SwigluHalvesFunction : torch::autograd::Function<SwigluHalvesFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input) {
    const at::Tensor both = input.contiguous();
    const std::int64_t inner = both.size(-1) / 2;
    std::vector<std::int64_t> shape = both.sizes().vec();
    shape.back() = inner;
    const at::Tensor out = at::empty(shape, both.options());
    with_kernels(both.scalar_type(), [&](auto types, const auto& kernels) {
      using T = typename decltype(types)::T;
      const T* in = data<T>(both);
      T* to = mutable_data<T>(out);
      for_rows(both, [&](std::int64_t row) {
        Swiglu<T> job{};
        job.gate = in + 2 * row * inner;
        job.up = job.gate + inner;
        job.out = to + row * inner;
        kernels.swiglu_forward(job, 0, inner);
      });
    });
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({both});
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward();
    if (!grads[0].defined()) return variable_list(1);  // [Note: left-out results]
    const at::Tensor both = ctx->get_saved_variables()[0];
    const std::int64_t inner = both.size(-1) / 2;
    const at::Tensor grad = grads[0].contiguous();
    const at::Tensor grad_both = at::empty_like(both);
    with_kernels(both.scalar_type(), [&](auto types, const auto& kernels) {
      using T = typename decltype(types)::T;
      const T* in = data<T>(both);
      const T* from = data<T>(grad);
      T* to = mutable_data<T>(grad_both);
      for_rows(both, [&](std::int64_t row) {
        Swiglu<T> job{};
        job.gate = in + 2 * row * inner;
        job.up = job.gate + inner;
        job.grad = from + row * inner;
        job.grad_gate = to + 2 * row * inner;
        job.grad_up = job.grad_gate + inner;
        kernels.swiglu_backward(job, 0, inner);
      });
    });
    return {grad_both};
  }

 private:
  template <class Body>
  static void for_rows(const at::Tensor& both, const Body& body) {
    const std::int64_t columns = both.size(-1);
    if (both.numel() == 0) return;
    base::for_ranges(both.numel() / columns, rows_a_thread(columns),
                     [&](std::int64_t begin, std::int64_t end) {
                       for (std::int64_t row = begin; row < end; ++row) body(row);
                     });
  }
};

}  // namespace

at::Tensor swiglu_halves(const at::Tensor& both) { return SwigluHalvesFunction::apply(both); }

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return SwigluFunction::apply(gate, up);
}

}  // namespace tessera::nn::cpu
