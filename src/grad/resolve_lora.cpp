// What [lora] decides: a frozen base in its compute dtype, adapters in float32.
#include "grad/resolve_steps.h"
#include "tessera/error.h"

namespace tessera::grad {
namespace {

constexpr const char* kBaseReason = "[lora] base";
constexpr const char* kAdapterReason = "[lora] adapter";

}  // namespace

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
