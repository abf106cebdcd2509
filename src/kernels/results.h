// The memory of the results of a kernel in cpu/: new, or given by a replay.
//
// The functions of the list return their results; a `.out` form of each would be a second list. So
// a caller that has memory for the results of a call makes a ResultsScope around it, and a kernel
// asks here for each of them. The kernel may get the memory of another result of that size, or
// none: the caller finds out when it has been returned. Threads: the one that calls. Next:
// ../capture/replay/live_entry.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::kernels {

/// While alive, results of this thread are written to `given`, contiguous tensors, each used once:
/// to the first with the requested sizes and dtype, else with that number of elements, else to new
/// memory. `given` must outlive it.
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

/// Returns the next result: contiguous, its values are undefined.
at::Tensor result(at::IntArrayRef sizes, const at::TensorOptions& options);
inline at::Tensor result_like(const at::Tensor& contiguous) {
  return result(contiguous.sizes(), contiguous.options());
}

}  // namespace tessera::kernels
