// The collectives of transitions, without derivatives: blocking, or, for rows, with a separate
// wait. They are for autograd functions of parallel/, moe/ and nn/, which have their own backwards.
//
// None is called on an axis of one rank. `where` names the caller in errors and traces. Labels also
// have the pass and, in a step scope, the stage and the micro-batch. Every rank of the axis numbers
// these alike, so that exchanges of two micro-batches never meet, with any sizes. Next:
// transitions.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/stream.h"
#include "parallel/axis.h"

namespace tessera::parallel {

/// The dtype of a sum; none = that of the addends.
using SumDtype = std::optional<at::ScalarType>;

/// Returns the sum over ranks. Bytes a rank sends: see comm::AllReduce.
at::Tensor exchange_sum(const at::Tensor& x, const Axis& axis, SumDtype result,
                        const std::string& where, Direction direction = Direction::kForward);

/// Returns the parts of all ranks, one after the other along the sharded dim. It gathers in place
/// where all dims before that one have size 1. Bytes a rank sends: (size - 1) x the largest part.
at::Tensor exchange_gather(const at::Tensor& part, const Axis& axis, const Shard& shard,
                           const std::string& where, Direction direction = Direction::kForward);

/// Returns this rank's part of the sum over ranks. Bytes a rank sends: (size - 1) x the largest
/// part, in the reduce dtype.
at::Tensor exchange_reduce_scatter(const at::Tensor& x, const Axis& axis, const Shard& shard,
                                   SumDtype result, const std::string& where,
                                   Direction direction = Direction::kForward);

/// The numbers of rows of dim 0 that go to each rank and come from each.
struct Splits {
  std::vector<std::int64_t> sends;
  std::vector<std::int64_t> receives;
  Splits swapped() const { return {receives, sends}; }
};
/// Rows under way. May be destroyed without finish(), as comm::Work.
class RowsUnderWay {
 public:
  RowsUnderWay(const at::Tensor& rows, const Axis& axis, const Splits& splits,
               const std::string& where, Direction direction);
  ~RowsUnderWay();
  RowsUnderWay(const RowsUnderWay&) = delete;
  RowsUnderWay& operator=(const RowsUnderWay&) = delete;

  /// The rows that arrive, without values until finish().
  const at::Tensor& arriving() const { return arriving_; }
  /// Waits, on `stream` (empty: the caller's). Must be called at most once.
  void finish(const comm::Stream& stream = {});

 private:
  struct Issued;
  at::Tensor arriving_;
  std::unique_ptr<Issued> issued_;
};
/// Issues and waits. Bytes a rank sends: its rows except those for itself.
at::Tensor exchange_rows(const at::Tensor& rows, const Axis& axis, const Splits& splits,
                         const std::string& where, Direction direction = Direction::kForward);
/// Returns the rows that arrive and `with`, which the caller's stream has made, on the host, with
/// one wait of the host for all, as comm::read_on_host(). It waits for this exchange but not for
/// kernels that the other pass has launched during its turn: otherwise each layer would drain the
/// device.
std::vector<at::Tensor> exchange_rows_to_host(std::vector<at::Tensor> with, const at::Tensor& rows,
                                              const Axis& axis, const Splits& splits,
                                              const std::string& where);

}  // namespace tessera::parallel
