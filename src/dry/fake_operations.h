// Operations on fake tensors: results of the right sizes, strides and dtypes, and no values.
//
// [Note: fake tensors] An operation of libtorch that reads or writes a fake tensor is run on meta
// tensors with its arguments' sizes, and its results are fake tensors with the sizes of the meta
// results. An operation whose arguments all have values runs as usual: row numbers, counts of
// experts and control messages are small and are computed. Views run as usual also on fake tensors,
// since they access no element. A value that the host reads is one element, which has the value
// that passes a check, since the real one is unknown. Kernels of this library (kernels/cpu) run
// without their loops (base/threads/shapes_only.h), so that the tensors that they make in addition
// to their results are made here too. Source: PyTorch's FakeTensor mode, which does this in Python.
// Next: size_rules.h, allocator.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "base/threads/shapes_only.h"
#include "dry/allocator.h"
#include "dry/memory_count.h"
#include "kernels/watch.h"
#include "tessera/kernels_of.h"

namespace tessera::dry {

/// Whether libtorch computes the operation itself, on the elements of its arguments, and not by
/// calling other operations.
bool computes_elements(const c10::OperatorHandle& operation);

class FakeOperations final : public kernels::Watcher {
 public:
  FakeOperations() : Watcher(kernels::SeesKernels::kNo) {}
  void run(const c10::OperatorHandle& operation, c10::DispatchKeySet below,
           c10::Stack* stack) override;
};

/// While alive, floating tensors and blocks of bytes that this thread makes are fake, and so are
/// results that it computes from them. For a GPU only the memory of fake_device() is counted.
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
