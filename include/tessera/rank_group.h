// Collectives on a program's own tensors: the loss of all ranks, a table that one rank has read.
//
// They travel like Tessera's own: each carries its name, dtype and shape, so ranks that call another
// one, or one with another tensor, get an error that names both calls, and a rank that does not call
// is named after WorldOptions::timeout. Nothing waits for ever, and nothing meets a gather or a
// reduction that is under way: these have channels of their own. Next: mesh.h, world.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

class World;
namespace comm {
class Group;
}

enum class ReduceOp : std::uint8_t { kSum, kMean, kMax, kMin };
/// "sum", "mean", "max", "min".
std::string_view to_string(ReduceOp op);

/// Some ranks of a World, this one among them: World::group(), Mesh::group("dp_shard"). A value;
/// copies are the same group.
///
/// Every call is collective among the members, blocks, and is made from the thread on which the
/// rank also calls its model. `what` names the call in errors. Tensors: on the CPU, dense, of the
/// same dtype and shape on all ranks; strides are free (what is not contiguous is copied). After an
/// error the contents of what was to be written are undefined.
///
/// No call has a backward: under a recorded graph a tensor that requires grad is refused, so that
/// no gradient is lost without a word. What is written in place counts as changed in place for
/// autograd.
///
/// Errors: kUsage for a tensor or a rank that does not fit, before anything is sent; kComm where
/// ranks disagree or do not come.
class RankGroup {
 public:
  /// The ranks (world numbers, ascending) that contain this one: the channel is made on the first
  /// use of these ranks, collectively among them, then kept by the World. Errors: kUsage for ranks
  /// that are not ascending, not in the world, or without this one; kComm.
  RankGroup(const std::shared_ptr<World>& world, std::vector<int> ranks);

  int rank() const;  ///< within the group
  int size() const;
  const std::vector<int>& ranks() const { return ranks_; }  ///< world numbers

  /// In place, the same bits on every rank. Sums are formed in rank order, those of fp16 and bf16 in
  /// fp32 and rounded once; a mean is the sum divided by size(), of floating-point dtypes only; max
  /// and min hand a NaN on. bool has no sum. Bytes a rank sends: a sum up to 256 KiB in all, and a
  /// max or min of any size, (size - 1) x data; a larger sum 2 (size - 1) / size x data.
  void all_reduce(const at::Tensor& data, ReduceOp op = ReduceOp::kSum,
                  std::string_view what = {}) const;
  /// The mean over ranks, as a tensor of its own; of one number, in fp64.
  at::Tensor mean(const at::Tensor& data, std::string_view what = {}) const;
  double mean(double value, std::string_view what = {}) const;
  /// [size(), sizes of data...]: rank r's tensor at index r. Bytes a rank sends: (size - 1) x data.
  at::Tensor all_gather(const at::Tensor& data, std::string_view what = {}) const;
  /// In place: the tensor of rank `from` (within the group) on every rank. Bytes a rank sends: up to
  /// ceil(log2 size) x data.
  void broadcast(const at::Tensor& data, int from = 0, std::string_view what = {}) const;
  /// Nobody goes on before all are here.
  void barrier(std::string_view what = {}) const;

 private:
  std::shared_ptr<World> world_;
  std::vector<int> ranks_;
  std::shared_ptr<comm::Group> group_;
};

}  // namespace tessera
