// What [lora] decides: a frozen base in its compute dtype, adapters in float32.
#include <algorithm>

#include "base/wildcard.h"
#include "grad/resolve_steps.h"
#include "tessera/error.h"

namespace tessera::grad {
namespace {

constexpr const char* kBaseReason = "[lora] base";
constexpr const char* kAdapterReason = "[lora] adapter";

/// What a rule asks that an adapter does not get: "param_dtype = bfloat16". Empty: nothing.
std::string without_effect(const PrecisionRule& rule) {
  const auto other = [](const std::optional<DType>& dtype) {
    return dtype && *dtype != DType::kFloat32;
  };
  if (other(rule.param_dtype)) return concat("param_dtype = ", to_string(*rule.param_dtype));
  if (other(rule.storage_dtype)) return concat("storage_dtype = ", to_string(*rule.storage_dtype));
  if (rule.pin == false) return "pin = false";
  if (rule.widen) return "widen";
  return {};
}

/// Whether the pattern names an adapter and nothing beside adapters.
bool matches_adapters_alone(const std::string& pattern,
                            const std::vector<ParameterMeta>& parameters,
                            const std::vector<BufferMeta>& buffers) {
  const auto matches = [&](const auto& name) { return matches_name(pattern, name); };
  bool any = false;
  for (const ParameterMeta& meta : parameters) {
    if (!matches(meta.name) && !std::ranges::any_of(meta.aliases, matches)) continue;
    if (meta.lora != LoraPart::kAdapter) return false;
    any = true;
  }
  return any && std::ranges::none_of(buffers, matches, &BufferMeta::name);
}

}  // namespace

void check_lora_rules(const std::vector<PrecisionRule>& rules,
                      const std::vector<ParameterMeta>& parameters,
                      const std::vector<BufferMeta>& buffers) {
  for (std::size_t index = 0; index < rules.size(); ++index) {
    const std::string asked = without_effect(rules[index]);
    if (asked.empty()) continue;
    for (const std::string& pattern : rules[index].match) {
      TESSERA_CHECK(!matches_adapters_alone(pattern, parameters, buffers), ErrorKind::kContract,
                    "[[precision.rule]] ", index + 1, ": found the pattern \"", pattern,
                    "\", which matches adapters alone, beside ", asked,
                    ", expected a parameter of the model: adapters are float32 whatever is asked; "
                    "correct match or leave the pattern out");
    }
  }
}

void resolve_lora_trainable(GradContract& contract, const ParameterMeta& meta, const Asked& asked) {
  const bool is_base = meta.lora == LoraPart::kBase;
  if (asked.frozen) {
    const bool asks_frozen = asked.frozen->value != FrozenRule::kNo;
    TESSERA_CHECK(asks_frozen == is_base, ErrorKind::kContract, meta.name,
                  ": found frozen = ", asks_frozen ? "true" : "false", " (", asked.frozen->reason,
                  ") beside lora.rank, which ",
                  is_base ? "freezes the model" : "trains the adapters",
                  "; leave frozen out of the rule, and choose layers by lora.targets");
  }
  contract.trainable = meta.trainable && !is_base;
  contract.reason(ContractField::kTrainable) = is_base ? kBaseReason : kAdapterReason;
}

void resolve_lora_base(GradContract& contract, const ParameterMeta& meta) {
  const DType found = meta.checkpoint.value_or(meta.dtype);
  contract.storage.dtype = contract.compute.dtype;
  // Nothing is trained that could be rounded another way: one cast, when it is loaded.
  contract.compute.rounding = Rounding::kNearestEven;
  contract.reason(ContractField::kStorage) =
      found == contract.compute.dtype
          ? concat(kBaseReason, ": as compute")
          : concat(kBaseReason, ": as compute, cast once from ", to_string(found));
}

void resolve_lora_adapter(GradContract& contract) {
  contract.storage = contract.compute = {};
  contract.storage.dtype = contract.compute.dtype = DType::kFloat32;
  for (const ContractField field : {ContractField::kStorage, ContractField::kCompute}) {
    contract.reason(field) = concat(kAdapterReason, ": float32 whatever is asked for");
  }
}

}  // namespace tessera::grad
