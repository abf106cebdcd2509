// FusedMatrices: the rows or columns of each matrix in a fused weight. A fused weight holds several
// matrices in one tensor, with equal shares of one dim, so that one product computes them all.
//
// Pure. Layers declare it (nn/declaration.h), for optimizers that treat a matrix as a whole.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::layout {

struct FusedMatrices {
  enum class Order : std::uint8_t {
    kSideBySide,  ///< the first part of the dim is the first matrix
    kInTurn,      ///< every `count`-th index of the dim belongs to the first matrix
  };
  int count = 1;  ///< 1: a single matrix
  int dim = 0;    ///< 0: rows, 1: columns
  Order order = Order::kSideBySide;
  bool operator==(const FusedMatrices&) const = default;

  /// Returns the shape of each matrix, where `shape` is that of the fused weight.
  std::vector<std::int64_t> shape_of_each(std::vector<std::int64_t> shape) const {
    shape.at(static_cast<std::size_t>(dim)) /= count;
    return shape;
  }
};

}  // namespace tessera::layout
