#include "capture/replay/comparison.h"

#include <algorithm>

#include "tessera/error.h"

namespace tessera::capture {
namespace {

bool is_for(const TapeGradient& handed, const TapeGradient& came) {
  return handed.sink == came.sink && handed.slot == came.slot;
}

}  // namespace

void Comparison::look_at(std::size_t step) {
  if (!difference_.empty()) return;
  const auto& replayed = replay_.program().steps[step];
  if (!replayed.call) return look_at_gradient(replayed.gradient, step);
  for (const auto& [value, bits] : eager_.kept()[step]) {
    if (bits_of(replay_.value(value)) != bits) {
      return differs(name_of(eager_.steps()[step].call->operation));
    }
  }
  // A replay passes it here where its slot is shared: the value that was compared.
  const auto& call = *replayed.call;
  if (call.direct && step >= eager_.forward_steps()) {
    const auto& came = eager_.steps()[call.gradient_step].gradient;
    if (!is_for(*call.direct, came) || call.direct->raw != came.raw) differs(name_of(came));
  }
}

/// Compares what the program passes to a sink, and to which, with what came to the sink in that
/// step.
void Comparison::look_at_gradient(const TapeGradient& handed, std::size_t step) {
  const auto& came = eager_.steps()[step].gradient;
  const auto is_same = [&](const Tape::Seen& seen) {
    return bits_of(replay_.value(handed.raw)) == seen.bits;
  };
  const bool is_alike = is_for(handed, came) && (handed.raw == kNone) == (came.raw == kNone);
  if (!is_alike || !std::ranges::all_of(eager_.kept()[step], is_same)) differs(name_of(came));
}

void Comparison::differs(const std::string& what) {
  difference_ = concat(what, ": found other values than eager ones");
}

}  // namespace tessera::capture
