// Errors of the library: one exception type with a kind, and the two checks that throw it.
//
// A message reads "what: found X, expected Y (parameter p, axis a, rank r); do Z". TESSERA_CHECK is
// for what a user can cause, TESSERA_INVARIANT for mistakes of our own (it throws kInternal).
// Next: dtype.h.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace tessera {

enum class ErrorKind {
  kUsage,     ///< wrong command line or wrong call of the library
  kConfig,    ///< a config key or value
  kContract,  ///< a dtype or placement that breaks a parameter's contract
  kFormat,    ///< a malformed file
  kIo,        ///< reading or writing failed
  kComm,      ///< a lost or stalled rank, ranks that disagree
  kNumeric,   ///< a loss or gradient that is not finite
  kInternal,  ///< a bug in Tessera
};

/// "usage", "config", ... as printed in front of messages.
std::string_view to_string(ErrorKind kind);

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

/// All arguments streamed one after the other.
template <class... Args>
std::string concat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

/// A source's path within the tree: a unity build includes it by "../../src/comm/sum.cpp".
constexpr std::string_view source_path(std::string_view file) {
  const auto up = file.rfind("../");
  return up == std::string_view::npos ? file : file.substr(up + 3);
}

}  // namespace tessera

/// TESSERA_CHECK(condition, ErrorKind::kX, parts of the message...)
#define TESSERA_CHECK(condition, kind, ...)                           \
  do {                                                                \
    if (!(condition)) [[unlikely]]                                    \
      throw ::tessera::Error((kind), ::tessera::concat(__VA_ARGS__)); \
  } while (false)

/// TESSERA_INVARIANT(condition, parts of the message...)
#define TESSERA_INVARIANT(condition, ...)                                                         \
  do {                                                                                            \
    if (!(condition)) [[unlikely]]                                                                \
      throw ::tessera::Error(                                                                     \
          ::tessera::ErrorKind::kInternal,                                                        \
          ::tessera::concat("internal error, please report: ", __VA_ARGS__, " (" #condition ", ", \
                            ::tessera::source_path(__FILE__), ":", __LINE__, ")"));               \
  } while (false)
