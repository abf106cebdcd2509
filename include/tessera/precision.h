// What a user says about dtypes: the policy of fully_shard and the rules for single parameters.
//
// These are requests. What becomes of them for each parameter, with the reason of every value, is
// the GradContract (contract.h). Next: contract.h.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/dtype.h"

namespace tessera {

/// One `[[precision.rule]]`: what differs for the parameters that a pattern matches.
struct PrecisionRule {
  /// Patterns of one or more dotted components that match consecutive whole components of a
  /// parameter's name or of an alias ("*norm", "mlp.gate"), anywhere in it, so a trailing
  /// .weight/.bias may be left out; `*` and `?` within a component. Each pattern must match some
  /// parameter.
  std::vector<std::string> match;
  std::optional<DType> param_dtype;  ///< explicit: wins over what the checkpoint records
  std::optional<DType> reduce_dtype;
  std::optional<DType> storage_dtype;  ///< narrower than the file: the file's is kept
  std::optional<DType> accumulate_dtype;
  std::optional<DType> grad_dtype;  ///< raw gradients are rounded to it on arrival
  /// true: compute in fp32 at least, whatever policy and rules say; false: undoes the model's own
  /// pin.
  std::optional<bool> pin;
  std::optional<bool>
      widen;  ///< a pin may widen the storage of a tensor that is kept lower than fp32
  std::optional<bool> frozen;  ///< true: not trained; false: trained though the model froze it
  bool operator==(const PrecisionRule&) const = default;
};

/// The dtypes of a unit's parameters. none = see each field.
struct PrecisionPolicy {
  std::optional<DType> param_dtype;    ///< compute dtype; none = each parameter's storage dtype
  std::optional<DType> reduce_dtype;   ///< wire dtype; none = promote(compute, fp32); never float16
  std::optional<DType> storage_dtype;  ///< requested storage; none = as it is (file or tensor)
  /// none = fp32, fp64 where compute is fp64, in any case no narrower than reduce.
  std::optional<DType> accumulate_dtype;
  std::optional<DType> final_dtype;  ///< what the optimizer reads; none = storage
  std::optional<DType>
      output_dtype;  ///< floating outputs of the sharded module; none = as they come
  /// Cast floating inputs of the sharded module to param_dtype (only where param_dtype is set).
  bool cast_forward_inputs = true;
  std::vector<PrecisionRule> rules;  ///< the last matching rule wins, field by field
  bool operator==(const PrecisionPolicy&) const = default;
};

}  // namespace tessera
