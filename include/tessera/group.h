// Group: collectives on tensors of the program, among the ranks of a World or along axes of a mesh.
//
//   const auto data = mesh.group({"dp_replicate", "dp_shard"});
//   const double loss_of_all = data.mean(loss.item<double>());
//
// It serves metrics, decisions and values that ranks share; handles sum the gradients of sharded
// modules themselves. Calls go through the queue of Tessera's own collectives, in program order, on
// separate connections. A program may call them before, inside and after forwards and backwards of
// handles, at the same place on all ranks of the group. Names are those of torch.distributed. Each
// call returns when its result is there; none is asynchronous.
// Next: mesh.h, which makes groups along axes; world.h, which makes the group of all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

class World;
namespace comm {
class Group;
struct Label;
}  // namespace comm

/// How all_reduce() combines the elements of all ranks.
enum class ReduceOp : std::uint8_t {
  kSum,  ///< in rank order; not for bool
  kMax,  ///< logical or for bool; NaN where any rank has NaN
  kMin,  ///< logical and for bool; NaN where any rank has NaN
};

/// Ranks that communicate. A value, cheap to copy; it keeps its World alive. In a group of one rank
/// calls check their tensor and send nothing.
///
/// Every call below is collective among the ranks of the group: all make it, in the same order,
/// with the same operation, shape and dtype. `what` names the value in errors and traces ("loss"),
/// and is the same on all ranks too.
///
/// Tensors are dense, contiguous, on World::device(), and of a floating dtype of 16 bits and more,
/// an integer dtype from int8 to int64, uint8 or bool. Collectives have no gradient, so in grad
/// mode a tensor that requires grad is refused: pass x.detach(), or call under at::NoGradGuard. A
/// tensor that is written in place gets a new version, so autograd notices where a backward still
/// needs it. Sums are formed in rank order; those of 16-bit floats are formed in fp32 and rounded
/// once, and integers wrap around. Every rank has the same bits.
///
/// Errors: kUsage, on the rank that calls and before anything is sent, for a tensor that is not as
/// above, naming the fault; the other ranks still wait for the call. kComm, on every rank, where
/// ranks make different calls or another order of calls (at once where ranks are threads in
/// process; over Gloo after WorldOptions::blocked_after, or at once with compare_entries), and
/// where a rank does not call within WorldOptions::timeout (init_timeout for the first call on a
/// new group, or after a recovery); the message has both entries, or the missing ranks. kComm
/// aborts the World (World::recover()), and leaves tensors given in place undefined. All of these
/// can be caught; none ends the process, unless a rank cannot throw in time (World, "Which errors
/// end a process").
///
/// Threads: the rank's thread, or a thread of autograd in its backward; one call at a time.
class Group {
 public:
  /// Returns the index of this rank in ranks().
  int rank() const;
  /// Returns the number of ranks.
  int size() const { return static_cast<int>(ranks_.size()); }
  /// Returns the ranks' numbers in the World, ascending: the order of sums and of all_gather().
  const std::vector<int>& ranks() const { return ranks_; }

  /// Reduces `tensor` over the ranks in place, as torch.distributed.all_reduce. kSum takes no bool.
  /// Bytes that a rank sends, with N ranks and X bytes: (N - 1) X. For N > 2 and more than 256 KiB
  /// in all, a sum of floats or int64 sends 2 (N - 1) / N X, and of 16-bit floats 3 (N - 1) / N X.
  void all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum,
                  const std::string& what = {}) const;

  /// Returns the mean over ranks in a new tensor, shaped as `tensor`, which has a floating dtype.
  /// Bytes that a rank sends: as a sum; for 16-bit floats as a sum of float32.
  at::Tensor mean(const at::Tensor& tensor, const std::string& what = {}) const;
  /// Returns the mean of one number of each rank, in fp64: mean(loss.item<double>()).
  double mean(double value, const std::string& what = {}) const;

  /// Returns every rank's tensor, in the order of ranks(). They are views of one tensor; at::stack
  /// or at::cat make one of them. Shapes are equal on all ranks. Bytes that a rank sends: (N - 1)
  /// X.
  std::vector<at::Tensor> all_gather(const at::Tensor& tensor, const std::string& what = {}) const;

  /// Copies the tensor of ranks()[group_src] into `tensor` on every rank. Bytes: that rank sends
  /// (N - 1) X, and all send a barrier's. Errors: kUsage for a group_src that is not an index into
  /// ranks().
  void broadcast(const at::Tensor& tensor, int group_src = 0, const std::string& what = {}) const;

  /// Waits until all ranks of the group have called it. Over NCCL the host waits too.
  void barrier(const std::string& what = {}) const;

 private:
  friend class World;
  friend class Mesh;
  /// Collective among `ranks` when they first have a group.
  Group(std::shared_ptr<World> world, std::vector<int> ranks);

  struct Call;
  at::Tensor summed(const Call& call, const at::Tensor& tensor) const;
  at::Tensor gathered(const Call& call, const at::Tensor& tensor) const;

  std::shared_ptr<World> world_;
  std::vector<int> ranks_;
  std::shared_ptr<comm::Group> group_;
};

}  // namespace tessera
