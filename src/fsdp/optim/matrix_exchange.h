// MatrixExchange brings matrices whose elements lie in many ranks' shards together, each whole on
// one rank, and their results back.
//
// It is a value that every rank computes alike from shapes and from the elements that each rank
// holds; muon.cpp runs it. One all-to-all sends all matrices of a step to their owners, and one
// sends the results back. Each matrix goes to the rank with the least work so far, the largest
// first: this is deterministic, and no rank's work exceeds the mean by more than one matrix. Of
// copies of a piece (on replicas, or on ranks of tp that hold the same) one is sent, and all
// holders receive the result. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/optim/optimizer_registry.h"
#include "layout/fused_matrices.h"
#include "layout/local_part.h"
#include "layout/range.h"
#include "layout/tensor_box.h"
#include "tessera/contract.h"
#include "tessera/dtype.h"
#include "tessera/placement.h"

namespace tessera::fsdp {

/// A parameter that is `matrices.count` matrices of two dims, one after the other.
struct MatrixParameter {
  std::string name;
  ParameterLayout layout;
  std::vector<std::int64_t> shape;  ///< global
  layout::FileShape matrices;
  layout::FusedMatrices fused = {};  ///< the parts of each matrix
  DType state = DType::kFloat32;     ///< dtype of its momentum
};
MatrixParameter matrix_parameter(const GradContract& contract, const MatrixForm& form);

/// The elements of one parameter that one rank holds.
struct HeldElements {
  std::vector<int> coordinates;  ///< on layout.axes; empty: the whole parameter is local
  layout::Range elements;        ///< in the flattened local tensor
};

struct MatrixExchange {
  struct Matrix {
    std::size_t parameter = 0;
    int owner = 0;  ///< the rank that has it whole
    bool operator==(const Matrix&) const = default;
  };
  struct Piece {
    std::size_t matrix = 0;
    int holder = 0;
    layout::Range local;   ///< elements of the holder's shard
    TensorBox box;         ///< in the matrix
    layout::Range in_box;  ///< elements in the flattened box
    bool sent = false;     ///< sent to the owner; false: a copy on another holder is
    bool operator==(const Piece&) const = default;
  };
  int ranks = 1;
  DType dtype = DType::kFloat32;  ///< of all that is sent: float64 where a parameter's state is
  std::vector<Matrix> matrices;   ///< by parameter, in its order
  std::vector<Piece> pieces;      ///< by matrix, then holder, in the order of its shard
  bool operator==(const MatrixExchange&) const = default;
};

/// `held`: by rank and parameter. Errors: kInternal where pieces do not make whole matrices.
MatrixExchange plan_exchange(const std::vector<MatrixParameter>& parameters,
                             const std::vector<std::vector<HeldElements>>& held);

/// Returns the multiplications of one Newton-Schulz step: m m (2 n + m) for a matrix with the
/// smaller side m and the larger side n.
double orthogonalization_cost(std::int64_t rows, std::int64_t columns);

/// One of the two all-to-alls on one rank: the pieces in the order of its buffers.
struct AllToAllPlan {
  struct Chunk {
    std::size_t piece = 0;
    std::int64_t at = 0;  ///< index of its first element in the buffer
  };
  std::vector<Chunk> out, in;
  std::vector<std::int64_t> sends, receives;  ///< number of elements, by rank
};
AllToAllPlan to_owners(const MatrixExchange& exchange, int rank);
AllToAllPlan to_holders(const MatrixExchange& exchange, int rank);
/// Returns the bytes that each rank sends to other ranks in both all-to-alls.
std::vector<std::int64_t> sent_bytes(const MatrixExchange& exchange);

}  // namespace tessera::fsdp
