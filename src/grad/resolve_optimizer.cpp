#include <algorithm>

#include "grad/resolve_steps.h"
#include "tessera/error.h"

namespace tessera::grad {
namespace {

/// The name or alias rule of PrecisionRule::match.
bool matches(const std::string& pattern, const GradContract& contract) {
  return matches_name(pattern, contract.name) ||
         std::any_of(contract.aliases.begin(), contract.aliases.end(),
                     [&](const auto& alias) { return matches_name(pattern, alias); });
}

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

void check_no_decay(const std::vector<GradContract>& contracts, const OptimizerPrecision& asked) {
  if (!asked.no_decay) return;
  for (const std::string& pattern : *asked.no_decay) {
    const bool any = std::any_of(contracts.begin(), contracts.end(), [&](const auto& contract) {
      return contract.trainable && matches(pattern, contract);
    });
    TESSERA_CHECK(any, ErrorKind::kContract, "optimizer.no_decay: found the pattern \"", pattern,
                  "\" that matches no trainable parameter, expected one that does; correct it or"
                  " leave it out");
  }
}

}  // namespace tessera::grad
