// MatrixExchange: how matrices whose elements lie in many ranks' shards come together whole, each on
// one rank, and how their results go back.
//
// A value that every rank works out alike from shapes and from what each rank holds; who runs it is
// muon.cpp. All matrices of a step travel in one all-to-all there and one back. Matrices go to the
// rank with the least work so far, the dearest first: deterministic, and no rank's work exceeds the
// mean by more than one matrix. Of copies of a piece (replicas, ranks of tp that hold the same) one
// is sent, and each takes the result. Pure.
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
  layout::FusedMatrices fused = {};  ///< what each of them is
  DType state = DType::kFloat32;     ///< of its momentum
};
MatrixParameter matrix_parameter(const GradContract& contract, const MatrixForm& form);

/// What one rank holds of one of them.
struct HeldElements {
  std::vector<int> coordinates;  ///< on layout.axes; empty: the whole is local
  layout::Range elements;        ///< of the flattened local tensor
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
    TensorBox box;         ///< of the matrix
    layout::Range in_box;  ///< elements of the flattened box
    bool sent = false;     ///< to the owner; else another holder's copy is
    bool operator==(const Piece&) const = default;
  };
  int ranks = 1;
  DType dtype = DType::kFloat32;  ///< in which all travel: float64 where one parameter's state is
  std::vector<Matrix> matrices;   ///< by parameter, in its order
  std::vector<Piece> pieces;      ///< by matrix, then holder, in the order of its shard
  bool operator==(const MatrixExchange&) const = default;
};

/// held[rank][parameter]. Errors: kInternal where pieces do not make whole matrices.
MatrixExchange plan_exchange(const std::vector<MatrixParameter>& parameters,
                             const std::vector<std::vector<HeldElements>>& held);

/// Multiplications of one Newton-Schulz step: m m (2 n + m) of a matrix whose smaller side is m.
double orthogonalization_cost(std::int64_t rows, std::int64_t columns);

/// One of the two all-to-alls as a rank has it: pieces in the order of its buffers.
struct Crossing {
  struct Chunk {
    std::size_t piece = 0;
    std::int64_t at = 0;  ///< first element in the buffer
  };
  std::vector<Chunk> out, in;
  std::vector<std::int64_t> sends, receives;  ///< elements, by rank
};
Crossing to_owners(const MatrixExchange& exchange, int rank);
Crossing to_holders(const MatrixExchange& exchange, int rank);
/// The bytes that each rank sends to others in both.
std::vector<std::int64_t> sent_bytes(const MatrixExchange& exchange);

}  // namespace tessera::fsdp
