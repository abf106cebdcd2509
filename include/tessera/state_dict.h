// State dicts: a model's parameters and buffers, and an optimizer's state, by name, sharded or
// whole, and their way back.
//
// For users with a file format of their own; checkpoints (checkpoint.h) load any layout into any
// other by themselves. An entry knows which elements of the whole tensor it
// holds, so that one rule covers every dict: this rank loads what it owns from an entry that holds
// it. Values are never rounded on the way, but where a contract says that they are cast once
// (frozen parameters that are whole on every rank). Buffers of frozen parts, which compute in a
// narrower dtype, are written with the digits that they were loaded with (BufferView::stored).
// Next: shard.h, optim.h. Source: FSDP2's state dict hooks; get_ and set_optimizer_state_dict of
// torch.distributed.checkpoint.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/optim.h"
#include "tessera/shard.h"

namespace tessera {

/// Elements [begin, end) of the flattened tensor `name`, whose whole shape is `shape`.
struct StateTensor {
  std::string name;
  at::Tensor values;
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  /// Where model axes cut the tensor: [begin, end) counts elements of the part that the rank at
  /// `coordinates` of layout.axes holds. Such an entry fits that part alone.
  ParameterLayout layout = {};
  std::vector<int> coordinates = {};
};

using StateDict = std::vector<StateTensor>;

/// An entry that holds a whole tensor: what a plain module's state dict or a file gives.
StateTensor whole_entry(const std::string& name, const at::Tensor& values);

enum class StateDictKind : std::uint8_t {
  kSharded,  ///< each rank's shards, 1-D; they are the live storage, not copies; so are buffers,
             ///< but for those that a cast has narrowed
  kFull,     ///< copies of whole tensors on every rank
  kFullOnRankZero,  ///< the same on rank 0 of the world; the others get an empty dict
};

/// Parameters in the model's order under their canonical names, then buffers, which every rank
/// holds whole. A tied parameter has an entry under every name. Collective, but for kSharded. Whole
/// tensors are gathered one bucket at a time.
StateDict state_dict(const ShardedBase& model, StateDictKind kind);

enum class Strict : std::uint8_t {
  kYes,  ///< every name of the model, and no other
  kNo,   ///< what is missing stays as it is, what is unknown is left out; both are returned
};

/// Names that a lenient load left out.
struct StateDictDifference {
  std::vector<std::string> missing;     ///< of the model, in no entry
  std::vector<std::string> unexpected;  ///< of entries, not in the model
};

/// Writes the elements that this rank owns into shards and buffers; parameters that were made
/// without storage have values afterwards. An entry may hold more than that, and ranks may bring
/// different parts, but the same names. One entry is enough for a tied parameter. Nothing is
/// written unless every rank can load everything. Collective. Errors, on all ranks and with every
/// name that is concerned: kContract for missing or unexpected names, other shapes, dtypes whose
/// values the storage dtype cannot hold, entries that lack elements of this rank, two entries of
/// one name; kUsage while a forward waits for its backward.
StateDictDifference load_state_dict(ShardedBase& model, const StateDict& entries,
                                    Strict strict = Strict::kYes);

/// What an optimizer keeps of one parameter, whole.
struct ParameterState {
  std::string parameter;   ///< its canonical name
  std::int64_t steps = 0;  ///< updates so far; "step" in PyTorch's state
  /// In the parameter's global shape, by PyTorch's names: "exp_avg", "exp_avg_sq" (AdamW),
  /// "momentum_buffer" (SGD); "master_remainder" (int16, beside a bfloat16 parameter) or "master"
  /// (float32, beside a float16 one). Empty before the first update.
  std::map<std::string, at::Tensor> kept;
};

/// Without learning rate, betas and the like: an optimizer is made with them, and set_lr() follows
/// from the step.
struct OptimizerStateDict {
  std::string optimizer;  ///< "AdamW", "SGD"
  std::vector<ParameterState> parameters;
};

/// The state of every parameter that the optimizer steps now, in the model's order; a tied one
/// stands there once. kFull: copies on every rank; kFullOnRankZero: the same on rank 0 of the
/// world, the others get no parameters. Nobody holds more than that and one bucket of one kind
/// (such as exp_avg) besides. Collective. Errors: kUsage for kSharded, which is
/// Optimizer::state(), for an optimizer of another model, and for one that a set_trainable() did
/// not name; kContract where ranks have made different updates.
OptimizerStateDict optimizer_state_dict(const ShardedBase& model, const Optimizer& optimizer,
                                        StateDictKind kind = StateDictKind::kFull);

/// Goes on from `dict`, of any number of ranks and any layout, with exactly its bits. Every rank
/// brings the same dict and copies the elements that it owns: memory that maps a file is enough.
/// A parameter without state begins anew. Load the model first: parameters that are written later
/// go on from what was written, without the bits of a master. Nothing changes unless every rank can
/// load everything. Collective. Errors, on all ranks and with every name that is concerned:
/// kContract for another kind of optimizer, missing or unexpected parameters (with Strict::kNo
/// those stay as they are and are left out, and both are returned), two entries of one parameter,
/// missing or unexpected tensors, other shapes or dtypes, numbers of updates that are none, ranks
/// that bring different ones; kUsage as optimizer_state_dict(), and while a forward waits for its
/// backward.
StateDictDifference load_optimizer_state_dict(const ShardedBase& model, Optimizer& optimizer,
                                              const OptimizerStateDict& dict,
                                              Strict strict = Strict::kYes);

}  // namespace tessera
