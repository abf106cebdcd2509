// Resolution of contracts: one function a field, each leaves the value and its reason.
//
// The order matters only where one field defaults to another: storage, compute, reduce, accumulate.
#include <cmath>
#include <map>
#include <set>

#include "grad/resolve_rules.h"
#include "tessera/contract.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using grad::Asked;
using grad::is_arithmetic;
using grad::Setting;

/// The common type of what is there and what is asked for. Unlike promote() it also knows that any
/// wider type takes a float8 payload.
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

/// How to change a setting: by the rule that made it, else by the key of the section.
std::string where_to_change(const std::string& reason, const char* key) {
  return reason.rfind("rule ", 0) == 0 ? concat(key, " of ", reason) : concat("[precision] ", key);
}

/// The compute dtype that the checkpoint records: of floating tensors stored wider than the bulk.
std::optional<DType> recorded(const ParameterMeta& meta) {
  if (!meta.checkpoint || !meta.checkpoint_bulk) return std::nullopt;
  const DType own = meta.published.value_or(*meta.checkpoint);
  const DType bulk = *meta.checkpoint_bulk;
  if (!is_arithmetic(own) || !is_floating(bulk) || own == bulk) return std::nullopt;
  if (!represents(own, bulk)) return std::nullopt;
  return own;
}

std::optional<std::string> pinned_by(const ParameterMeta& meta, const Asked& asked) {
  if (asked.pin) {
    if (!asked.pin->value) return std::nullopt;
    return asked.pin->reason;
  }
  if (meta.model_pin) return "the model";
  return std::nullopt;
}

void resolve_trainable(GradContract& contract, const ParameterMeta& meta, const Asked& asked) {
  contract.trainable = asked.frozen ? !asked.frozen->value : meta.trainable;
  contract.reason(ContractField::kTrainable) = asked.frozen ? asked.frozen->reason : "the model";
  TESSERA_CHECK(is_floating(meta.dtype) || !contract.trainable, ErrorKind::kContract, meta.name,
                ": found a trainable parameter of ", to_string(meta.dtype),
                ", expected a floating dtype; freeze it (frozen = true in a [[precision.rule]])");
}

/// A pin is worth little when the shard is kept lower than what it computes in: bits that the file
/// has lost do not come back. Only a `widen` (or a request for fp32 storage) says that this is
/// understood.
void pin_storage(GradContract& contract, const ParameterMeta& meta, const Asked& asked) {
  const std::optional<std::string> pin = pinned_by(meta, asked);
  const DType storage = contract.storage.dtype;
  if (!pin || represents(storage, DType::kFloat32)) return;
  if (asked.widen && asked.widen->value) {
    contract.storage.dtype = DType::kFloat32;
    contract.reason(ContractField::kStorage) =
        concat(to_string(storage), " widened by ", asked.widen->reason);
    return;
  }
  TESSERA_CHECK(!meta.checkpoint, ErrorKind::kContract, meta.name, ": found ", to_string(storage),
                " in the checkpoint, pinned to float32 by ", *pin,
                ", expected float32 or wider: its lost bits do not come back; add widen = true (or"
                " pin = false) in a [[precision.rule]] for it, or set [precision] storage_dtype ="
                " \"float32\"");
}

void resolve_storage(GradContract& contract, const ParameterMeta& meta, const Asked& asked,
                     const PrecisionPolicy& policy) {
  const DType found = meta.checkpoint.value_or(meta.dtype);
  const std::string as_found = meta.checkpoint ? "as in the checkpoint"
                               : meta.drawn    ? "as config.json says"
                                               : "as the tensor is";
  contract.storage.dtype = found;
  contract.reason(ContractField::kStorage) = as_found;
  if (!is_floating(found)) return;
  if (const auto setting = first_of(asked.storage_dtype, policy.storage_dtype, "storage_dtype")) {
    const DType merged = meta.drawn ? setting->value : widen_to(found, setting->value);
    contract.storage.dtype = merged;
    contract.reason(ContractField::kStorage) =
        merged == setting->value ? setting->reason
                                 : concat(as_found, ", not as narrow as ", setting->reason,
                                          " asks (", to_string(setting->value), ")");
  }
  pin_storage(contract, meta, asked);
  TESSERA_CHECK(!contract.trainable || is_arithmetic(contract.storage.dtype), ErrorKind::kContract,
                meta.name, ": found a trainable parameter stored as ",
                to_string(contract.storage.dtype),
                ", expected a dtype that an optimizer can step; set [precision] storage_dtype, or"
                " freeze it (frozen = true in a [[precision.rule]])");
}

