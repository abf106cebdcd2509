// The collectives behind the transitions, without derivatives: blocking, or for rows issued and waited
// for apart. For autograd functions of parallel/, moe/ and nn/, whose backwards belong to them.
//
// None is called on an axis of one rank. `where` names the caller in errors and traces. Labels have,
// beside it, the pass, and the stage and the micro-batch where a step scope is open: every rank of
// the axis numbers these alike, and exchanges of two micro-batches never meet, whatever their sizes.
// Next: transitions.h.
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

/// What a sum becomes; none = the addends' dtype.
using SumDtype = std::optional<at::ScalarType>;

/// Bytes a rank sends: comm::AllReduce.
at::Tensor exchange_sum(const at::Tensor& x, const Axis& axis, SumDtype result,
                        const std::string& where, Direction direction = Direction::kForward);

/// The parts of all ranks, one after the other along the sharded dim. In place where nothing but
/// that dim's size lies before it. Bytes a rank sends: (size - 1) x the largest part.
at::Tensor exchange_gather(const at::Tensor& part, const Axis& axis, const Shard& shard,
                           const std::string& where, Direction direction = Direction::kForward);

/// Of the sum over ranks this rank's part. Bytes a rank sends: (size - 1) x the largest part, in
/// the reduce dtype.
at::Tensor exchange_reduce_scatter(const at::Tensor& x, const Axis& axis, const Shard& shard,
                                   SumDtype result, const std::string& where,
                                   Direction direction = Direction::kForward);

/// How many rows of dim 0 go to each rank and come from each.
struct Splits {
  std::vector<std::int64_t> sends;
  std::vector<std::int64_t> receives;
  Splits swapped() const { return {receives, sends}; }
};
/// Rows that were issued. Let go of unfinished, as comm::Work.
class RowsUnderWay {
 public:
  RowsUnderWay(const at::Tensor& rows, const Axis& axis, const Splits& splits,
               const std::string& where, Direction direction);
  ~RowsUnderWay();
  RowsUnderWay(const RowsUnderWay&) = delete;
  RowsUnderWay& operator=(const RowsUnderWay&) = delete;

  /// The rows that arrive: without values until finish().
  const at::Tensor& arriving() const { return arriving_; }
  /// Waits, on `stream` (empty: the caller's). Once.
  void finish(const comm::Stream& stream = {});

 private:
  struct Issued;
  at::Tensor arriving_;
  std::unique_ptr<Issued> issued_;
};
/// Both at once. Bytes a rank sends: its rows but those for itself.
at::Tensor exchange_rows(const at::Tensor& rows, const Axis& axis, const Splits& splits,
                         const std::string& where, Direction direction = Direction::kForward);
/// The rows that arrive on the host, behind `with`, which the caller's stream has made: one wait of
/// the host for all, as comm::read_on_host(). It waits for this exchange and for nothing that another
/// pass has launched during its turn: else each layer would drain the device.
std::vector<at::Tensor> exchange_rows_to_host(std::vector<at::Tensor> with, const at::Tensor& rows,
                                              const Axis& axis, const Splits& splits,
                                              const std::string& where);

}  // namespace tessera::parallel
