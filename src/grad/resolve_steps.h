// The steps of resolution: each sets some fields of a contract and the reasons of their values.
// resolve.cpp calls those of a parameter in order, then the others.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "grad/resolve_rules.h"
#include "tessera/model_contract.h"

namespace tessera::grad {

/// Promote, but a float8 payload is taken by any wider type.
DType widen_to(DType found, DType asked);

/// What a rule asks, else the policy; none where neither does.
std::optional<Setting<DType>> first_of(const std::optional<Setting<DType>>& rule,
                                       const std::optional<DType>& policy, const char* key);

/// How to change a setting: by the rule that made it, else by the key of the section.
std::string where_to_change(const std::string& reason, const char* key);

/// The compute dtype that the checkpoint records for a tensor that it stores as `own`.
std::optional<Setting<DType>> recorded(std::optional<DType> own, std::optional<DType> bulk,
                                       Intrinsic intrinsic);

/// By what a tensor is kept in float32, if it is: the last rule that says so, else the family.
struct Pins {
  const std::optional<std::string>& strict;
  const std::optional<std::string>& only_float16;
  const std::optional<std::string>& state;
};
inline const std::optional<std::string> kNoPin;
inline Pins pins_of(const ParameterMeta& meta) {
  return {meta.strict_pin, meta.pin16, meta.state_pin};
}
inline Pins pins_of(const BufferMeta& meta) { return {meta.strict_pin, meta.pin16, kNoPin}; }
std::optional<std::string> pinned_by(const Pins& pins, const Asked& asked,
                                     const PrecisionPolicy& policy);

/// resolve.cpp: resolve_model_contract, where rules may have patterns that match nothing but
/// tensors of units inside. `elsewhere`: the patterns that the rules of those have. Errors: as there.
ModelContract resolve_tensors(const std::vector<ParameterMeta>& parameters,
                              const std::vector<BufferMeta>& buffers,
                              const std::vector<UnitMeta>& units, const PrecisionPolicy& policy,
                              const DataAxes& data, const std::vector<std::string>& elsewhere);

/// resolve.cpp: all fields of one parameter. Errors: kContract.
GradContract resolve_parameter(const ParameterMeta& meta, const Asked& asked,
                               const PrecisionPolicy& policy, const DataAxes& data);
/// resolve.cpp: the contract of the same parameter when training or freezing it is asked for;
/// storage and compute stay. raw_sum_by_autograd is the caller's. Errors: kContract for parameters
/// that cannot be trained.
GradContract retrained(const GradContract& contract, const Setting<FrozenRule>& asked,
                       const PrecisionPolicy& policy);
/// Errors: kContract.
void resolve_storage(GradContract& contract, const ParameterMeta& meta, const Asked& asked,
                     const PrecisionPolicy& policy);
/// For parameters that are part of it. Errors: kContract for a rule that would
/// train the base or freeze an adapter.
void resolve_lora_trainable(GradContract& contract, const ParameterMeta& meta, const Asked& asked);
/// Errors: kContract for a pattern that matches adapters alone in a rule that asks of them what
/// they do not get: it would be without effect.
void check_lora_rules(const std::vector<PrecisionRule>& rules,
                      const std::vector<ParameterMeta>& parameters,
                      const std::vector<BufferMeta>& buffers);
/// After storage and compute.
void resolve_lora_base(GradContract& contract, const ParameterMeta& meta);
/// Instead of storage and compute.
void resolve_lora_adapter(GradContract& contract);
/// Master, final, state, decay. After storage.
void resolve_optimizer(GradContract& contract, const PrecisionPolicy& policy);
/// Whether a pattern matches a parameter's name or an alias.
bool matches(const std::string& pattern, const GradContract& contract);
/// Errors: kContract for a pattern of no_decay that matches no parameter. One that matches frozen
/// ones alone is without effect and no mistake: the same file freezes more of one model than of
/// another, and all of it beside adapters.
void check_no_decay(const std::vector<std::string>& patterns,
                    const std::vector<const GradContract*>& contracts);

/// Of a model. `parameters` decide which subtrees are frozen.
BufferContract resolve_buffer(const BufferMeta& meta, const Asked& asked,
                              const std::vector<GradContract>& parameters,
                              const PrecisionPolicy& policy);
/// Of a model. `parameters` are those that the unit's indices count.
UnitContract resolve_unit(const UnitMeta& unit, const std::vector<GradContract>& parameters,
                          const PrecisionPolicy& policy);

}  // namespace tessera::grad
