// StateDict: parameters, buffers and optimizer state by name, sharded or whole, to save and load.
//
// For programs with a custom file format; checkpoints (checkpoint.h) load any layout into any other
// by themselves. An entry knows which elements of the whole tensor it holds, so one rule covers
// every dict: a rank loads the elements that it owns from any entry that holds them. Values are
// rounded only where a contract casts them once (frozen parameters that are whole on every rank).
// Buffers of frozen parts, which compute in a narrower dtype, are written with the values that were
// loaded (BufferView::stored). Next: shard.h, optim.h. Source: FSDP2's state dict hooks; get_ and
// set_optimizer_state_dict of torch.distributed.checkpoint.
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
  std::string name;                 ///< canonical name
  at::Tensor values;                ///< the elements
  std::vector<std::int64_t> shape;  ///< global shape
  std::int64_t begin = 0;           ///< first element
  std::int64_t end = 0;             ///< end of the elements
  /// The layout of a tensor that model axes shard: [begin, end) then counts elements of the part of
  /// the rank at `coordinates` of layout.axes. Such an entry fits that part alone.
  ParameterLayout layout = {};
  std::vector<int> coordinates = {};  ///< coordinates on layout.axes
};

/// Entries of a model, or of a file.
using StateDict = std::vector<StateTensor>;

/// Makes an entry that holds a whole tensor, as a plain module's state dict or a file has it.
StateTensor whole_entry(const std::string& name, const at::Tensor& values);

/// The tensors of a state dict.
enum class StateDictKind : std::uint8_t {
  kSharded,  ///< each rank's shards, 1-D, and buffers: the live storage, not copies, except buffers
             ///< that a cast has narrowed
  kFull,     ///< copies of whole tensors on every rank
  kFullOnRankZero,  ///< the same on rank 0 of the world; the others get an empty dict
};

/// Returns parameters in the model's order under their canonical names, then buffers, which every
/// rank holds whole. A tied parameter has an entry under every name. Whole tensors are gathered one
/// bucket at a time. Collective, except for kSharded.
StateDict state_dict(const ShardedBase& model, StateDictKind kind);

/// How names are compared with those of the model.
enum class Strict : std::uint8_t {
  kYes,  ///< every name of the model, and no other
  kNo,   ///< missing tensors stay as they are, unknown ones are ignored; both are returned
};

/// Names that a lenient load left out.
struct StateDictDifference {
  std::vector<std::string> missing;     ///< names of the model without an entry
  std::vector<std::string> unexpected;  ///< names of entries that the model does not have
};

/// Writes the elements that this rank owns into shards and buffers; parameters without storage get
/// it. An entry may hold more elements, and ranks may pass different parts under the same names.
/// One entry is enough for a tied parameter. Nothing is written unless every rank can load
/// everything. Collective. Errors, on all ranks and with every name: kContract for missing or
/// unexpected names, other shapes, dtypes whose values the storage dtype cannot hold, entries that
/// lack elements of this rank, and two entries of one name; kUsage while a forward waits for its
/// backward.
StateDictDifference load_state_dict(ShardedBase& model, const StateDict& entries,
                                    Strict strict = Strict::kYes);

/// The optimizer state of one whole parameter.
struct ParameterState {
  std::string parameter;   ///< canonical name
  std::int64_t steps = 0;  ///< updates so far; "step" in PyTorch's state
  /// State tensors in the parameter's global shape, by PyTorch's names: "exp_avg", "exp_avg_sq"
  /// (AdamW), "momentum_buffer" (SGD), and "master_remainder" (int16, of a bfloat16 parameter) or
  /// "master" (float32, of a float16 one). Empty before the first update.
  std::map<std::string, at::Tensor> kept;
};

/// The state of an optimizer, without hyperparameters such as learning rate and betas: the program
/// makes the optimizer with them.
struct OptimizerStateDict {
  std::string optimizer;                   ///< "AdamW", "SGD", "Muon"
  std::vector<ParameterState> parameters;  ///< in the model's order
};

/// Returns the state of every parameter that the optimizer steps now, in the model's order, with a
/// tied parameter once. kFull gives copies on every rank; kFullOnRankZero gives them on rank 0 of
/// the world, and no parameters elsewhere. Memory: the result and one bucket of one state tensor.
/// Collective. Errors: kUsage for kSharded (use Optimizer::state()), for an optimizer of another
/// model, and for one that a set_trainable() did not name; kContract where ranks have made
/// different updates.
OptimizerStateDict optimizer_state_dict(const ShardedBase& model, const Optimizer& optimizer,
                                        StateDictKind kind = StateDictKind::kFull);

/// Continues from `dict`, which any number of ranks in any layout may have made, with exactly its
/// bits. Every rank passes the same dict and copies the elements that it owns, so tensors may map a
/// file. A parameter without an entry's state starts without state. Load the model first: where
/// parameters are written afterwards, the bits of a master are dropped. Nothing changes unless
/// every rank can load everything. Collective. Errors, on all ranks and with every name: kContract
/// for another kind of optimizer, missing or unexpected parameters (with Strict::kNo they are
/// ignored and returned), two entries of one parameter, missing or unexpected tensors, other shapes
/// or dtypes, impossible numbers of updates, and dicts that differ between ranks; kUsage as
/// optimizer_state_dict(), and while a forward waits for its backward.
StateDictDifference load_optimizer_state_dict(const ShardedBase& model, Optimizer& optimizer,
                                              const OptimizerStateDict& dict,
                                              Strict strict = Strict::kYes);

}  // namespace tessera
