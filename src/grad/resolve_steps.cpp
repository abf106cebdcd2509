#include "grad/resolve_steps.h"

#include <algorithm>

#include "base/text/wildcard.h"
#include "tessera/error.h"

namespace tessera::grad {

DType widen_to(DType found, DType asked) {
  if (represents(asked, found)) return asked;
  if (represents(found, asked)) return found;
  return promote(found, asked);
}

std::optional<Setting<DType>> first_of(const std::optional<Setting<DType>>& rule,
                                       const std::optional<DType>& policy, const char* key) {
  if (rule) return rule;
  if (policy) return Setting<DType>{*policy, concat("[precision] ", key)};
  return std::nullopt;
}

std::string where_to_change(const std::string& reason, const char* key) {
  return reason.rfind("rule ", 0) == 0 ? concat(key, " of ", reason) : concat("[precision] ", key);
}

std::optional<Setting<DType>> recorded(std::optional<DType> own, std::optional<DType> bulk,
                                       Intrinsic intrinsic) {
  if (!own || !is_arithmetic(*own) || intrinsic == Intrinsic::kNone) return std::nullopt;
  if (intrinsic == Intrinsic::kAll) {
    return Setting<DType>{*own, concat("recorded by the checkpoint (", to_string(*own),
                                       ", [precision] intrinsic = \"all\")")};
  }
  if (!bulk || !is_floating(*bulk) || *own == *bulk || !represents(*own, *bulk)) {
    return std::nullopt;
  }
  return Setting<DType>{*own, concat("recorded by the checkpoint (", to_string(*own),
                                     ", most of it ", to_string(*bulk), ")")};
}

std::optional<std::string> pinned_by(const Pins& pins, const Asked& asked,
                                     const PrecisionPolicy& policy) {
  if (asked.pin) {
    if (!asked.pin->value) return std::nullopt;
    return asked.pin->reason;
  }
  if (pins.strict) {
    return concat("the model family (_keep_in_fp32_modules_strict: ", *pins.strict, ")");
  }
  if (pins.state) {
    return concat(
        "the model family (what decays a state, as NeMo Automodel keeps it: ", *pins.state, ")");
  }
  if (pins.only_float16 && policy.param_dtype == DType::kFloat16) {
    return concat("the model family under float16 (_keep_in_fp32_modules: ", *pins.only_float16,
                  ")");
  }
  return std::nullopt;
}

namespace {

/// Resolves the storage of a pinned parameter. A pin needs storage as wide as the compute dtype:
/// bits that the file has lost do not come back. A `widen`, or a request for fp32 storage, confirms
/// that this is known.
void pin_storage(GradContract& contract, const ParameterMeta& meta, const Asked& asked,
                 const PrecisionPolicy& policy) {
  const auto pin = pinned_by(pins_of(meta), asked, policy);
  const DType storage = contract.storage.dtype;
  if (!pin || represents(storage, DType::kFloat32)) return;
  if (asked.widen && asked.widen->value) {
    contract.storage.dtype = DType::kFloat32;
    contract.reason(ContractField::kStorage) =
        concat(to_string(storage), " widened by ", asked.widen->reason);
    return;
  }
  if (meta.state_pin && !asked.pin) {
    contract.storage.dtype = DType::kFloat32;
    contract.reason(ContractField::kStorage) =
        concat(to_string(storage), " widened, pinned by ", *pin);
    return;
  }
  TESSERA_CHECK(!meta.checkpoint, ErrorKind::kContract, meta.name, ": found ", to_string(storage),
                " in the checkpoint, pinned to float32 by ", *pin,
                ", expected float32 or wider: its lost bits do not come back; add widen = true (or"
                " pin = false) in a [[precision.rule]] for it, or set [precision] storage_dtype ="
                " \"float32\"");
}

/// Resolves a request for a dtype that cannot hold every value of the present one.
void request_narrower(GradContract& contract, const ParameterMeta& meta, const Asked& asked,
                      const PrecisionPolicy& policy, const Setting<DType>& request) {
  const DType found = contract.storage.dtype;
  std::string& reason = contract.reason(ContractField::kStorage);
  TESSERA_CHECK(policy.on_narrower_request != NarrowerRequest::kError, ErrorKind::kContract,
                meta.name, ": found ", to_string(found), " (", reason, "), expected one that ",
                request.reason, " (", to_string(request.value),
                ") can hold: [precision] on_narrower_request is \"error\"; change ",
                where_to_change(request.reason, "storage_dtype"),
                ", or set on_narrower_request to \"keep\" or \"narrow\"");
  const auto pin = pinned_by(pins_of(meta), asked, policy);
  if (policy.on_narrower_request == NarrowerRequest::kNarrow && !pin) {
    contract.storage.dtype = request.value;
    reason = concat(request.reason, ", narrowed from ", to_string(found),
                    " as [precision] on_narrower_request says");
    return;
  }
  contract.storage.dtype = widen_to(found, request.value);
  reason += concat(", not as narrow as ", request.reason, " asks (", to_string(request.value), ")",
                   pin ? concat(", pinned by ", *pin) : "");
}

}  // namespace

void resolve_storage(GradContract& contract, const ParameterMeta& meta, const Asked& asked,
                     const PrecisionPolicy& policy) {
  const DType found = meta.checkpoint.value_or(meta.dtype);
  std::string& reason = contract.reason(ContractField::kStorage);
  contract.storage.dtype = found;
  reason = meta.checkpoint ? "as in the checkpoint"
           : meta.drawn    ? "as config.json says"
                           : "as the tensor is";
  if (!is_floating(found)) return;
  if (const auto request = first_of(asked.storage_dtype, policy.storage_dtype, "storage_dtype")) {
    if (meta.drawn || represents(request->value, found)) {
      contract.storage.dtype = request->value;
      reason = request->reason;
    } else {
      request_narrower(contract, meta, asked, policy, *request);
    }
  }
  pin_storage(contract, meta, asked, policy);
  TESSERA_CHECK(!contract.trainable || is_arithmetic(contract.storage.dtype), ErrorKind::kContract,
                meta.name, ": found a trainable parameter stored as ",
                to_string(contract.storage.dtype),
                ", expected a dtype that an optimizer can step; set [precision] storage_dtype, or"
                " freeze it (frozen = true in a [[precision.rule]])");
}

// The part of [lora]: a frozen base in its compute dtype, adapters in float32.

namespace {

constexpr const char* kBaseReason = "[lora] base";
constexpr const char* kAdapterReason = "[lora] adapter";

/// Returns a setting of a rule that an adapter does not get, "param_dtype = bfloat16"; "" for none.
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

/// Whether the pattern matches adapters and nothing else.
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
                    "\", which matches adapters alone, with ", asked,
                    ", expected a parameter of the model: adapters are always float32; "
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
                  ") together with lora.rank, which ",
                  is_base ? "freezes the model" : "trains the adapters",
                  "; leave frozen out of the rule, and choose layers by lora.targets");
  }
  contract.trainable = meta.trainable && !is_base;
  contract.reason(ContractField::kTrainable) = is_base ? kBaseReason : kAdapterReason;
}

