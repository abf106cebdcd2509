// A whole model: what must hold between its tensors, then each by itself (resolve_steps.h).
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
  grad::check_no_decay(model.parameters, policy.optimizer);
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
