#include <algorithm>
#include <map>

#include "grad/resolve_steps.h"
#include "tessera/error.h"

namespace tessera::grad {
namespace {

/// Elements of a unit's own floating parameters by their compute dtype.
std::map<DType, std::int64_t> elements_by_compute(const UnitMeta& unit,
                                                  const std::vector<GradContract>& parameters) {
  std::map<DType, std::int64_t> elements;
  for (const std::size_t index : unit.parameters) {
    const GradContract& parameter = parameters.at(index);
    if (is_floating(parameter.compute.dtype)) {
      elements[parameter.compute.dtype] += parameter.numel();
    }
  }
  return elements;
}

/// Nothing of the unit computes in the policy's dtype or below: its layers take what comes, and an
/// input rounded to that dtype would have lost its digits for nothing.
bool all_wider(const std::map<DType, std::int64_t>& elements, DType than) {
  return !elements.empty() && std::all_of(elements.begin(), elements.end(), [&](const auto& each) {
    return each.first != than && represents(each.first, than);
  });
}

void resolve_input(UnitContract& contract, const UnitMeta& unit, const PrecisionPolicy& policy,
                   const std::map<DType, std::int64_t>& elements) {
  std::string& reason = contract.reason(UnitField::kInput);
  if (!unit.casts_inputs || !policy.cast_forward_inputs) {
    reason = "inputs are not cast (cast_forward_inputs = false)";
  } else if (!policy.param_dtype) {
    reason = "there is no param_dtype to cast to";
  } else if (all_wider(elements, *policy.param_dtype)) {
    reason = concat("its parameters compute in ", to_string(elements.begin()->first),
                    elements.size() > 1 ? " and others" : "", ", wider than param_dtype");
  } else {
    contract.input = policy.param_dtype;
    reason = "[precision] param_dtype";
  }
}

void resolve_output(UnitContract& contract, const UnitMeta& unit, const PrecisionPolicy& policy) {
  std::string& reason = contract.reason(UnitField::kOutput);
  if (unit.asked_output) {
    contract.output = unit.asked_output;
    reason = "the unit's own output_dtype";
  } else if (unit.nested) {
    reason = "inside another unit: outputs stay as they come";
  } else if (policy.output_dtype) {
    contract.output = policy.output_dtype;
    reason = "[precision] output_dtype";
  } else {
    reason = "nothing asks for an output dtype";
  }
}

void resolve_activation(UnitContract& contract, const std::map<DType, std::int64_t>& elements) {
  std::string& reason = contract.reason(UnitField::kActivation);
  const auto most =
      std::max_element(elements.begin(), elements.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  if (contract.input) {
    contract.activation = contract.input;
    reason = "as its input";
  } else if (contract.output) {
    contract.activation = contract.output;
    reason = "as its output";
  } else if (most != elements.end()) {
    contract.activation = most->first;
    reason = "what most of its elements compute in";
  } else {
    reason = "it has no floating parameters of its own";
  }
}

}  // namespace

UnitContract resolve_unit(const UnitMeta& unit, const std::vector<GradContract>& parameters,
                          const PrecisionPolicy& policy) {
  UnitContract contract;
  contract.name = unit.name;
  contract.nested = unit.nested;
  const auto elements = elements_by_compute(unit, parameters);
  resolve_input(contract, unit, policy, elements);
  resolve_output(contract, unit, policy);
  resolve_activation(contract, elements);
  return contract;
}

}  // namespace tessera::grad
