// The lock of a contract: the values that a run agrees on, as a text file that is kept with the
// code.
//
// After a first line it has one line for each value of each parameter, buffer and unit, sorted, so
// that a diff of two locks shows exactly the changes. The position of a parameter is given by the
// name before it. Reasons are left out: they change no number. Pure. Next:
// tessera/model_contract.h.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/model_contract.h"

namespace tessera::grad {

std::string contract_lock(const ModelContract& contract);

/// Returns the lines in which `contract` differs from `lock`, sorted: "- ..." for lines of the
/// lock, "+ ..." for lines of the contract. `file`: the name in errors. Errors: kFormat naming the
/// line of a text that is no lock, also of one that was edited by hand and is no longer sorted.
std::vector<std::string> differences_from_lock(const ModelContract& contract, std::string_view lock,
                                               std::string_view file);

}  // namespace tessera::grad
