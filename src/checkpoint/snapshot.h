// One rank's part of a checkpoint, copied to memory of its own: the only thing that a step waits
// for; and what the stages of a pipeline have of one model between them.
//
// The copy is the file itself, header and data, so that writing it is one pass while training goes
// on. Its memory is kept for the next checkpoint: one block on the CPU; of a device pinned ones of
// bounded size, since libtorch rounds each up to a power of two. A checkpoint knows no
// pipeline, a rank has the parameters of its own stages only: ranks that differ in their stage alone
// tell each other their names. A parameter that two stages have (a tied embedding) is written by the
// first. Next: saver.h, loader.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/file_forms.h"
#include "comm/stream.h"
#include "io/checkpoint_manifest.h"
#include "layout/range.h"
#include "tessera/optim.h"
#include "tessera/shard.h"

namespace tessera::checkpointing {

/// Elements of a box of a tensor of the checkpoint, as they stand on this rank.
struct StatePart {
  std::string name;  ///< "model/<name>", "optim/<state>/<name>"
  std::vector<std::int64_t> shape;
  std::optional<DType> source_dtype;
  TensorBox box;
  layout::Range elements;  ///< of the box
  at::Tensor values;       ///< [elements.size()]
};

/// A rank among others that share work.
struct Place {
  int rank = 0;
  int ranks = 1;
  auto operator<=>(const Place&) const = default;
};
/// Of this one. Errors: kInternal where it is none of `ranks`.
Place place_among(const std::vector<int>& ranks, const Mesh& mesh);

/// The dtype of a tensor in the folder that training began with, where there is one.
using SourceDType = std::function<std::optional<DType>(const std::string& tensor)>;

/// Which parameters of a model a checkpoint holds, by canonical name; none = all, and the buffers.
/// Others have a folder of their own: what a run of adapters leaves frozen.
using Holds = std::function<bool(const std::string& parameter)>;

/// In the order of the shard's elements: Piece::local counts them in the flattened part of this
/// rank, as ShardView::begin does.
std::vector<layout::Piece> pieces_of(const ShardView& view, const layout::FileShape& file);

/// Of the ranks that hold the same elements (replicas of the data aside) exactly one does.
bool is_first_holder(const ShardView& view);

struct StateOptions {
  SourceDType source_dtype;
  FileForms forms = {};  ///< the names that the checkpoint has
  Holds holds = {};
  /// Of a pipeline: what a stage before this rank's has, too, and writes.
  std::set<std::string, std::less<>> of_earlier_stages = {};
  int replica = 0;  ///< of the data
  int replicas = 1;
};

/// What this rank writes: of its shards and their optimizer state, which replicas divide, and of
/// what is whole on every rank, which all ranks divide. All ranks together: each element once. The
/// number of updates goes with the first element of a tensor. What several stages of a pipeline have
/// the first of them writes.
std::vector<StatePart> state_parts(const ShardedBase& model, const Optimizer& optimizer,
                                   const StateOptions& options);

/// The `replica`-th of `replicas` equal cuts (in bytes) of a list of parts: together each element
/// once.
std::vector<StatePart> cut(const std::vector<StatePart>& parts, int replica, int replicas);

/// What the manifest says of the parts as the file `name`.
CheckpointManifest entries_of(const std::vector<StatePart>& parts, const std::string& name);

/// On a device the copy is launched on a stream of its own: the steps go on beside it.
class Snapshot {
 public:
  /// `pinned_block`: bytes, a multiple of 8.
  explicit Snapshot(std::int64_t pinned_block = std::int64_t{256} << 20)
      : pinned_block_(pinned_block) {}
  ~Snapshot();
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  /// Copies the parts as the file `name`.
  void take(const std::vector<StatePart>& parts, const std::string& name);
  /// Behind the copy: whoever writes what the parts hold has to come behind it. Marks nothing on the
  /// CPU, where it is done.
  const comm::Event& end() const { return end_; }
  /// The caller's stream comes behind the copy, and what it read may go.
  void release();

  /// Once end() has passed:
  const std::string& name() const { return name_; }
  std::vector<std::span<const std::byte>> bytes() const;  ///< the whole file, one behind the other
  std::int64_t size() const { return size_; }             ///< of the file
  /// The manifest's entries for the pieces in it.
  const CheckpointManifest& entries() const { return entries_; }

 private:
  void grow_to(std::int64_t size, at::Device from);
  /// Of the file's bytes from `begin` on those that lie in one block, at most `most`.
  at::Tensor chunk(std::int64_t begin, std::int64_t most) const;

  std::string name_;
  comm::Stream stream_;  // of the copies; empty on the CPU
  comm::Event end_;
  std::vector<at::Tensor> reads_;  // on the device, until release()
  const std::int64_t pinned_block_;
  std::vector<at::Tensor> blocks_;  // bytes
  std::int64_t size_ = 0;
  CheckpointManifest entries_;
};

/// All names of a tensor of a model, the canonical one first.
struct TensorNames {
  bool is_buffer = false;
  std::vector<std::string> names;
};

/// Names of parameters and of buffers that are stored; of what `Holds` leaves out there are none.
struct NamesOfStages {
  std::vector<TensorNames> everywhere;  ///< of all stages, this rank's own included
  /// The canonical ones of the stages before this rank's.
  std::set<std::string, std::less<>> of_earlier;
};

/// What an optimizer may keep of parameters of any stage (Optimizer::kept_names): a stage without
/// 16-bit ones keeps no masters. Collective as names_of_stages.
std::set<std::string> kept_in_stages(const ShardedBase& model, const Optimizer& optimizer);

/// Collective among the ranks of axis pp; nobody is asked where it has one.
NamesOfStages names_of_stages(const ShardedBase& model, const Holds& holds);

}  // namespace tessera::checkpointing
