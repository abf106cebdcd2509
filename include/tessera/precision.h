// What a user says about dtypes: the policy of fully_shard and the rules for single parameters.
//
// These are requests. What becomes of them for each parameter, with the reason of every value, is
// the GradContract (contract.h). Next: contract.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/dtype.h"

namespace tessera {

/// How a frozen parameter is kept.
enum class FrozenAs : std::uint8_t {
  kShard,      ///< like a trained one: a slice a rank, storage dtype, gathered where it is needed
  kReplicate,  ///< whole on every rank, cast to its compute dtype once after loading
};
std::string_view to_string(FrozenAs kept);  ///< "shard", "replicate"

/// What a rule says about training.
enum class FrozenRule : std::uint8_t {
  kNo,   ///< trained, though the model froze it
  kYes,  ///< frozen, kept as the model's other frozen parameters are
  kShard,
  kReplicate,
};

/// Which tensors of a checkpoint record their stored dtype as the one to compute in at least.
enum class Intrinsic : std::uint8_t {
  kMinority,  ///< those stored wider than most of the file
  kAll,       ///< every floating one
  kNone,
};
std::string_view to_string(Intrinsic intrinsic);  ///< "minority", "all", "none"

/// What a storage_dtype does that cannot hold every value of a tensor as it is found.
enum class NarrowerRequest : std::uint8_t {
  kKeep,    ///< the dtype that was found stays, where it is needed widened
  kNarrow,  ///< values are rounded once, when they are loaded; pinned tensors are kept
  kError,
};
std::string_view to_string(NarrowerRequest what);  ///< "keep", "narrow", "error"

/// Which master of a 16-bit shard is asked for.
enum class MasterRequest : std::uint8_t {
  kAuto,  ///< to float32: Master::kRemainder beside bfloat16, kCopy beside float16
  kNone,  ///< the optimizer steps the shard itself: updates below half a step of it are lost
};

/// What the contract has to know of the optimizer.
struct OptimizerPrecision {
  MasterRequest master = MasterRequest::kAuto;
  /// Patterns as PrecisionRule::match of parameters without weight decay; each must match
  /// one, which may be frozen. none = the optimizer's own list decides.
  std::optional<std::vector<std::string>> no_decay;
  bool operator==(const OptimizerPrecision&) const = default;
};

/// One `[[precision.rule]]`: what differs for the parameters that a pattern matches.
struct PrecisionRule {
  /// Patterns of one or more dotted components that match consecutive whole components of a
  /// parameter's name or of an alias ("*norm", "mlp.gate"), anywhere in it, so a trailing
  /// .weight/.bias may be left out; `*` and `?` within a component. Each pattern must match some
  /// parameter.
  std::vector<std::string> match;
  std::optional<DType> param_dtype;  ///< explicit: wins over what the checkpoint records
  std::optional<DType> reduce_dtype;
  std::optional<DType> storage_dtype;  ///< narrower than the file: see on_narrower_request
  std::optional<DType> accumulate_dtype;
  std::optional<DType> grad_dtype;  ///< raw gradients are rounded to it on arrival
  /// true: compute in fp32 at least, whatever policy and rules say; false: undoes the model's own
  /// pin.
  std::optional<bool> pin;
  std::optional<bool>
      widen;  ///< a pin may widen the storage of a tensor that is kept lower than fp32
  std::optional<FrozenRule> frozen;
  bool operator==(const PrecisionRule&) const = default;
};

/// The dtypes of a unit's parameters. none = see each field.
struct PrecisionPolicy {
  std::optional<DType> param_dtype;  ///< compute dtype; none = each parameter's storage dtype
  /// How float32 storage is rounded to a bfloat16 compute dtype. kHalfAway makes a run the bits of
  /// one that stores bfloat16 with Master::kRemainder, which rounds that way; other casts do not
  /// ask.
  Rounding param_rounding = Rounding::kNearestEven;
  std::optional<DType> reduce_dtype;   ///< wire dtype; none = promote(compute, fp32)
  std::optional<DType> storage_dtype;  ///< requested storage; none = as it is (file or tensor)
  /// none = fp32, fp64 where compute is fp64, in any case no narrower than reduce.
  std::optional<DType> accumulate_dtype;
  /// What the optimizer reads; none = the dtype of its master: float32 (float64 for float64
  /// storage), or storage where MasterRequest::kNone is asked for, as torch::optim needs it.
  std::optional<DType> final_dtype;
  /// Floating outputs of the outermost sharded module; none = as they come. Units inside return
  /// theirs as they come (ShardOptions::output_dtype for a single one).
  std::optional<DType> output_dtype;
  /// Cast floating inputs of a sharded module to param_dtype (where param_dtype is set). A unit
  /// whose own parameters all compute in something wider gets them as they come.
  bool cast_forward_inputs = true;
  Intrinsic intrinsic = Intrinsic::kMinority;
  NarrowerRequest on_narrower_request = NarrowerRequest::kKeep;
  OptimizerPrecision optimizer;
  /// The loss is scaled (grad_scaler.h). Without it float16 is refused as the compute and the
  /// reduce dtype of trained parameters: small gradients vanish in it.
  bool loss_scaling = false;
  std::vector<PrecisionRule> rules;  ///< the last matching rule wins, field by field
  bool operator==(const PrecisionPolicy&) const = default;
};

}  // namespace tessera
