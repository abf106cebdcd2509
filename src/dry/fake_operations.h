// Operations on fake tensors: results of the right sizes, strides and dtypes, and no values.
//
// [Note: fake tensors] An operation of libtorch that reads or writes a fake tensor is run on meta
// tensors of its arguments' sizes; its results are fake tensors of what came out. One whose arguments
// all have values runs as ever: row numbers, counts of experts and control messages are small and
// are computed. Views run as ever on fake tensors too, since they touch no element. What the host
// reads has one element, which has a value even if nobody knows it: one that says that all is well.
// Kernels of this library (kernels/cpu) run without their loops (base/threads/shapes_only.h), so that
// what they make beside their results is made here too. Source: PyTorch's FakeTensor mode, which does
// so in Python. Next: size_rules.h, allocator.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "base/threads/shapes_only.h"
#include "dry/allocator.h"
#include "dry/memory_count.h"
#include "kernels/watch.h"
#include "tessera/kernels_of.h"

namespace tessera::dry {

/// Whether libtorch computes the operation itself, on the elements of its arguments; else it calls others
/// for it.
bool computes_elements(const c10::OperatorHandle& operation);

class FakeOperations final : public kernels::Watcher {
 public:
  FakeOperations() : Watcher(kernels::SeesKernels::kNo) {}
  void run(const c10::OperatorHandle& operation, c10::DispatchKeySet below,
           c10::Stack* stack) override;
};

/// While alive, floating tensors and blocks of bytes that this thread makes are fake, and what it
/// computes from them is. Of a GPU the memory of fake_device() alone is counted.
class FakeScope {
 public:
  explicit FakeScope(KernelsOf kernels = KernelsOf::kCpu)
      : counts_(kernels == KernelsOf::kCpu ? Counts::kBytes : Counts::kNothing),
        watch_(operations_) {
    install_allocator();
  }

 private:
  CountScope counts_;
  FakeOperations operations_;
  kernels::WatchScope watch_;
  base::ShapesOnly shapes_only_;
};

}  // namespace tessera::dry
