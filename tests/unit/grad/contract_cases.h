// Small makers for the contract tests.
#pragma once

#include <string>
#include <vector>

#include "tessera/contract.h"

namespace tessera::grad::testing {

inline ParameterMeta scratch(std::string name, DType dtype = DType::kFloat32) {
  ParameterMeta meta;
  meta.name = std::move(name);
  meta.shape = {4, 3};
  meta.dtype = dtype;
  return meta;
}

/// A parameter read from a file with the bulk dtype.
inline ParameterMeta stored(std::string name, DType checkpoint, DType bulk = DType::kBFloat16) {
  ParameterMeta meta = scratch(std::move(name));
  meta.checkpoint = checkpoint;
  meta.checkpoint_bulk = bulk;
  return meta;
}

inline PrecisionRule rule_for(std::string pattern) {
  PrecisionRule rule;
  rule.match = {std::move(pattern)};
  return rule;
}

inline PrecisionPolicy mixed_policy() {
  PrecisionPolicy policy;
  policy.param_dtype = DType::kBFloat16;
  policy.reduce_dtype = DType::kFloat32;
  return policy;
}

inline GradContract resolve_only(const ParameterMeta& meta, const PrecisionPolicy& policy) {
  return resolve_contracts({meta}, policy, {}).front();
}

}  // namespace tessera::grad::testing
