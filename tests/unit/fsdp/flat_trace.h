// The trace that most tests of the order of collectives begin with.
#pragma once

#include <utility>
#include <vector>

#include "fsdp/agreed/order.h"

namespace tessera::fsdp {

/// The root (0) around units that run one after the other.
inline Trace flat(std::vector<UnitId> units) {
  Trace trace{std::move(units), {}, {}};
  for (std::size_t i = 1; i < trace.units.size(); ++i) trace.exits.push_back(i);
  if (!trace.units.empty()) trace.exits.push_back(0);
  trace.checkpoints.resize(trace.units.size());
  return trace;
}

}  // namespace tessera::fsdp