/// Before a pin is looked at.
Setting<DType> asked_compute(const ParameterMeta& meta, const Asked& asked,
                             const PrecisionPolicy& policy, DType storage) {
  const std::optional<DType> record = recorded(meta);
  if (asked.param_dtype) {
    Setting<DType> setting = *asked.param_dtype;
    if (record && !represents(setting.value, *record)) {
      setting.reason +=
          concat(", narrower than the ", to_string(*record), " that the checkpoint records");
    }
    return setting;
  }
  if (!policy.param_dtype) return {storage, "as storage"};
  if (record && !represents(*policy.param_dtype, *record)) {
    return {widen_to(*policy.param_dtype, *record),
            concat("recorded by the checkpoint (", to_string(*record), ", most of it ",
                   to_string(*meta.checkpoint_bulk), ")")};
  }
  return {*policy.param_dtype, "[precision] param_dtype"};
}

void resolve_compute(GradContract& contract, const ParameterMeta& meta, const Asked& asked,
                     const PrecisionPolicy& policy) {
  Setting<DType> compute = asked_compute(meta, asked, policy, contract.storage.dtype);
  if (const std::optional<std::string> pin = pinned_by(meta, asked)) {
    compute.value = widen_to(compute.value, DType::kFloat32);
    if (compute.value == DType::kFloat32) compute.reason = concat("pinned by ", *pin);
  }
  TESSERA_CHECK(is_arithmetic(compute.value), ErrorKind::kContract, meta.name,
                ": found the compute dtype ", to_string(compute.value), " (", compute.reason,
                "), expected float32, bfloat16, float16 or float64; set [precision] param_dtype");
  contract.compute.dtype = compute.value;
  contract.reason(ContractField::kCompute) = compute.reason;
}

void resolve_grad(GradContract& contract, const ParameterMeta& meta, const Asked& asked) {
  std::string& reason = contract.reason(ContractField::kGrad);
  if (asked.grad_dtype) {
    contract.grad = asked.grad_dtype->value;
    reason = asked.grad_dtype->reason;
  } else if (meta.user_grad_dtype) {
    TESSERA_CHECK(is_arithmetic(*meta.user_grad_dtype), ErrorKind::kContract, meta.name,
                  ": found the leaf's grad_dtype ", to_string(*meta.user_grad_dtype),
                  ", expected float32, bfloat16, float16 or float64; change it before sharding");
    contract.grad = meta.user_grad_dtype;
    reason = "the leaf's grad_dtype";
  } else {
    reason = "nothing asks for rounding on arrival";
  }
  contract.raw_sum_by_autograd =
      contract.trainable && meta.single_tensor_aliases && !meta.aliases.empty();
  if (contract.raw_sum_by_autograd) {
    reason += "; several uses in one backward arrive summed raw by autograd";
  }
}

void resolve_reduce(GradContract& contract, const Asked& asked, const PrecisionPolicy& policy) {
  const DType compute = contract.compute.dtype;
  std::string& reason = contract.reason(ContractField::kReduce);
  const auto setting = first_of(asked.reduce_dtype, policy.reduce_dtype, "reduce_dtype");
  if (!setting) {
    contract.reduce = promote(compute, DType::kFloat32);
    reason = "compute, at least float32";
    return;
  }
  TESSERA_CHECK(setting->value != DType::kFloat16, ErrorKind::kContract, contract.name,
                ": found the reduce dtype float16 (", setting->reason,
                "), expected float32 or bfloat16: without a loss scaler small gradients vanish;"
                " change ",
                where_to_change(setting->reason, "reduce_dtype"));
  contract.reduce = setting->value;
  reason = setting->reason;
  if (!represents(setting->value, compute)) {
    reason += concat(", narrower than compute (", to_string(compute), ")");
  }
}

void resolve_accumulate(GradContract& contract, const Asked& asked, const PrecisionPolicy& policy) {
  std::string& reason = contract.reason(ContractField::kAccumulate);
  const auto setting =
      first_of(asked.accumulate_dtype, policy.accumulate_dtype, "accumulate_dtype");
  if (!setting) {
    const bool twice = contract.compute.dtype == DType::kFloat64;
    const DType least = twice ? DType::kFloat64 : DType::kFloat32;
    contract.accumulate = promote(least, contract.reduce);
    reason = contract.accumulate != least ? "as reduce, the wider one"
             : twice                      ? "float64 where compute is float64"
                                          : "float32 unless asked otherwise";
    return;
  }
  TESSERA_CHECK(represents(setting->value, contract.reduce), ErrorKind::kContract, contract.name,
                ": found the accumulate dtype ", to_string(setting->value), " (", setting->reason,
                "), expected ", to_string(contract.reduce), " or wider, the reduce dtype (",
                contract.reason(ContractField::kReduce), "); change ",
                where_to_change(setting->reason, "accumulate_dtype"), " or set reduce_dtype");
  contract.accumulate = setting->value;
  reason = setting->reason;
}

