// PrecisionPolicy: the dtypes that a user requests, for all parameters and by rule for single ones.
//
// These are requests. The GradContract of each parameter (contract.h) has the result, with the
// reason of every value. Next: contract.h.
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

/// Whether a rule freezes a parameter.
enum class FrozenRule : std::uint8_t {
  kNo,         ///< trained, although the model froze it
  kYes,        ///< frozen, and kept as the model's other frozen parameters
  kShard,      ///< frozen, and kept as FrozenAs::kShard
  kReplicate,  ///< frozen, and kept as FrozenAs::kReplicate
};

/// Which tensors of a checkpoint record their stored dtype as the least dtype to compute in.
enum class Intrinsic : std::uint8_t {
  kMinority,  ///< those stored wider than most of the file
  kAll,       ///< every floating one
  kNone,      ///< no tensor
};
std::string_view to_string(Intrinsic intrinsic);  ///< "minority", "all", "none"

/// How a storage_dtype is applied that cannot hold every value of a tensor as found.
enum class NarrowerRequest : std::uint8_t {
  kKeep,    ///< the found dtype stays, widened where that is needed
  kNarrow,  ///< values are rounded once, when they are loaded; pinned tensors are kept
  kError,   ///< refused (kContract)
};
std::string_view to_string(NarrowerRequest what);  ///< "keep", "narrow", "error"

/// The master that is requested for 16-bit shards.
enum class MasterRequest : std::uint8_t {
  kAuto,  ///< float32 precision: Master::kRemainder for bfloat16, kCopy for float16
  kNone,  ///< the optimizer steps the shard itself, and loses updates below half a step of it
};

/// The settings of an optimizer that contracts depend on.
struct OptimizerPrecision {
  MasterRequest master = MasterRequest::kAuto;  ///< the master of 16-bit shards
  /// Patterns as PrecisionRule::match of parameters without weight decay. Each must match a
  /// parameter, which may be frozen. none = the optimizer's own list decides.
  std::optional<std::vector<std::string>> no_decay;
  bool operator==(const OptimizerPrecision&) const = default;
};

/// One `[[precision.rule]]`: settings for the parameters that a pattern matches. none = no setting.
struct PrecisionRule {
  /// Patterns of one or more dotted components ("*norm", "mlp.gate"), with `*` and `?` inside of a
  /// component. A pattern matches consecutive whole components anywhere in a parameter's name or
  /// alias, so a trailing .weight or .bias may be omitted. Each pattern must match a parameter.
  std::vector<std::string> match;
  std::optional<DType> param_dtype;       ///< compute dtype; overrides the checkpoint's record
  std::optional<DType> reduce_dtype;      ///< wire dtype
  std::optional<DType> storage_dtype;     ///< storage; on_narrower_request applies to it
  std::optional<DType> accumulate_dtype;  ///< accumulators of gradients
  std::optional<DType> grad_dtype;        ///< raw gradients are rounded to it on arrival
  /// true = compute in fp32 at least, over policy and rules; false = undo the model's own pin.
  std::optional<bool> pin;
  /// Whether a pin may widen the storage of a tensor that is narrower than fp32.
  std::optional<bool> widen;
  std::optional<FrozenRule> frozen;  ///< whether the parameter is frozen
  bool operator==(const PrecisionRule&) const = default;
};

/// The dtypes of a unit's parameters, inputs and outputs.
struct PrecisionPolicy {
  std::optional<DType> param_dtype;  ///< compute dtype; none = each parameter's storage dtype
  /// How float32 storage is rounded to a bfloat16 compute dtype; other casts ignore it. With
  /// kHalfAway a run has the bits of one that stores bfloat16 with Master::kRemainder, which rounds
  /// that way.
  Rounding param_rounding = Rounding::kNearestEven;
  std::optional<DType> reduce_dtype;   ///< wire dtype; none = promote(compute, fp32)
  std::optional<DType> storage_dtype;  ///< requested storage; none = as it is (file or tensor)
  /// Accumulators of gradients; none = fp32, or fp64 where compute is fp64, and never narrower than
  /// reduce.
  std::optional<DType> accumulate_dtype;
  /// The gradients that the optimizer reads; none = the dtype of its master: float32 (float64 for
  /// float64 storage), or the storage dtype with MasterRequest::kNone, as torch::optim needs it.
  std::optional<DType> final_dtype;
  /// Floating outputs of the outermost sharded module are cast to it; none = no cast. Outputs of
  /// inner units are not cast (ShardOptions::output_dtype does that for one unit).
  std::optional<DType> output_dtype;
  /// Whether floating inputs of a sharded module are cast to param_dtype, where that is set. Inputs
  /// of a unit whose parameters all compute in a wider dtype are not cast.
  bool cast_forward_inputs = true;
  Intrinsic intrinsic = Intrinsic::kMinority;  ///< which stored dtypes are recorded
  NarrowerRequest on_narrower_request = NarrowerRequest::kKeep;  ///< for a narrower storage_dtype
  OptimizerPrecision optimizer;                                  ///< settings of the optimizer
  /// Whether the loss is scaled (grad_scaler.h). Without that, float16 is refused as the compute
  /// and reduce dtype of trained parameters, since small gradients become zero in it.
  bool loss_scaling = false;
  std::vector<PrecisionRule> rules;  ///< the last matching rule wins, field by field
  bool operator==(const PrecisionPolicy&) const = default;
};

}  // namespace tessera
