// Snapshot: one rank's part of a checkpoint, copied to separate memory: the only thing for which a
// step waits. And the names by which the stages of a pipeline share one model.
//
// The copy is the file itself, header and data, so that writing it is one pass while training
// continues. Its memory is kept for the next checkpoint: one block on the CPU; for a device pinned
// blocks of bounded size, since libtorch rounds each up to a power of two. A checkpoint knows no
// pipeline, but a rank has only the parameters of its own stages: ranks that differ only in their
// stage tell each other their names. A parameter that two stages have (a tied embedding) is written
// by the first. Next: saver.h, loader.h.
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

/// Elements of a box of a tensor of the checkpoint, as this rank holds them.
struct StatePart {
  std::string name;  ///< "model/<name>", "optim/<state>/<name>"
  std::vector<std::int64_t> shape;
  std::optional<DType> source_dtype;
  TensorBox box;
  layout::Range elements;  ///< a range of the box
  at::Tensor values;       ///< [elements.size()]
};

/// A rank among others that share work.
struct Place {
  int rank = 0;
  int ranks = 1;
  auto operator<=>(const Place&) const = default;
};
/// Returns this rank's place. Errors: kInternal where it is none of `ranks`.
Place place_among(const std::vector<int>& ranks, const Mesh& mesh);

/// Returns the dtype of a tensor in the folder with which training began, where there is one.
using SourceDType = std::function<std::optional<DType>(const std::string& tensor)>;

/// Which parameters of a model a checkpoint holds, by canonical name; empty: all, and the buffers.
/// The others have a separate folder, as what a run of adapters leaves frozen.
using Holds = std::function<bool(const std::string& parameter)>;

/// Returns pieces in the order of the shard's elements: Piece::local counts them in the flattened
/// part of this rank, as ShardView::begin does.
std::vector<layout::Piece> pieces_of(const ShardView& view, const layout::FileShape& file);

/// Exactly one of the ranks that hold the same elements is the first holder (replicas of the data
/// axes do not count).
bool is_first_holder(const ShardView& view);

struct StateOptions {
  SourceDType source_dtype;
  FileForms forms = {};  ///< the names that the checkpoint has
  Holds holds = {};
  /// The names that a stage before this rank's also has, in a pipeline, and writes.
  std::set<std::string, std::less<>> of_earlier_stages = {};
  int replica = 0;  ///< of the data
  int replicas = 1;
};

/// Returns what this rank writes: its part of its shards and their optimizer state, which replicas
/// divide, and of what is whole on every rank, which all ranks divide. All ranks together write
/// each element once. The number of updates is written with the first element of a tensor. Where
/// several stages of a pipeline have a tensor, the first of them writes it.
std::vector<StatePart> state_parts(const ShardedBase& model, const Optimizer& optimizer,
                                   const StateOptions& options);

/// Returns the `replica`-th of `replicas` equal cuts (in bytes) of a list of parts: together they
/// hold each element once.
std::vector<StatePart> cut(const std::vector<StatePart>& parts, int replica, int replicas);

/// Returns the manifest's entries for the parts as the file `name`.
CheckpointManifest entries_of(const std::vector<StatePart>& parts, const std::string& name);

/// Copies a rank's parts. On a device the copy is launched on a separate stream, while the steps
/// continue.
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
  /// Marks the end of the copy: later writers of what the parts hold must be ordered after it.
  /// Empty on the CPU, where the copy is done.
  const comm::Event& end() const { return end_; }
  /// Orders the caller's stream after the copy, and releases what it read.
  void release();

  /// To be called once end() has passed:
  const std::string& name() const { return name_; }
  std::vector<std::span<const std::byte>> bytes() const;  ///< the whole file, in order
  std::int64_t size() const { return size_; }             ///< the file's size
  /// The manifest's entries for the pieces in it.
  const CheckpointManifest& entries() const { return entries_; }

 private:
  void grow_to(std::int64_t size, at::Device from);
  /// Returns the file's bytes from `begin` to the end of their block, at most `most`.
  at::Tensor chunk(std::int64_t begin, std::int64_t most) const;

  std::string name_;
  comm::Stream stream_;  // runs the copies; empty on the CPU
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

/// Names of stored parameters and buffers; `Holds` may leave out some.
struct NamesOfStages {
  std::vector<TensorNames> everywhere;  ///< of all stages, with this rank's
  /// The canonical names of the stages before this rank's.
  std::set<std::string, std::less<>> of_earlier;
};

/// Returns what an optimizer may keep of parameters of any stage (Optimizer::kept_names): a stage
/// without 16-bit ones keeps no masters. Collective as names_of_stages.
std::set<std::string> kept_in_stages(const ShardedBase& model, const Optimizer& optimizer);

/// Collective among the ranks of axis pp; communicates nothing where it has one.
NamesOfStages names_of_stages(const ShardedBase& model, const Holds& holds);

}  // namespace tessera::checkpointing
