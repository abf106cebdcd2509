// The lock of a contract: what a run agrees on as a text file that is kept beside the code.
//
// A first line, then each value of each parameter, buffer and unit on a line of its own, sorted, so that a
// diff of two locks shows what has changed and nothing else. The place of a parameter is said by the
// one before it. Reasons are left out: they change no number. Pure. Next: tessera/model_contract.h.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/model_contract.h"

namespace tessera::grad {

std::string contract_lock(const ModelContract& contract);

/// The lines in which `contract` differs from `lock`, sorted: "- ..." of the lock, "+ ..." of the
/// contract; empty: none. `file` is said in errors. Errors: kFormat naming the line of a text that is no
/// lock, as one that was edited by hand and is no longer sorted.
std::vector<std::string> differences_from_lock(const ModelContract& contract, std::string_view lock,
                                               std::string_view file);

}  // namespace tessera::grad
