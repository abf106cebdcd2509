// GradContract: the one statement of what a parameter's bytes and gradients are, before the first
// step.
//
// resolve_contracts is a pure function of (parameter metadata, policy, layout); it runs when a
// model is sharded, never in a step. Its result is a value: printed, compared, hashed, and agreed
// on by all ranks before any collective. Whatever is wrong is an error there and names the
// parameter. Next: model_contract.h for buffers and units, shard.h.
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

/// What a parameter is to low-rank adapters (LoRA).
enum class LoraPart : std::uint8_t {
  kNone,
  kBase,     ///< frozen, stored in its compute dtype
  kAdapter,  ///< trained in float32, whatever policy and rules say
};

/// What is known of a parameter before it is sharded.
struct ParameterMeta {
  std::string name;                 ///< canonical (Hugging Face) name
  std::vector<std::int64_t> shape;  ///< global
  DType dtype = DType::kFloat32;    ///< of the tensor as it is
  std::optional<DType> checkpoint;  ///< stored dtype in the file it comes from, if any
  /// The file's bulk dtype (of most floating elements): a tensor stored wider than it records its
  /// dtype.
  std::optional<DType> checkpoint_bulk;
  /// Where that file is a later state of training: the dtype in the one that training began with,
  /// which is what is recorded then.
  std::optional<DType> published;
  /// Its values are yet to be drawn: storage is what is asked for, and no value is lost where that
  /// is narrower than `dtype`.
  bool drawn = false;
  bool trainable = true;
  LoraPart lora = LoraPart::kNone;
  FrozenAs frozen_as = FrozenAs::kShard;  ///< where it is frozen and no rule says how
  /// The pattern by which the model family keeps it in fp32 (`_keep_in_fp32_modules_strict`).
  std::optional<std::string> strict_pin;
  /// The pattern by which it decays the state of a layer, so that rounding it changes a state at
  /// every position: fp32 as NeMo Automodel keeps it, where a file has it narrower, too.
  std::optional<std::string> state_pin;
  /// The same as strict_pin for `_keep_in_fp32_modules`, which speaks only where param_dtype is float16.
  std::optional<std::string> pin16;
  std::optional<DType> user_grad_dtype;  ///< a leaf's own grad_dtype, set before sharding
  std::vector<std::string> aliases;      ///< further names of the same tensor (tied parameters)
  /// Aliases that the file holds too, with their dtypes there. The owner's values count.
  std::vector<std::pair<std::string, DType>> stored_aliases;
  /// The aliases are one tensor object: autograd sums their uses raw.
  bool single_tensor_aliases = false;
  ParameterLayout layout;  ///< beyond the data axes, as its layer declares
  std::int64_t numel() const;
};

/// What the optimizer steps: where the value of a shard is kept to full precision.
enum class Master : std::uint8_t {
  kNone,       ///< nowhere: the shard itself is stepped, in its 16 bits
  kStorage,    ///< in the shard, which is float32 or wider
  kRemainder,  ///< in a bfloat16 shard and 16 more bits beside it (base/split_float.h)
  kCopy,       ///< in a float32 copy of a float16 shard
};
std::string_view to_string(Master master);  ///< "none", "storage", "remainder", "copy"

/// Index into GradContract::reasons.
enum class ContractField : std::uint8_t {
  kStorage,
  kCompute,
  kGrad,
  kAccumulate,
  kReduce,
  kFinal,
  kTrainable,
  kMaster,
  kState,
  kDecay,
  kCount
};
std::string_view to_string(ContractField field);

struct GradContract {
  std::string name;
  std::vector<std::int64_t> shape;
  Encoding storage;  ///< the sharded parameter; the compute dtype where it is replicated()
  /// What the storage dtype of a replicated() one would be if it were sharded, where that is not the
  /// compute dtype: values pass through it as they are loaded, so that both compute the same.
  std::optional<DType> loaded_through;
  Encoding compute;  ///< the unsharded parameter in forward and backward
  /// Opt-in rounding of a raw gradient on arrival; none = added as it arrives. What arrives of
  /// several uses inside one forward is autograd's own sum, in the dtype of the uses: how often a
  /// forward uses it no contract can know.
  std::optional<DType> grad;
  DType accumulate = DType::kFloat32;  ///< slot before the wire, shard accumulator after it
  DType reduce = DType::kFloat32;      ///< the wire
  DType final = DType::kFloat32;  ///< what the optimizer reads; one cast at the end of the step
  bool trainable = true;
  FrozenAs frozen_as = FrozenAs::kShard;  ///< of a frozen parameter
  Master master = Master::kStorage;       ///< kNone for a frozen one
  DType state = DType::kFloat32;          ///< the optimizer's moments
  std::optional<bool>
      decays;  ///< whether weight decay applies; none = the optimizer's list decides
  /// One tensor has several names, whose uses in one backward arrive summed in the raw dtype.
  bool raw_sum_by_autograd = false;
  ParameterLayout layout;    ///< beyond the data axes: which part of it a rank holds
  ReductionPlan reductions;  ///< follows from layout and mesh (reductions_of)
  std::vector<std::string> aliases;
  /// Why each value is what it is: "[precision] param_dtype", "rule 2 (*norm)", "recorded by the
  /// checkpoint"...
  std::array<std::string, static_cast<std::size_t>(ContractField::kCount)> reasons;

  std::int64_t numel() const;  ///< of the whole parameter
  /// Of the tensor that a rank's layer has, which the data axes then share out: the same on every
  /// rank.
  std::vector<std::int64_t> local_shape() const;
  std::int64_t local_numel() const;
  /// Frozen and whole on every rank, in its compute dtype: nothing of it is ever gathered.
  bool replicated() const { return !trainable && frozen_as == FrozenAs::kReplicate; }
  std::string& reason(ContractField field) { return reasons[static_cast<std::size_t>(field)]; }
  const std::string& reason(ContractField field) const {
    return reasons[static_cast<std::size_t>(field)];
  }
  bool operator==(const GradContract&) const = default;
};

/// Resolves all parameters of one model, in their order. How each value is found stands in
/// grad/resolve.cpp, one function a field. Frozen parameters have resolved gradient dtypes too,
/// which nothing reads; parameters that are not floating mirror their storage everywhere and must
/// be frozen. Which sums a gradient owes follows from its layer's declaration (reductions_of); one
/// divide factor for all. Errors: kContract naming the parameter, what was found, what was
/// expected, the key to change; also for patterns of rules that match no parameter.
std::vector<GradContract> resolve_contracts(const std::vector<ParameterMeta>& parameters,
                                            const PrecisionPolicy& policy, const DataAxes& data);

/// One line a parameter, aligned, then the reasons by number: what `tessera inspect --contract`
/// prints.
std::string to_string(const std::vector<GradContract>& contracts);
/// The same on every rank and every machine for equal contracts (reasons are left out).
std::uint64_t hash(const std::vector<GradContract>& contracts);

/// Whether a pattern of a rule matches a parameter's name (see PrecisionRule::match).
bool matches_name(std::string_view pattern, std::string_view name);

}  // namespace tessera
