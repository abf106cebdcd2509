// Slots and messages of a schedule as a trace that ui.perfetto.dev opens, and what they cost as
// measured by one. Pure.
//
// One notation both ways (base/trace.h): in the row "slots" each slot under its name ("3F2",
// "(0F3;3B1)"), which holds its computing, not its wait for messages; in the row "messages" both
// ends of each message ("0SEND_F3", "1RECV_F3"), from the send and from the posted receive until the
// rank knows that it is through. What a message costs is the time from the later of the two, where
// the receiver stood waiting ("waited_ms"): who comes later only knows that it took no longer.
#pragma once

#include <string>
#include <string_view>

#include "pipeline/schedule.h"
#include "pipeline/simulate.h"

namespace tessera::pipeline {

/// One unit of cost is a millisecond.
std::string trace_of(const Schedule& schedule, const Simulated& simulated);

/// Means over all steps of a trace, in milliseconds; what it does not have in whole is added up
/// from its parts (B from I and W, a pair from F and B). `name` stands in messages. Errors: kFormat
/// where it is no trace, or has nothing of a slot that the schedule has.
Costs costs_from_trace(std::string_view text, std::string_view name, const Schedule& schedule);

}  // namespace tessera::pipeline
