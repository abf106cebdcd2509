// What a verb prints on stdout, looked at: output that goes nowhere (a full disk, a closed
// descriptor) is not told from output that arrives. Pure.
#pragma once

#include "tessera/error.h"

namespace tessera::cli {

/// A failure (exit code 1) at any time: nothing that was asked for is wrong.
class OutputLost : public Error {
 public:
  using Error::Error;
};

/// Writes out what std::cout holds. Errors: OutputLost (kIo) where that, or anything before,
/// could not be written.
void check_standard_output();

/// Lets writing to a stdout that the program was started without (>&-) fail. Before any file is
/// opened: that would take its place, and what is printed would go into it.
void keep_standard_descriptors();

}  // namespace tessera::cli
