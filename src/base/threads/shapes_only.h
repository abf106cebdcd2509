// Whether the loops over elements of this thread run: a dry run has sizes and no values.
//
// Kernels are called as ever and make their results and whatever they need beside them; for_ranges
// returns at once. What walks over memory by itself asks here. Next: parallel.h,
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
