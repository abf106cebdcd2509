// Resolution of contracts: one function a field, each leaves the value and its reason.
//
// The order matters only where one field defaults to another: trainable, storage, compute, reduce,
// accumulate, and last what the optimizer keeps.
#include "grad/resolve_steps.h"
#include "layout/local_part.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using grad::Asked;
using grad::first_of;
using grad::is_arithmetic;
using grad::Setting;
using grad::where_to_change;
using grad::widen_to;

void check_trainable_dtype(const GradContract& contract, DType dtype) {
  TESSERA_CHECK(is_floating(dtype) || !contract.trainable, ErrorKind::kContract, contract.name,
                ": found a trainable parameter of ", to_string(dtype),
                ", expected a floating dtype; freeze it (frozen = true in a [[precision.rule]])");
}

void resolve_trainable(GradContract& contract, const ParameterMeta& meta, const Asked& asked) {
  const FrozenRule rule = asked.frozen ? asked.frozen->value : FrozenRule::kYes;
  contract.trainable = asked.frozen ? rule == FrozenRule::kNo : meta.trainable;
  contract.reason(ContractField::kTrainable) = asked.frozen ? asked.frozen->reason : "the model";
  if (meta.lora != LoraPart::kNone) grad::resolve_lora_trainable(contract, meta, asked);
  if (!contract.trainable) {
    contract.frozen_as = rule == FrozenRule::kShard       ? FrozenAs::kShard
                         : rule == FrozenRule::kReplicate ? FrozenAs::kReplicate
                                                          : meta.frozen_as;
  }
  check_trainable_dtype(contract, meta.dtype);
}

/// Before a pin is looked at.
Setting<DType> asked_compute(const ParameterMeta& meta, const Asked& asked,
                             const PrecisionPolicy& policy, DType storage) {
  const auto own = meta.published ? meta.published : meta.checkpoint;
  const auto record = grad::recorded(own, meta.checkpoint_bulk, policy.intrinsic);
  if (asked.param_dtype) {
    Setting<DType> setting = *asked.param_dtype;
    if (record && !represents(setting.value, record->value)) {
      setting.reason +=
          concat(", narrower than the ", to_string(record->value), " that the checkpoint records");
    }
    return setting;
  }
  if (!policy.param_dtype) return {storage, "as storage"};
  if (record && !represents(*policy.param_dtype, record->value)) {
    return {widen_to(*policy.param_dtype, record->value), record->reason};
  }
  return {*policy.param_dtype, "[precision] param_dtype"};
}

/// How a refusal of float16 without a loss scaler goes on.
std::string needs_scaler(const std::string& reason, const char* key) {
  return concat(
      ", expected float32 or bfloat16: without a loss scaler small gradients vanish; set "
      "PrecisionPolicy::loss_scaling and train with a GradScaler, or change ",
      where_to_change(reason, key));
}

void check_loss_scaling(const GradContract& contract, const PrecisionPolicy& policy) {
  const std::string& reason = contract.reason(ContractField::kCompute);
  TESSERA_CHECK(
      contract.compute.dtype != DType::kFloat16 || !contract.trainable || policy.loss_scaling,
      ErrorKind::kContract, contract.name, ": found the compute dtype float16 (", reason,
      ") of a trained parameter", needs_scaler(reason, "param_dtype"));
}

void resolve_compute(GradContract& contract, const ParameterMeta& meta, const Asked& asked,
                     const PrecisionPolicy& policy) {
  Setting<DType> compute = asked_compute(meta, asked, policy, contract.storage.dtype);
  if (const auto pin = grad::pinned_by({meta.strict_pin, meta.pin16}, asked, policy)) {
    compute.value = widen_to(compute.value, DType::kFloat32);
    if (compute.value == DType::kFloat32) compute.reason = concat("pinned by ", *pin);
  } else if (meta.pin16 && !asked.pin) {
    compute.reason += concat(
        "; the model family pins it under float16 only (_keep_in_fp32_modules: ", *meta.pin16, ")");
  }
  TESSERA_CHECK(is_arithmetic(compute.value), ErrorKind::kContract, meta.name,
                ": found the compute dtype ", to_string(compute.value), " (", compute.reason,
                "), expected float32, bfloat16, float16 or float64; set [precision] param_dtype");
  contract.compute.dtype = compute.value;
  contract.reason(ContractField::kCompute) = compute.reason;
  check_loss_scaling(contract, policy);
  if (policy.param_rounding == Rounding::kHalfAway && !contract.replicated() &&
      contract.storage.dtype == DType::kFloat32 && compute.value == DType::kBFloat16) {
    contract.compute.rounding = Rounding::kHalfAway;
    compute.reason += "; param_rounding: halves away from zero";
  }
  contract.reason(ContractField::kCompute) = compute.reason;
}

