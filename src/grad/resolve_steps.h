// The steps of resolution: each sets some fields of a contract and the reasons of their values.
// resolve.cpp calls those of a parameter in order, then the others.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "grad/resolve_rules.h"
#include "tessera/model_contract.h"

namespace tessera::grad {

/// Promotes `found` to `asked`. Any wider type replaces a float8 payload.
DType widen_to(DType found, DType asked);

/// Returns the setting of a rule, else of the policy; none where neither has one.
std::optional<Setting<DType>> first_of(const std::optional<Setting<DType>>& rule,
                                       const std::optional<DType>& policy, const char* key);

/// Returns where a setting can be changed: in the rule that made it, else at the key of the
/// section.
std::string where_to_change(const std::string& reason, const char* key);

/// Returns the compute dtype that the checkpoint records for a tensor that it stores as `own`.
std::optional<Setting<DType>> recorded(std::optional<DType> own, std::optional<DType> bulk,
                                       Intrinsic intrinsic);

/// The reasons of the family to keep a tensor in float32. pinned_by() returns the last rule that
/// pins it, else one of these.
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

/// Does what resolve_model_contract does (resolve.cpp), where rules may also have patterns that
/// match tensors of inner units alone. `elsewhere`: the patterns of their rules. Errors: as there.
ModelContract resolve_tensors(const std::vector<ParameterMeta>& parameters,
                              const std::vector<BufferMeta>& buffers,
                              const std::vector<UnitMeta>& units, const PrecisionPolicy& policy,
                              const DataAxes& data, const std::vector<std::string>& elsewhere);

/// Resolves all fields of one parameter (resolve.cpp). Errors: kContract.
GradContract resolve_parameter(const ParameterMeta& meta, const Asked& asked,
                               const PrecisionPolicy& policy, const DataAxes& data);
/// Returns the contract of the same parameter when training or freezing it is asked for
/// (resolve.cpp); storage and compute stay. The caller sets raw_sum_by_autograd. Errors: kContract
/// for parameters that cannot be trained.
GradContract retrained(const GradContract& contract, const Setting<FrozenRule>& asked,
                       const PrecisionPolicy& policy);
/// Errors: kContract.
void resolve_storage(GradContract& contract, const ParameterMeta& meta, const Asked& asked,
                     const PrecisionPolicy& policy);
/// Resolves whether a parameter of a LoRA layer is trained. Errors: kContract for a rule that would
/// train the base or freeze an adapter.
void resolve_lora_trainable(GradContract& contract, const ParameterMeta& meta, const Asked& asked);
/// Errors: kContract for a pattern that matches adapters alone in a rule that asks for settings
/// which adapters do not get: it would have no effect.
void check_lora_rules(const std::vector<PrecisionRule>& rules,
                      const std::vector<ParameterMeta>& parameters,
                      const std::vector<BufferMeta>& buffers);
/// Must be called after storage and compute are resolved.
void resolve_lora_base(GradContract& contract, const ParameterMeta& meta);
/// Replaces the steps for storage and compute.
void resolve_lora_adapter(GradContract& contract);
/// Resolves master, final, state and decay. Must be called after storage is resolved.
void resolve_optimizer(GradContract& contract, const PrecisionPolicy& policy);
/// Whether a pattern matches a parameter's name or an alias.
bool matches(const std::string& pattern, const GradContract& contract);
/// Errors: kContract for a pattern of no_decay that matches no parameter. A pattern that matches
/// frozen parameters alone has no effect and is no mistake: one file freezes more of one model than
/// of another, and with adapters the whole model.
void check_no_decay(const std::vector<std::string>& patterns,
                    const std::vector<const GradContract*>& contracts);

/// Resolves a buffer of a model, whose `parameters` decide which subtrees are frozen.
BufferContract resolve_buffer(const BufferMeta& meta, const Asked& asked,
                              const std::vector<GradContract>& parameters,
                              const PrecisionPolicy& policy);
/// Resolves a unit of a model. The unit's indices count `parameters`.
UnitContract resolve_unit(const UnitMeta& unit, const std::vector<GradContract>& parameters,
                          const PrecisionPolicy& policy);

}  // namespace tessera::grad
