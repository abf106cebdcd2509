// JSON of what `tessera check` and `tessera gradients --diff` found. check/report.h and
// check/gradient_diff.h have the same as a person reads it. Next: check.cpp.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "check/gradient_diff.h"
#include "check/report.h"

namespace tessera::cli {

/// Values that are not known are null.
nlohmann::ordered_json json_of(const check::Report& report);
nlohmann::ordered_json json_of(const check::GradientDiff& diff);

}  // namespace tessera::cli
