// What a user says about dtypes: the policy of fully_shard and the rules for single parameters.
//
// These are requests. What becomes of them for each parameter, with the reason of every value, is the
// GradContract (contract.h). Next: contract.h.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/dtype.h"

namespace tessera {

/// One `[[precision.rule]]`: what differs for the parameters that a pattern matches.
struct PrecisionRule {
  /// Patterns of one or more dotted components that match consecutive whole components of a parameter's
  /// name ("*norm", "mlp.gate"); `*` and `?` within a component; a trailing .weight/.bias may be left out.
  std::vector<std::string> match;
  std::optional<DType> param_dtype;
  std::optional<DType> reduce_dtype;
  std::optional<DType> storage_dtype;
  std::optional<DType> accumulate_dtype;
  std::optional<DType> grad_dtype;
  std::optional<bool> pin;    ///< compute in fp32 whatever the policy says
  std::optional<bool> widen;  ///< a pin may widen a tensor that is stored lower than fp32
  std::optional<bool> frozen;
  bool operator==(const PrecisionRule&) const = default;
};

/// The dtypes of a unit's parameters. none = see each field.
struct PrecisionPolicy {
  std::optional<DType> param_dtype;       ///< compute dtype; none = each parameter's storage dtype
  std::optional<DType> reduce_dtype;      ///< wire dtype; none = promote(compute, fp32)
  std::optional<DType> storage_dtype;     ///< requested storage; none = as it is (file or tensor)
  std::optional<DType> accumulate_dtype;  ///< none = fp32, fp64 where compute is fp64
  std::optional<DType> final_dtype;       ///< what the optimizer reads; none = storage
  std::optional<DType> output_dtype;      ///< floating outputs of the sharded module; none = as they come
  /// Cast floating inputs of the sharded module to param_dtype (only where param_dtype is set).
  bool cast_forward_inputs = true;
  std::vector<PrecisionRule> rules;  ///< the last matching rule wins, field by field
  bool operator==(const PrecisionPolicy&) const = default;
};

}  // namespace tessera
