#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include "base/parallel.h"
#include "nn/cpu/dispatch.h"
#include "nn/cpu/functions.h"

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
    ctx->save_for_backward({gate, up});
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward();
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

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return SwigluFunction::apply(gate, up);
}

}  // namespace tessera::nn::cpu
