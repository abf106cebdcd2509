// Resolves contracts: first one parameter, with a function for each field that sets the value and
// its reason; then a whole model, with what must hold between its tensors, its buffers and its
// units.
//
// The order matters only where one field is the default of another: trainable, storage, compute,
// reduce, accumulate, and last the optimizer's fields.
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>

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

/// Returns the compute dtype before pins are applied.
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

/// Returns the rest of a message that refuses float16 without a loss scaler.
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
  if (const auto pin = grad::pinned_by(grad::pins_of(meta), asked, policy)) {
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

/// Stores a replicated parameter in its compute dtype: it is not gathered, so that no gather casts
/// it.
void keep_whole(GradContract& contract) {
  if (!contract.replicated() || contract.storage == contract.compute) return;
  if (contract.storage.dtype != contract.compute.dtype) {
    contract.loaded_through = contract.storage.dtype;
  }
  std::string& reason = contract.reason(ContractField::kStorage);
  reason = concat("as compute: whole on every rank, cast once when it is loaded, from ",
                  to_string(contract.storage.dtype), " (", reason, ")");
  contract.compute.rounding = Rounding::kNearestEven;  // copies round in this way
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

/// Adds to the reason that autograd sums in the raw dtype. Gradients are added to the slot as they
/// arrive, but autograd adds those that meet in one node of the graph before. How often a forward
/// uses a parameter is not known before it has run.
void explain_raw_sums(GradContract& contract) {
  if (contract.raw_sum_by_autograd || contract.grad ||
      represents(contract.compute.dtype, contract.accumulate)) {
    return;
  }
  contract.reason(ContractField::kGrad) +=
      concat("; where one forward uses it more than once, the sum of the uses is autograd's, in ",
             to_string(contract.compute.dtype));
}

/// Sets all dtypes of integers and flags to storage: they are neither computed nor summed.
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

namespace tessera {
namespace {

using grad::Asked;

/// Checks that each name of parameters, aliases and buffers is unique.
class Names {
 public:
  void claim(const std::string& name, const std::string& by) {
    const auto [entry, is_new] = owner_.emplace(name, by);
    TESSERA_CHECK(is_new, ErrorKind::kContract, by, ": found the name ", name, " also for ",
                  entry->second, ", expected one tensor a name; rename one of them");
  }

 private:
  std::map<std::string, std::string> owner_;
};

void check_parameter(const ParameterMeta& meta) {
  (void)meta.numel();  // refuses invalid shapes
  TESSERA_CHECK(!meta.checkpoint || is_floating(*meta.checkpoint) == is_floating(meta.dtype),
                ErrorKind::kContract, meta.name, ": found ", to_string(*meta.checkpoint),
                " in the checkpoint, expected something like the model's ", to_string(meta.dtype),
                "; use the checkpoint's own model");
  for (const auto& [alias, dtype] : meta.stored_aliases) {
    TESSERA_CHECK(!meta.checkpoint || dtype == *meta.checkpoint, ErrorKind::kContract, alias,
                  ": found ", to_string(dtype), " in the checkpoint, expected ",
                  to_string(*meta.checkpoint), " as ", meta.name,
                  ", to which it is tied; use a checkpoint that stores both in one dtype, or ",
                  meta.name, " alone");
  }
}

void check_names(const std::vector<ParameterMeta>& parameters,
                 const std::vector<BufferMeta>& buffers) {
  Names names;
  for (const ParameterMeta& meta : parameters) {
    names.claim(meta.name, meta.name);
    for (const std::string& alias : meta.aliases) names.claim(alias, meta.name);
    check_parameter(meta);
  }
  for (const BufferMeta& meta : buffers) names.claim(meta.name, meta.name);
}

void check_reductions(const ReductionPlan& reductions) {
  TESSERA_CHECK(is_divisor(reductions.divide_factor), ErrorKind::kContract,
                "gradient division: found the factor ", reductions.divide_factor,
                ", expected one above 0 that float32 has; change the divide factor");
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

ModelContract resolve_model_contract(const std::vector<ParameterMeta>& parameters,
                                     const std::vector<BufferMeta>& buffers,
                                     const std::vector<UnitMeta>& units,
                                     const PrecisionPolicy& policy, const DataAxes& data) {
  return grad::resolve_tensors(parameters, buffers, units, policy, data, {});
}

ModelContract grad::resolve_tensors(const std::vector<ParameterMeta>& parameters,
                                    const std::vector<BufferMeta>& buffers,
                                    const std::vector<UnitMeta>& units,
                                    const PrecisionPolicy& policy, const DataAxes& data,
                                    const std::vector<std::string>& elsewhere) {
  grad::check_policy(policy);
  check_reductions(data.dense);
  check_names(parameters, buffers);
  grad::RuleBook rules(policy.rules);
  std::vector<Asked> asked;
  for (const ParameterMeta& meta : parameters) asked.push_back(rules.ask(meta.name, meta.aliases));
  std::vector<Asked> asked_of_buffers;
  for (const BufferMeta& meta : buffers) asked_of_buffers.push_back(rules.ask(meta.name));
  rules.check_all_matched(elsewhere);  // first: a misspelt pattern explains later errors
  grad::check_lora_rules(policy.rules, parameters, buffers);
  ModelContract model;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    model.parameters.push_back(grad::resolve_parameter(parameters[i], asked[i], policy, data));
  }
  if (policy.optimizer.no_decay) {
    std::vector<const GradContract*> resolved;
    for (const GradContract& contract : model.parameters) resolved.push_back(&contract);
    grad::check_no_decay(*policy.optimizer.no_decay, resolved);
  }
  // An adapter is trained, but changes nothing else of its layer: the layer's buffers have the
  // contracts that they have without it.
  std::vector<GradContract> parts;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].lora != LoraPart::kAdapter) parts.push_back(model.parameters[i]);
  }
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    model.buffers.push_back(grad::resolve_buffer(buffers[i], asked_of_buffers[i], parts, policy));
  }
  for (const UnitMeta& unit : units) {
    model.units.push_back(grad::resolve_unit(unit, model.parameters, policy));
  }
  return model;
}

