// The lock of a contract: the values that a run agrees on, as a text file that is kept with the
// code.
//
// After a first line it has one line for each value of each parameter, buffer and unit, sorted, so
// that a diff of two locks shows exactly the changes; and where rows are cut for context
// parallelism the lines of how ("context rows parts 4"). The position of a parameter is given by
// the name before it. Reasons are left out: they change no number. Pure. Next:
// tessera/model_contract.h, ../train/context_of_run.h.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/model_contract.h"

namespace tessera::grad {

/// `context`: the lines of how rows are cut, in any order.
std::string contract_lock(const ModelContract& contract,
                          const std::vector<std::string>& context = {});

/// Returns the lines in which `contract` and `context` differ from `lock`, sorted: "- ..." for
/// lines of the lock, "+ ..." for others. `file`: the name in errors. Errors: kFormat naming the
/// line of a text that is no lock, also of one that was edited by hand and is no longer sorted.
std::vector<std::string> differences_from_lock(const ModelContract& contract, std::string_view lock,
                                               std::string_view file,
                                               const std::vector<std::string>& context = {});

}  // namespace tessera::grad
