// A whole model: what must hold between its tensors, then each parameter by itself
// (resolve_steps.h), its buffers and its units.
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>

#include "grad/resolve_steps.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using grad::Asked;

/// Each name once, over parameters, aliases and buffers.
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
  (void)meta.numel();  // refuses shapes that cannot be
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
  grad::check_policy(policy);
  check_reductions(data.dense);
  check_names(parameters, buffers);
  grad::RuleBook rules(policy.rules);
  std::vector<Asked> asked;
  for (const ParameterMeta& meta : parameters) asked.push_back(rules.ask(meta.name, meta.aliases));
  std::vector<Asked> asked_of_buffers;
  for (const BufferMeta& meta : buffers) asked_of_buffers.push_back(rules.ask(meta.name));
  rules.check_all_matched();  // first: a misspelt pattern explains what else goes wrong
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
  // An adapter trains beside its layer and makes nothing else of it: the layer's buffers are those
  // of its frozen neighbours without one.
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

// Buffers are neither sharded nor gathered, so nothing casts them on the way into a forward: a
// float32 buffer in a part that computes in bfloat16 makes its results float32, silently. In frozen
// parts, where no user expects to find them changed or not, they are cast once after loading; in
// trained ones they stay.

namespace {

/// Rope's tables under the names that models give them: positions need their digits.
constexpr std::array<std::string_view, 5> kTables = {"*inv_freq", "rotary_emb", "freqs_cis",
                                                     "cos_cached", "sin_cached"};

bool is_table(const BufferMeta& meta) {
  return meta.computed_table || std::any_of(kTables.begin(), kTables.end(), [&](auto pattern) {
           return matches_name(pattern, meta.name);
         });
}

/// The module that has it, or one around that (the whole model is one), has parameters and all of
/// them are frozen.
bool in_frozen_subtree(const std::string& name, const std::vector<GradContract>& parameters) {
  for (std::string_view prefix = name; !prefix.empty();) {
    prefix.remove_suffix(1);
    prefix = prefix.substr(0, prefix.rfind('.') + 1);  // none: the whole model
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
  if (const auto pin = pinned_by({meta.strict_pin, meta.pin16}, asked, policy)) {
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
