// GradContract: the dtypes and placements of one parameter and its gradient, fixed before the first
// step.
//
// resolve_contracts() is a pure function of (parameter metadata, policy, layout); it runs when a
// model is sharded, never in a step. Its result is a value: printed, compared, hashed, and agreed
// on by all ranks before any collective. It throws every error, with the name of the parameter.
// Next: model_contract.h for buffers and units, shard.h.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/data_axes.h"
#include "tessera/dtype.h"
#include "tessera/placement.h"
#include "tessera/precision.h"

namespace tessera {

/// The part that a parameter has in low-rank adaptation (LoRA).
enum class LoraPart : std::uint8_t {
  kNone,     ///< no part
  kBase,     ///< frozen, stored in its compute dtype
  kAdapter,  ///< trained in float32 under every policy and rule
};

/// The facts about a parameter before it is sharded.
struct ParameterMeta {
  std::string name;                 ///< canonical (Hugging Face) name
  std::vector<std::int64_t> shape;  ///< global shape
  DType dtype = DType::kFloat32;    ///< dtype of the tensor as it is
  std::optional<DType> checkpoint;  ///< stored dtype in the file that it comes from, if any
  /// The dtype of most floating elements of that file. A tensor stored wider than this records its
  /// dtype.
  std::optional<DType> checkpoint_bulk;
  /// The dtype in the file that training began with, where `checkpoint` is a later state of
  /// training; then this one is recorded.
  std::optional<DType> published;
  /// Its values are still to be drawn: it is stored as requested, since a narrower dtype than
  /// `dtype` loses no value.
  bool drawn = false;
  bool trainable = true;                  ///< false = frozen by the model
  LoraPart lora = LoraPart::kNone;        ///< its part in LoRA
  FrozenAs frozen_as = FrozenAs::kShard;  ///< where it is frozen and no rule says how
  /// The pattern by which the model family keeps it in fp32 (`_keep_in_fp32_modules_strict`).
  std::optional<std::string> strict_pin;
  /// The pattern that names it as a decay of a layer's state, which rounding changes at every
  /// position: it stays in fp32, as in NeMo Automodel, even where a file has it narrower.
  std::optional<std::string> state_pin;
  /// As strict_pin for `_keep_in_fp32_modules`, which applies only where param_dtype is float16.
  std::optional<std::string> pin16;
  std::optional<DType> user_grad_dtype;  ///< the grad_dtype of a leaf, set before sharding
  std::vector<std::string> aliases;      ///< other names of the same tensor (tied parameters)
  /// Aliases that the file holds too, with their dtypes in it. The owner's values count.
  std::vector<std::pair<std::string, DType>> stored_aliases;
  /// The aliases are one tensor object, so autograd sums their uses in the raw dtype.
  bool single_tensor_aliases = false;
  ParameterLayout layout;      ///< placements beyond the data axes, as its layer declares them
  std::int64_t numel() const;  ///< elements of the global shape
};

/// Where the optimizer keeps the full precision of a shard's values.
enum class Master : std::uint8_t {
  kNone,       ///< nowhere: it steps the shard itself, in 16 bits
  kStorage,    ///< in the shard, which is float32 or wider
  kRemainder,  ///< in a bfloat16 shard and 16 more bits next to it (base/split_float.h)
  kCopy,       ///< in a float32 copy of a float16 shard
};
std::string_view to_string(Master master);  ///< "none", "storage", "remainder", "copy"

/// Index into GradContract::reasons.
enum class ContractField : std::uint8_t {
  kStorage,     ///< GradContract::storage
  kCompute,     ///< GradContract::compute
  kGrad,        ///< GradContract::grad
  kAccumulate,  ///< GradContract::accumulate
  kReduce,      ///< GradContract::reduce
  kFinal,       ///< GradContract::final
  kTrainable,   ///< GradContract::trainable and frozen_as
  kMaster,      ///< GradContract::master
  kState,       ///< GradContract::state
  kDecay,       ///< GradContract::decays
  kCount        ///< number of fields
};
std::string_view to_string(ContractField field);  ///< "storage", "compute", ...

/// The resolved dtypes and placements of one parameter and its gradient, with a reason for each.
struct GradContract {
  std::string name;                 ///< canonical name
  std::vector<std::int64_t> shape;  ///< global shape
  Encoding storage;  ///< the sharded parameter; the compute dtype where it is replicated()
  /// The storage dtype that a replicated() parameter would have as a shard, where that differs from
  /// the compute dtype. Loaded values are rounded to it first, so that both layouts compute the
  /// same.
  std::optional<DType> loaded_through;
  Encoding compute;  ///< the unsharded parameter in forward and backward
  /// The dtype that a raw gradient is rounded to on arrival; none = no rounding. Where one forward
  /// uses the parameter several times, autograd has summed the uses in their own dtype before.
  std::optional<DType> grad;
  DType accumulate = DType::kFloat32;  ///< slot before the wire, shard accumulator after it
  DType reduce = DType::kFloat32;      ///< the wire
  DType final = DType::kFloat32;  ///< the gradient that the optimizer reads; cast once, at the end
  bool trainable = true;          ///< false = frozen
  FrozenAs frozen_as = FrozenAs::kShard;  ///< how a frozen parameter is kept
  Master master = Master::kStorage;       ///< kNone for a frozen parameter
  DType state = DType::kFloat32;          ///< the optimizer's moments
  /// Whether weight decay applies; none = the optimizer's list decides.
  std::optional<bool> decays;
  /// One tensor has several names, and their uses in one backward arrive summed in the raw dtype.
  bool raw_sum_by_autograd = false;
  ParameterLayout layout;            ///< the part that a rank holds, beyond the data axes
  ReductionPlan reductions;          ///< follows from layout and mesh (reductions_of)
  std::vector<std::string> aliases;  ///< other names of the same tensor
  /// The reason of each value, by ContractField: "[precision] param_dtype", "rule 2 (*norm)",
  /// "recorded by the checkpoint"...
  std::array<std::string, static_cast<std::size_t>(ContractField::kCount)> reasons;