std::vector<GradContract> resolve_contracts(const std::vector<ParameterMeta>& parameters,
                                            const PrecisionPolicy& policy, const DataAxes& data) {
  return resolve_model_contract(parameters, {}, {}, policy, data).parameters;
}

}  // namespace tessera

namespace tessera::grad {

// Buffers are neither sharded nor gathered, so that nothing casts them on the way into a forward: a
// float32 buffer in a part that computes in bfloat16 makes its results float32, silently. In frozen
// parts, whose buffers users do not expect to change, they are cast once after loading; in trained
// parts they stay.

namespace {

/// The names of RoPE tables in models. They are never cast, since positions need all digits.
constexpr std::array<std::string_view, 5> kTables = {"*inv_freq", "rotary_emb", "freqs_cis",
                                                     "cos_cached", "sin_cached"};

bool is_table(const BufferMeta& meta) {
  return meta.computed_table || std::any_of(kTables.begin(), kTables.end(), [&](auto pattern) {
           return matches_name(pattern, meta.name);
         });
}

/// Whether the module that has the buffer, or one around it up to the whole model, has parameters,
/// all of them frozen.
bool in_frozen_subtree(const std::string& name, const std::vector<GradContract>& parameters) {
  for (std::string_view prefix = name; !prefix.empty();) {
    prefix.remove_suffix(1);
    prefix = prefix.substr(0, prefix.rfind('.') + 1);  // empty: the whole model
    bool any = false;
    bool all_frozen = true;
    for (const GradContract& parameter : parameters) {
      if (!parameter.name.starts_with(prefix)) continue;
      any = true;
      all_frozen = all_frozen && !parameter.trainable;
    }
    if (any && all_frozen) return true;
  }
  return false;
}

Setting<DType> compute_of(const BufferMeta& meta, const Asked& asked,
                          const std::vector<GradContract>& parameters,
                          const PrecisionPolicy& policy, DType storage) {
  if (!is_floating(storage)) return {storage, "not floating: as storage"};
  if (is_table(meta)) return {storage, "a computed table: never cast"};
  if (const auto pin = pinned_by(pins_of(meta), asked, policy)) {
    return {widen_to(storage, DType::kFloat32), concat("pinned by ", *pin)};
  }
  if (asked.param_dtype) return *asked.param_dtype;
  if (meta.pin16) {
    return {storage, concat("as storage: in the family's list for float16 (", *meta.pin16, ")")};
  }
  if (!policy.param_dtype) return {storage, "as storage"};
  if (!in_frozen_subtree(meta.name, parameters)) {
    return {storage, "as storage: of a trained part, where buffers stay as they are"};
  }
  const auto record = recorded(meta.checkpoint, meta.checkpoint_bulk, policy.intrinsic);
  if (record && !represents(*policy.param_dtype, record->value)) {
    return {widen_to(*policy.param_dtype, record->value), record->reason};
  }
  return {*policy.param_dtype, "[precision] param_dtype, of a frozen part"};
}

}  // namespace

BufferContract resolve_buffer(const BufferMeta& meta, const Asked& asked,
                              const std::vector<GradContract>& parameters,
                              const PrecisionPolicy& policy) {
  BufferContract contract;
  contract.name = meta.name;
  contract.shape = meta.shape;
  contract.stored = meta.stored;
  contract.storage = meta.checkpoint.value_or(meta.dtype);
  contract.reason(BufferField::kStorage) =
      meta.checkpoint ? "as in the checkpoint" : "as the tensor is";
  const auto compute = compute_of(meta, asked, parameters, policy, contract.storage);
  contract.compute = compute.value;
  contract.reason(BufferField::kCompute) = compute.reason;
  return contract;
}

namespace {

/// Returns the number of elements of a unit's own floating parameters by compute dtype.
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

/// Whether all of the unit computes in a wider dtype than the policy's: its layers accept any
/// input, and a cast to the policy's dtype would only lose digits.
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

/// Layers return the dtype of their input, in any dtype of their weights. For a mixed unit inside
/// another one that is the policy's dtype, even where a rule makes most elements compute in
/// another.
void resolve_activation(UnitContract& contract, const PrecisionPolicy& policy,
                        const std::map<DType, std::int64_t>& elements) {
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
  } else if (contract.nested && policy.param_dtype && elements.contains(*policy.param_dtype) &&
             most->first != *policy.param_dtype) {
    contract.activation = policy.param_dtype;
    reason = "[precision] param_dtype, which some of its parameters compute in";
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
  resolve_activation(contract, policy, elements);
  return contract;
}

}  // namespace tessera::grad
