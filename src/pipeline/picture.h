// Draws a simulated schedule as SVG, a row a rank, time to the right. Pure.
#pragma once

#include <string>

#include "pipeline/schedule.h"
#include "pipeline/simulate.h"

namespace tessera::pipeline {

/// Boxes bear their micro-batch and the colour of their action, later stages of a rank a darker
/// one; a pair is an F above its B. Titles (what a viewer shows under the pointer) have slot and
/// times.
std::string to_svg(const Schedule& schedule, const Simulated& simulated);

}  // namespace tessera::pipeline
