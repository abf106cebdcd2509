// Chrome's trace-event JSON, which ui.perfetto.dev opens: one process a rank, one thread a row.
//
// Pure. Only complete events ("X") and names ("M") are used; times are microseconds from the
// origin. Source: the "Trace Event Format" document of the Chromium project.
#pragma once

#include <string>
#include <vector>

#include "base/trace.h"

namespace tessera {

/// The events of one rank, with commas between; what chrome_trace() puts together.
std::string chrome_events(std::vector<TraceSpan> spans, int rank, TraceClock::time_point origin);

/// The whole file of all ranks' events.
std::string chrome_trace(const std::vector<std::string>& events_by_rank);

}  // namespace tessera
