#include "tessera/error.h"

namespace tessera {

std::string_view to_string(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kUsage:
      return "usage";
    case ErrorKind::kConfig:
      return "config";
    case ErrorKind::kContract:
      return "contract";
    case ErrorKind::kFormat:
      return "format";
    case ErrorKind::kIo:
      return "io";
    case ErrorKind::kComm:
      return "comm";
    case ErrorKind::kNumeric:
      return "numeric";
    case ErrorKind::kInternal:
      return "internal";
  }
  return "unknown";
}

}  // namespace tessera
