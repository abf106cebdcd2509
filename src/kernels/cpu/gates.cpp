#include <vector>

#include "base/threads/parallel.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/implementations.h"
#include "kernels/results.h"

namespace tessera::kernels::cpu {
namespace {

/// Returns a new [..., I] for [..., 2I].
at::Tensor empty_half(const at::Tensor& both) {
  std::vector<std::int64_t> shape = both.sizes().vec();
  shape.back() /= 2;
  return result(shape, both.options());
}

/// Runs `body` on the two halves of each row, which are read and written in place.
template <class Body>
void for_rows(const at::Tensor& both, const Body& body) {
  const std::int64_t columns = both.size(-1);
  if (both.numel() == 0) return;
  base::for_ranges(both.numel() / columns, rows_a_thread(columns),
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t row = begin; row < end; ++row) body(row);
                   });
}

template <class T>
ClampedSwigluJob<T> clamped_job(const at::Tensor& both, double alpha, double limit) {
  ClampedSwigluJob<T> job{};
  job.both = data<T>(both);
  job.alpha = static_cast<float>(alpha);
  job.limit = static_cast<float>(limit);
  return job;
}

}  // namespace

at::Tensor swiglu(const at::Tensor& gate_input, const at::Tensor& up_input) {
  const at::Tensor gate = gate_input.contiguous();
  const at::Tensor up = up_input.contiguous();
  const at::Tensor out = result_like(gate);
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
  return out;
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& grad_input,
                                                   const at::Tensor& gate_input,
                                                   const at::Tensor& up_input) {
  const at::Tensor grad = grad_input.contiguous();
  const at::Tensor gate = gate_input.contiguous();
  const at::Tensor up = up_input.contiguous();
  const at::Tensor grad_gate = result_like(gate);
  const at::Tensor grad_up = result_like(up);
  with_kernels(grad.scalar_type(), [&](auto types, const auto& kernels) {
    using T = typename decltype(types)::T;
    Swiglu<T> job{};
    job.gate = data<T>(gate);
    job.up = data<T>(up);
    job.grad = data<T>(grad);
    job.grad_gate = mutable_data<T>(grad_gate);
    job.grad_up = mutable_data<T>(grad_up);
    base::for_ranges(grad.numel(), rows_a_thread(1), [&](std::int64_t begin, std::int64_t end) {
      kernels.swiglu_backward(job, begin, end);
    });
  });
  return {grad_gate, grad_up};
}

at::Tensor swiglu_halves(const at::Tensor& input) {
  const at::Tensor both = input.contiguous();
  const std::int64_t inner = both.size(-1) / 2;
  const at::Tensor out = empty_half(both);
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
  return out;
}

at::Tensor swiglu_halves_backward(const at::Tensor& grad_input, const at::Tensor& input) {
  const at::Tensor grad = grad_input.contiguous();
  const at::Tensor both = input.contiguous();
  const std::int64_t inner = both.size(-1) / 2;
  const at::Tensor grad_both = result_like(both);
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
  return grad_both;
}

at::Tensor clamped_swiglu(const at::Tensor& input, double alpha, double limit) {
  const at::Tensor both = input.contiguous();
  const at::Tensor out = empty_half(both);
  with_kernels(both.scalar_type(), [&](auto types, const auto& kernels) {
    using T = typename decltype(types)::T;
    ClampedSwigluJob<T> job = clamped_job<T>(both, alpha, limit);
    job.out = mutable_data<T>(out);
    base::for_ranges(out.numel(), rows_a_thread(2), [&](std::int64_t begin, std::int64_t end) {
      kernels.clamped_swiglu_forward(job, begin, end);
    });
  });
  return out;
}

at::Tensor clamped_swiglu_backward(const at::Tensor& grad_input, const at::Tensor& input,
                                   double alpha, double limit) {
  const at::Tensor grad = grad_input.contiguous();
  const at::Tensor both = input.contiguous();
  const at::Tensor grad_both = result_like(both);
  with_kernels(both.scalar_type(), [&](auto types, const auto& kernels) {
    using T = typename decltype(types)::T;
    ClampedSwigluJob<T> job = clamped_job<T>(both, alpha, limit);
    job.grad = data<T>(grad);
    job.grad_both = mutable_data<T>(grad_both);
    base::for_ranges(grad.numel(), rows_a_thread(2), [&](std::int64_t begin, std::int64_t end) {
      kernels.clamped_swiglu_backward(job, begin, end);
    });
  });
  return grad_both;
}

}  // namespace tessera::kernels::cpu
