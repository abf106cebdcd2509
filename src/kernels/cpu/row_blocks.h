// Sums over rows (a norm weight's gradient) in blocks of a fixed number of rows.
//
// Each block has its own fp32 sum and the blocks are added in order, so that the result is the same
// on any number of threads.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace tessera::kernels::cpu {

class RowBlocks {
 public:
  RowBlocks(std::int64_t rows, std::int64_t columns);

  /// part(begin, end, sums) once a block, on several threads; `sums` [columns] begins as zeros.
  void run(c10::function_ref<void(std::int64_t, std::int64_t, float*)> part);

  /// fp32 [columns].
  at::Tensor total() const;

 private:
  std::int64_t rows_;
  at::Tensor sums_;  ///< [blocks, columns]
};

}  // namespace tessera::kernels::cpu
