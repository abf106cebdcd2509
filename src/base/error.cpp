#include "tessera/error.h"

#include <sstream>

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

namespace detail {
namespace {

/// Returns the path in the source tree: a unity build includes a source by
/// "../../src/comm/sum.cpp".
std::string_view source_path(std::string_view file) {
  const auto up = file.rfind("../");
  return up == std::string_view::npos ? file : file.substr(up + 3);
}

}  // namespace

void Part::write(std::ostream& out) const {
  if (write_ == nullptr) {
    out << static_cast<const char*>(value_);
  } else {
    write_(out, value_);
  }
}

std::string joined(std::initializer_list<Part> parts) {
  std::ostringstream out;
  for (const Part& part : parts) part.write(out);
  return out.str();
}

void fail_with(ErrorKind kind, std::initializer_list<Part> parts) {
  throw Error(kind, joined(parts));
}

void fail_invariant_with(const char* condition, std::string_view file, int line,
                         std::initializer_list<Part> parts) {
  throw Error(ErrorKind::kInternal, concat("internal error, please report: ", joined(parts), " (",
                                           condition, ", ", source_path(file), ":", line, ")"));
}

}  // namespace detail

}  // namespace tessera
