#include "grad/resolve_steps.h"
#include "tessera/error.h"

namespace tessera::grad {
namespace {

/// A pin is worth little when the shard is kept lower than what it computes in: bits that the file
/// has lost do not come back. Only a `widen` (or a request for fp32 storage) says that this is
/// understood.
void pin_storage(GradContract& contract, const ParameterMeta& meta, const Asked& asked,
                 const PrecisionPolicy& policy) {
  const auto pin = pinned_by({meta.strict_pin, meta.pin16}, asked, policy);
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

/// A request that cannot hold every value of what is there.
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
  const auto pin = pinned_by({meta.strict_pin, meta.pin16}, asked, policy);
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

}  // namespace tessera::grad
