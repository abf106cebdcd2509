// Group: collectives on a user's own tensors, among the ranks of a World or along axes of a mesh.
//
//   const auto data = mesh.group({"dp_replicate", "dp_shard"});
//   const double loss_of_all = data.mean(loss.item<double>());
//
// For metrics, decisions and values that ranks share; gradients of sharded modules are summed by
// their handles. Calls go through the queue that Tessera's own collectives take, in the order in
// which the program makes them, on connections of their own: anywhere between, inside and around
// forwards and backwards of handles, on all ranks of the group at the same place. Names are those
// of torch.distributed. Not asynchronous: each call returns when its result is here.
// Next: mesh.h, which makes groups along axes; world.h, which makes that of all ranks.
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

/// How all_reduce combines an element of all ranks.
enum class ReduceOp : std::uint8_t {
  kSum,
  kMax,  ///< of bool: any; NaN where any rank has NaN
  kMin,  ///< of bool: all; NaN where any rank has NaN
};

/// A value, cheap to copy; it keeps its World. In a group of one rank calls check their tensor and
/// send nothing.
///
/// Every call below is collective among the ranks of the group: all make it, in the same order,
/// with the same operation, shape and dtype. `what` names the value in errors and traces ("loss"),
/// and is the same on all ranks, too.
///
/// Tensors: dense, contiguous, on World::device(), of a floating dtype of 16 bits and more, an
/// integer one from int8 to int64, uint8 or bool. No gradient passes through a collective, so in
/// grad mode a tensor that requires grad is refused: give x.detach(), or call under
/// at::NoGradGuard. What is written in place has a new version, so autograd notices a tensor
/// that some backward still needs. Sums are formed in rank order, of 16-bit floats in fp32 and
/// rounded once; integers wrap around. Every rank has the same bits.
///
/// Errors: kUsage, on the rank that calls and before anything is sent, for a tensor that is not as
/// above, with what was found; a rank that goes on after that is missed by the others. kComm, on
/// every rank, where ranks differ in what they call or in its order (at once where ranks are
/// threads in process, over Gloo after WorldOptions::blocked_after or at once with
/// compare_entries), and where one does not call within WorldOptions::timeout (init_timeout for the
/// first call on a group that is new, or after a recovery): both entries, or the ranks that are
/// missing. The World is aborted then (World::recover()), and what tensors given in place hold is
/// undefined. All of these can be caught; none ends the process, unless a rank does not get to
/// throw one (World, "Which errors end a process").
///
/// Threads: the rank's own, or one of autograd in a backward of it; one call at a time.
class Group {
 public:
  /// Index of this rank in ranks().
  int rank() const;
  int size() const { return static_cast<int>(ranks_.size()); }
  /// In numbers of the World, ascending: the order of sums and of all_gather.
  const std::vector<int>& ranks() const { return ranks_; }

  /// In place, as torch.distributed.all_reduce. kSum takes no bool. Bytes a rank sends, with N
  /// ranks and X bytes: (N - 1) X; sums of floats and int64 above 256 KiB in all and N > 2:
  /// 2 (N - 1) / N X, of 16-bit floats 3 (N - 1) / N X.
  void all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum,
                  const std::string& what = {}) const;

  /// The mean over ranks: of a floating dtype, shaped as `tensor`, which stays as it is. Bytes as a
  /// sum, of 16-bit floats as of float32.
  at::Tensor mean(const at::Tensor& tensor, const std::string& what = {}) const;
  /// The same of one number a rank, in fp64: mean(loss.item<double>()).
  double mean(double value, const std::string& what = {}) const;

  /// Every rank's tensor, in the order of ranks(), shaped as `tensor`; they share one memory, and
  /// at::stack or at::cat make one tensor of them. Shapes are equal on all ranks. Bytes: (N - 1) X.
  std::vector<at::Tensor> all_gather(const at::Tensor& tensor, const std::string& what = {}) const;

  /// In place: the tensor of ranks()[group_src] on every rank. Bytes: (N - 1) X of that rank,
  /// and a barrier's of all. Errors: kUsage for a group_src that is not an index into ranks().
  void broadcast(const at::Tensor& tensor, int group_src = 0, const std::string& what = {}) const;

  /// Nobody goes on before all have come. Over NCCL the host waits, too.
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
