// JSON of what `tessera check` and `tessera gradients --diff` found. check/report.h and
// check/gradient_diff.h have the same as a person reads it. Next: check.cpp.
#pragma once

#include <string>

#include "check/gradient_diff.h"
#include "check/report.h"

namespace tessera::cli {

/// Returns JSON as it is printed, with the end of its last line. Values that are not known are
/// null.
std::string json_text(const check::Report& report);
std::string json_text(const check::GradientDiff& diff);

}  // namespace tessera::cli