/// Nothing gathers it, so nothing would cast it on the way: it is kept as it computes.
void keep_whole(GradContract& contract) {
  if (!contract.replicated() || contract.storage == contract.compute) return;
  if (contract.storage.dtype != contract.compute.dtype) {
    contract.loaded_through = contract.storage.dtype;
  }
  std::string& reason = contract.reason(ContractField::kStorage);
  reason = concat("as compute: whole on every rank, cast once when it is loaded, from ",
                  to_string(contract.storage.dtype), " (", reason, ")");
  contract.compute.rounding = Rounding::kNearestEven;  // as copies round
  contract.storage = contract.compute;
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
  TESSERA_CHECK(setting->value != DType::kFloat16 || policy.loss_scaling, ErrorKind::kContract,
                contract.name, ": found the reduce dtype float16 (", setting->reason, ")",
                needs_scaler(setting->reason, "reduce_dtype"));
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
  const auto wider = grad::wider_accumulator(setting->value, contract.reduce);
  TESSERA_CHECK(!wider, ErrorKind::kContract, contract.name, ": found the accumulate dtype ",
                to_string(setting->value), " (", setting->reason, "), ", wider.value_or(""), " (",
                contract.reason(ContractField::kReduce), "); change ",
                where_to_change(setting->reason, "accumulate_dtype"), " or set reduce_dtype");
  contract.accumulate = setting->value;
  reason = setting->reason;
}

/// Gradients are added to the slot as they arrive; but what meets in one node of the graph autograd
/// has added before. How often a forward uses a parameter nobody knows before it has run.
void explain_raw_sums(GradContract& contract) {
  if (contract.raw_sum_by_autograd || contract.grad ||
      represents(contract.compute.dtype, contract.accumulate)) {
    return;
  }
  contract.reason(ContractField::kGrad) +=
      concat("; where one forward uses it more than once, the sum of the uses is autograd's, in ",
             to_string(contract.compute.dtype));
}

/// Integers and flags are carried as they are; there is nothing to compute or to sum.
void mirror_storage(GradContract& contract) {
  const DType dtype = contract.storage.dtype;
  contract.compute.dtype = dtype;
  contract.accumulate = contract.reduce = contract.final = contract.state = dtype;
  contract.master = Master::kNone;
  for (const ContractField field :
       {ContractField::kCompute, ContractField::kGrad, ContractField::kAccumulate,
        ContractField::kReduce, ContractField::kFinal, ContractField::kMaster,
        ContractField::kState, ContractField::kDecay}) {
    contract.reason(field) = "not floating: as storage";
  }
}

}  // namespace

namespace grad {

GradContract resolve_parameter(const ParameterMeta& meta, const Asked& asked,
                               const PrecisionPolicy& policy, const DataAxes& data) {
  GradContract contract;
  contract.name = meta.name;
  contract.shape = meta.shape;
  contract.aliases = meta.aliases;
  layout::validate(meta.layout, meta.shape, meta.name);
  contract.layout = meta.layout;
  contract.reductions = reductions_of(meta.layout, data, meta.name);
  resolve_trainable(contract, meta, asked);
  if (meta.lora == LoraPart::kAdapter) {
    resolve_lora_adapter(contract);
  } else {
    resolve_storage(contract, meta, asked, policy);
    if (!is_floating(contract.storage.dtype)) {
      mirror_storage(contract);
      return contract;
    }
    resolve_compute(contract, meta, asked, policy);
    if (meta.lora == LoraPart::kBase) resolve_lora_base(contract, meta);
  }
  keep_whole(contract);
  resolve_grad(contract, meta, asked);
  resolve_reduce(contract, asked, policy);
  resolve_accumulate(contract, asked, policy);
  explain_raw_sums(contract);
  resolve_optimizer(contract, policy);
  return contract;
}

GradContract retrained(const GradContract& contract, const Setting<FrozenRule>& asked,
                       const PrecisionPolicy& policy) {
  GradContract next = contract;
  next.trainable = asked.value == FrozenRule::kNo;
  if (!next.trainable) {
    next.frozen_as =
        asked.value == FrozenRule::kReplicate ? FrozenAs::kReplicate : FrozenAs::kShard;
  }
  next.reason(ContractField::kTrainable) = concat("set_trainable, ", asked.reason);
  check_trainable_dtype(next, next.storage.dtype);
  if (!is_floating(next.storage.dtype)) return next;
  check_loss_scaling(next, policy);
  if (!next.replicated()) next.loaded_through.reset();
  keep_whole(next);
  resolve_optimizer(next, policy);
  return next;
}

}  // namespace grad

}  // namespace tessera
