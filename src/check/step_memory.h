// Memory over a step: what a rank holds from pass to pass, on top of what is always held.
//
// Pure. Next: pictures.h, which has the other pictures of a page.
#pragma once

#include <string>

#include "check/report.h"

namespace tessera::check {

/// A figure a place with one scale for all, and a table of passes each; empty where no pass is
/// known.
std::string step_memory(const Report& report);

}  // namespace tessera::check
