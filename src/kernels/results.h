// Where a kernel of cpu/ forms its results: in fresh memory, or in what a replay has for them.
//
// The functions of the list return their results; a `.out` form of each would be a second list. So
// who has memory for the results of a call says so around it, and a kernel asks here for each of
// them. It may get the memory of another result of that size, or none: where a result lies is seen
// when it has been returned. Threads: of the thread that calls. Next: ../capture/replay/live_entry.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::kernels {

/// While alive, results of this thread are formed in `given`, contiguous ones, each once: in the
/// first of the sizes and dtype that are asked for, else of that number of elements, else in fresh
/// memory. `given` outlives it.
class ResultsScope {
 public:
  explicit ResultsScope(at::TensorList given);
  ~ResultsScope();
  ResultsScope(const ResultsScope&) = delete;
  ResultsScope& operator=(const ResultsScope&) = delete;

 private:
  friend at::Tensor result(at::IntArrayRef sizes, const at::TensorOptions& options);
  at::Tensor take(at::IntArrayRef sizes, const at::TensorOptions& options);

  at::TensorList given_;
  std::vector<bool> taken_;
  ResultsScope* outer_;
};

/// The next result: contiguous, its values are whatever was there.
at::Tensor result(at::IntArrayRef sizes, const at::TensorOptions& options);
inline at::Tensor result_like(const at::Tensor& contiguous) {
  return result(contiguous.sizes(), contiguous.options());
}

}  // namespace tessera::kernels
