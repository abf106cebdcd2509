#include "base/parallel.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/implementations.h"

namespace tessera::kernels::cpu {

void window_softmax(const at::Tensor& scores, const std::optional<at::Tensor>& sinks,
                    const std::optional<at::Tensor>& shares, std::int64_t first,
                    std::int64_t window, std::int64_t groups, std::int64_t repeat, double scale) {
  const WindowRows job{.scores = mutable_data<float>(scores),
                       .weights = nullptr,
                       .sinks = sinks ? data<float>(*sinks) : nullptr,
                       .shares = shares ? mutable_data<float>(*shares) : nullptr,
                       .keys = scores.size(2),
                       .first = first,
                       .window = window,
                       .groups = groups,
                       .repeat = repeat,
                       .period = scores.size(1),
                       .scale = static_cast<float>(scale)};
  const auto kernel = best_level().window_softmax;
  base::for_ranges(scores.size(0) * scores.size(1), rows_a_thread(job.keys),
                   [&](std::int64_t begin, std::int64_t end) { kernel(job, begin, end); });
}

void window_softmax_backward(const at::Tensor& grad, const at::Tensor& weights,
                             const std::optional<at::Tensor>& shares, std::int64_t first,
                             std::int64_t window, std::int64_t groups, std::int64_t repeat,
                             double scale) {
  const WindowRows job{.scores = mutable_data<float>(grad),
                       .weights = data<float>(weights),
                       .sinks = nullptr,
                       .shares = shares ? mutable_data<float>(*shares) : nullptr,
                       .keys = grad.size(2),
                       .first = first,
                       .window = window,
                       .groups = groups,
                       .repeat = repeat,
                       .period = grad.size(1),
                       .scale = static_cast<float>(scale)};
  const auto kernel = best_level().window_softmax_backward;
  base::for_ranges(grad.size(0) * grad.size(1), rows_a_thread(job.keys),
                   [&](std::int64_t begin, std::int64_t end) { kernel(job, begin, end); });
}

void add_sink_gradients(const at::Tensor& rows, const at::Tensor& sum, std::int64_t repeat) {
  const std::int64_t groups = sum.numel() / repeat;
  const at::Tensor wide = rows.to(at::kDouble);
  const auto* terms = data<double>(wide);
  auto* sums = mutable_data<double>(sum);
  for (std::int64_t group = 0; group < wide.size(0); ++group) {
    double* of_group = sums + group % groups * repeat;
    for (std::int64_t i = 0; i < wide.size(1); ++i) of_group[i % repeat] += *terms++;
  }
}

}  // namespace tessera::kernels::cpu