void resolve_lora_base(GradContract& contract, const ParameterMeta& meta) {
  const DType found = meta.checkpoint.value_or(meta.dtype);
  contract.storage.dtype = contract.compute.dtype;
  // A frozen base is cast once, when it is loaded, so that its rounding is that of a plain cast.
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
    contract.reason(field) = concat(kAdapterReason, ": always float32");
  }
}

// The state of the optimizer.

namespace {

void resolve_master(GradContract& contract, const OptimizerPrecision& asked) {
  std::string& reason = contract.reason(ContractField::kMaster);
  const DType storage = contract.storage.dtype;
  if (!contract.trainable) {
    contract.master = Master::kNone;
    reason = "frozen";
  } else if (represents(storage, DType::kFloat32)) {
    contract.master = Master::kStorage;
    reason = "storage is float32 or wider";
  } else if (asked.master == MasterRequest::kNone) {
    contract.master = Master::kNone;
    reason = "[optimizer] master";
  } else {
    contract.master = storage == DType::kBFloat16 ? Master::kRemainder : Master::kCopy;
    reason = concat("storage is ", to_string(storage));
  }
}

void resolve_final(GradContract& contract, const PrecisionPolicy& policy) {
  std::string& reason = contract.reason(ContractField::kFinal);
  if (policy.final_dtype) {
    contract.final = *policy.final_dtype;
    reason = "[precision] final_dtype";
  } else if (contract.master == Master::kRemainder || contract.master == Master::kCopy) {
    contract.final = DType::kFloat32;
    reason = "as the master";
  } else {
    contract.final = contract.storage.dtype;
    reason = "as storage";
  }
  if (contract.trainable && contract.final == DType::kFloat16) {
    reason += "; what is below 6e-8 is lost: final gradients are not scaled";
  }
}

void resolve_state(GradContract& contract) {
  std::string& reason = contract.reason(ContractField::kState);
  if (!contract.trainable) {
    contract.state = contract.final;
    reason = "frozen";
  } else if (contract.master == Master::kNone) {
    contract.state = contract.storage.dtype;
    reason = "as storage, since there is no master";
  } else {
    contract.state = promote(contract.storage.dtype, DType::kFloat32);
    reason = "as the master";
  }
}

void resolve_decay(GradContract& contract, const OptimizerPrecision& asked) {
  std::string& reason = contract.reason(ContractField::kDecay);
  contract.decays.reset();
  if (!contract.trainable) {
    reason = "frozen";
    return;
  }
  if (!asked.no_decay) {
    reason = "the optimizer's own no_decay says";
    return;
  }
  const auto pattern = std::find_if(asked.no_decay->begin(), asked.no_decay->end(),
                                    [&](const auto& each) { return matches(each, contract); });
  contract.decays = pattern == asked.no_decay->end();
  reason = *contract.decays ? "not in [optimizer] no_decay"
                            : concat("[optimizer] no_decay (", *pattern, ")");
}

}  // namespace

void resolve_optimizer(GradContract& contract, const PrecisionPolicy& policy) {
  resolve_master(contract, policy.optimizer);
  resolve_final(contract, policy);
  resolve_state(contract);
  resolve_decay(contract, policy.optimizer);
}

bool matches(const std::string& pattern, const GradContract& contract) {
  return matches_name(pattern, contract.name) ||
         std::any_of(contract.aliases.begin(), contract.aliases.end(),
                     [&](const auto& alias) { return matches_name(pattern, alias); });
}

void check_no_decay(const std::vector<std::string>& patterns,
                    const std::vector<const GradContract*>& contracts) {
  for (const std::string& pattern : patterns) {
    const bool any = std::ranges::any_of(
        contracts, [&](const auto* contract) { return matches(pattern, *contract); });
    TESSERA_CHECK(any, ErrorKind::kContract, unmatched("optimizer.no_decay", in_quotes(pattern)),
                  "; correct it or leave it out");
  }
}

}  // namespace tessera::grad
