// Whether the loops over elements of this thread run: a dry run has sizes and no values.
//
// Kernels are called as usual and allocate their results and everything else that they need;
// for_ranges returns at once. Other code that walks over memory calls this. Next: parallel.h,
// ../../dry/fake_operations.h.
#pragma once

namespace tessera::base {

/// While alive, loops over elements in this pass do nothing.
class ShapesOnly {
 public:
  ShapesOnly();
  ~ShapesOnly();
  ShapesOnly(const ShapesOnly&) = delete;
  ShapesOnly& operator=(const ShapesOnly&) = delete;
};

bool shapes_only();

}  // namespace tessera::base