void resolve_final(GradContract& contract, const PrecisionPolicy& policy) {
  contract.final = policy.final_dtype.value_or(contract.storage.dtype);
  contract.reason(ContractField::kFinal) =
      policy.final_dtype ? "[precision] final_dtype" : "as storage";
}

/// Integers and flags are carried as they are; there is nothing to compute or to sum.
void mirror_storage(GradContract& contract) {
  const DType dtype = contract.storage.dtype;
  contract.compute.dtype = dtype;
  contract.accumulate = contract.reduce = contract.final = dtype;
  for (const ContractField field :
       {ContractField::kCompute, ContractField::kGrad, ContractField::kAccumulate,
        ContractField::kReduce, ContractField::kFinal}) {
    contract.reason(field) = "not floating: as storage";
  }
}

GradContract resolve_one(const ParameterMeta& meta, const Asked& asked,
                         const PrecisionPolicy& policy, const ReductionPlan& reductions) {
  GradContract contract;
  contract.name = meta.name;
  contract.shape = meta.shape;
  contract.aliases = meta.aliases;
  contract.reductions = reductions;
  resolve_trainable(contract, meta, asked);
  resolve_storage(contract, meta, asked, policy);
  if (!is_floating(contract.storage.dtype)) {
    mirror_storage(contract);
    return contract;
  }
  resolve_compute(contract, meta, asked, policy);
  resolve_grad(contract, meta, asked);
  resolve_reduce(contract, asked, policy);
  resolve_accumulate(contract, asked, policy);
  resolve_final(contract, policy);
  return contract;
}

void check_parameters(const std::vector<ParameterMeta>& parameters) {
  std::map<std::string, std::string> owner;
  const auto claim = [&](const std::string& name, const std::string& by) {
    const auto [entry, is_new] = owner.emplace(name, by);
    TESSERA_CHECK(is_new, ErrorKind::kContract, by, ": found the name ", name, " also for ",
                  entry->second, ", expected one parameter a name; rename one of them");
  };
  for (const ParameterMeta& meta : parameters) {
    claim(meta.name, meta.name);
    for (const std::string& alias : meta.aliases) claim(alias, meta.name);
    (void)meta.numel();  // refuses shapes that cannot be
    TESSERA_CHECK(!meta.checkpoint || is_floating(*meta.checkpoint) == is_floating(meta.dtype),
                  ErrorKind::kContract, meta.name, ": found ", to_string(*meta.checkpoint),
                  " in the checkpoint, expected something like the model's ", to_string(meta.dtype),
                  "; use the checkpoint's own model");
  }
}

void check_reductions(const ReductionPlan& reductions) {
  TESSERA_CHECK(std::isfinite(reductions.divide_factor) && reductions.divide_factor > 0,
                ErrorKind::kContract, "gradient division: found the factor ",
                reductions.divide_factor, ", expected one above 0; change the divide factor");
  std::set<std::string> axes;
  for (const auto* group : {&reductions.shard_axes, &reductions.replica_axes}) {
    for (const std::string& axis : *group) {
      TESSERA_CHECK(
          axes.insert(axis).second, ErrorKind::kContract, "reductions: found axis ", axis,
          " twice, expected each once: its sum would be taken twice; change the mesh axes");
    }
  }
}

}  // namespace

std::vector<GradContract> resolve_contracts(const std::vector<ParameterMeta>& parameters,
                                            const PrecisionPolicy& policy,
                                            const ReductionPlan& reductions) {
  grad::check_policy(policy);
  check_reductions(reductions);
  check_parameters(parameters);
  grad::RuleBook rules(policy.rules);
  std::vector<Asked> asked;
  for (const ParameterMeta& meta : parameters) asked.push_back(rules.ask(meta));
  rules.check_all_matched(parameters);  // first: a misspelt pattern explains what else goes wrong
  std::vector<GradContract> contracts;
  for (std::size_t index = 0; index < parameters.size(); ++index) {
    contracts.push_back(resolve_one(parameters[index], asked[index], policy, reductions));
  }
  return contracts;
}

}  // namespace tessera
