// JSON of what `tessera check` found. check/report.h has the same as a person reads it. Next: check.cpp.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "check/report.h"

namespace tessera::cli {

/// What is not known is null.
nlohmann::ordered_json json_of(const check::Report& report);

}  // namespace tessera::cli
