#include "cli/exit_code.h"

#include <iostream>

#include "base/log.h"
#include "base/printable.h"
#include "tessera/error.h"
#include "train/report/found_problems.h"

namespace tessera::cli {

int exit_code(const std::exception& error, Phase phase) {
  if (dynamic_cast<const train::FoundProblems*>(&error) != nullptr) return kFoundProblems;
  const auto* known = dynamic_cast<const Error*>(&error);
  if (known == nullptr || phase == Phase::kStepping) return kFailed;
  switch (known->kind()) {
    case ErrorKind::kUsage:
    case ErrorKind::kConfig:
    case ErrorKind::kContract:
    case ErrorKind::kFormat:
    case ErrorKind::kIo:
      return kRefused;
    case ErrorKind::kComm:
    case ErrorKind::kNumeric:
    case ErrorKind::kInternal:
      return kFailed;
  }
  return kFailed;
}

int report(const std::exception& error, Phase phase) {
  const auto* known = dynamic_cast<const Error*>(&error);
  terminal_line::clear_of_any_process();
  std::cerr << "tessera: " << to_string(known == nullptr ? ErrorKind::kInternal : known->kind())
            << ": " << one_line(error.what()) << '\n';
  return exit_code(error, phase);
}

}  // namespace tessera::cli