  std::int64_t numel() const;  ///< elements of the whole parameter
  /// The shape of the tensor that a rank's layer holds before the data axes shard it; the same on
  /// every rank.
  std::vector<std::int64_t> local_shape() const;
  std::int64_t local_numel() const;  ///< elements of local_shape()
  /// Whether it is frozen and whole on every rank, in its compute dtype; then it is never gathered.
  bool replicated() const { return !trainable && frozen_as == FrozenAs::kReplicate; }
  /// The reason of one value.
  std::string& reason(ContractField field) { return reasons[static_cast<std::size_t>(field)]; }
  /// The reason of one value.
  const std::string& reason(ContractField field) const {
    return reasons[static_cast<std::size_t>(field)];
  }
  bool operator==(const GradContract&) const = default;
};

/// Resolves all parameters of one model, in their order. grad/resolve.cpp has one function for each
/// field. Frozen parameters get gradient dtypes too, which nothing reads. Parameters that are not
/// floating have their storage dtype in every field and must be frozen. The axes that a gradient is
/// summed over follow from its layer's declaration (reductions_of); all parameters share one divide
/// factor. Errors: kContract naming the parameter, the found and the expected value and the key to
/// change; kContract for a pattern of a rule that matches no parameter.
std::vector<GradContract> resolve_contracts(const std::vector<ParameterMeta>& parameters,
                                            const PrecisionPolicy& policy, const DataAxes& data);

/// Prints a table with one line for each parameter, then the reasons by number, as `tessera inspect
/// --contract` does.
std::string to_string(const std::vector<GradContract>& contracts);
/// Returns a hash that is the same on every rank and every machine for equal contracts, without the
/// reasons.
std::uint64_t hash(const std::vector<GradContract>& contracts);

/// Returns whether a pattern of a rule matches a parameter's name (see PrecisionRule::match).
bool matches_name(std::string_view pattern, std::string_view name);

}  // namespace tessera
