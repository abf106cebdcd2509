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

/// One pass in each direction; the input is all that is kept.
struct ClampedSwigluKernel : torch::autograd::Function<ClampedSwigluKernel> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input,
                            const ClampedSwiglu& options) {
    const at::Tensor both = input.contiguous();
    std::vector<std::int64_t> shape = both.sizes().vec();
    shape.back() /= 2;
    const at::Tensor out = at::empty(shape, both.options());
    with_kernels(both.scalar_type(), [&](auto types, const auto& kernels) {
      using T = typename decltype(types)::T;
      ClampedSwigluJob<T> job = job_of<T>(both, options.alpha, options.limit);
      job.out = mutable_data<T>(out);
      base::for_ranges(out.numel(), rows_a_thread(2), [&](std::int64_t begin, std::int64_t end) {
        kernels.clamped_swiglu_forward(job, begin, end);
      });
    });
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({both});
    ctx->saved_data["alpha"] = options.alpha;
    ctx->saved_data["limit"] = options.limit;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    refuse_double_backward();
    if (!grads[0].defined()) return variable_list(2);  // [Note: left-out results]
    const at::Tensor both = ctx->get_saved_variables()[0];
    const at::Tensor grad = grads[0].contiguous();
    const at::Tensor grad_both = at::empty_like(both);
    with_kernels(both.scalar_type(), [&](auto types, const auto& kernels) {
      using T = typename decltype(types)::T;
      ClampedSwigluJob<T> job =
          job_of<T>(both, ctx->saved_data["alpha"].toDouble(), ctx->saved_data["limit"].toDouble());
      job.grad = data<T>(grad);
      job.grad_both = mutable_data<T>(grad_both);
      base::for_ranges(grad.numel(), rows_a_thread(2), [&](std::int64_t begin, std::int64_t end) {
        kernels.clamped_swiglu_backward(job, begin, end);
      });
    });
    return {grad_both, at::Tensor()};
  }

 private:
  template <class T>
  static ClampedSwigluJob<T> job_of(const at::Tensor& both, double alpha, double limit) {
    ClampedSwigluJob<T> job{};
    job.both = data<T>(both);
    job.alpha = static_cast<float>(alpha);
    job.limit = static_cast<float>(limit);
    return job;
  }
};

}  // namespace

at::Tensor clamped_swiglu(const at::Tensor& both, const ClampedSwiglu& options) {
  return ClampedSwigluKernel::apply(both, options);
}

}  // namespace tessera::nn::cpu
