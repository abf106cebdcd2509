// What an exception says, as the one line that a report has room for.
//
// libtorch's errors carry the stack of the place that threw, and sometimes several lines of
// explanation. A rank's report stands beside those of other ranks and travels through a store's
// key, so it is one line.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

/// `what` without a stack trace of libtorch's, its lines joined by single spaces.
std::string one_line(std::string_view what);

}  // namespace tessera
