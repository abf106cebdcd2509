// What one rank finds, all ranks find: the same error everywhere instead of a rank that leaves and
// others that wait for it.
#pragma once

#include <functional>
#include <string>

#include "tessera/world.h"

namespace tessera::comm {

/// Runs `action` on this rank. Where it throws on any rank, every rank throws the error of the
/// first of them; kinds are kept. Collective, on the control group.
void on_all_or_none(World& world, const std::string& what, const std::function<void()>& action);

/// Rank 0's text on every rank. Collective.
std::string from_first_rank(World& world, const std::string& what, const std::string& text);

}  // namespace tessera::comm
