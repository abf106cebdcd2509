// Writes slots and messages of a schedule as a trace that ui.perfetto.dev opens, and reads costs
// from a measured one. Pure.
//
// Both directions use one notation (base/trace.h): in the row "slots" each slot under its name
// ("3F2", "(0F3;3B1)"), which covers its computation, not its wait for messages; in the row
// "messages" both ends of each message ("0SEND_F3", "1RECV_F3"), from the send and from the posted
// receive until the rank knows that it has ended. A message costs the time from the later of the
// two, where the receiver waited ("waited_ms"); a receiver that comes later only knows that it took
// no longer.
#pragma once

#include <string>
#include <string_view>

#include "pipeline/schedule.h"
#include "pipeline/simulate.h"

namespace tessera::pipeline {

/// One unit of cost is a millisecond.
std::string trace_of(const Schedule& schedule, const Simulated& simulated);

/// Returns means over all steps of a trace, in milliseconds; a cost that is not measured as a whole
/// is the sum of its parts (B of I and W, a pair of F and B). Messages contain `name`. Errors:
/// kFormat where it is no trace, or has no measurement of a slot that the schedule has.
Costs costs_from_trace(std::string_view text, std::string_view name, const Schedule& schedule);

}  // namespace tessera::pipeline
