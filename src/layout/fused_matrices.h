// FusedMatrices: which rows or columns of a fused weight belong to which of its matrices. A fused
// weight holds several matrices in one tensor, with equal shares of one dim, so that one product
// computes them all.
//
// Pure. Layers declare it (nn/declaration.h), for optimizers that treat a matrix as a whole.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::layout {

struct FusedMatrices {
  enum class Order : std::uint8_t {
    kSideBySide,  ///< the first part of the dim is the first matrix
    kInTurn,      ///< every `count`-th index of it is
  };
  int count = 1;  ///< 1: it is one matrix
  int dim = 0;    ///< 0: rows, 1: columns
  Order order = Order::kSideBySide;
  bool operator==(const FusedMatrices&) const = default;

  /// The shape of each matrix, where `shape` is that of the fused weight.
  std::vector<std::int64_t> shape_of_each(std::vector<std::int64_t> shape) const {
    shape.at(static_cast<std::size_t>(dim)) /= count;
    return shape;
  }
};

}  // namespace tessera::layout
