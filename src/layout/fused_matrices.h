// FusedMatrices: of a matrix that is several in one tensor, each with an equal share of one dim, so
// that one product computes them all: which rows or columns belong to which.
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

  /// Of each of them, where all together have `shape`.
  std::vector<std::int64_t> shape_of_each(std::vector<std::int64_t> shape) const {
    shape.at(static_cast<std::size_t>(dim)) /= count;
    return shape;
  }
};

}  // namespace tessera::layout
