// Errors of the library: one exception type with a kind, and the two checks that throw it.
//
// A message reads "what: found X, expected Y (parameter p, axis a, rank r); do Z". TESSERA_CHECK
// tests conditions that a user can break, TESSERA_INVARIANT those that only a bug in Tessera
// breaks. Next: dtype.h.
#pragma once

#include <initializer_list>
#include <ostream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace tessera {

/// The kind of an error, for a program that handles errors by kind.
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

/// Returns "usage", "config", ... as printed in front of messages.
std::string_view to_string(ErrorKind kind);

/// The exception that every call of the library throws; what() has the message.
class Error : public std::runtime_error {
 public:
  /// Makes an error; programs throw it by TESSERA_CHECK.
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  /// Returns the kind.
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

namespace detail {

/// A part of a message, of any type that streams: points to it only. Messages are put together out
/// of line, so that what compiles and optimizes a source does not meet a stream in each check.
class Part {
 public:
  // NOLINTBEGIN(google-explicit-constructor): a caller that writes a message lists values
  Part(const char* text) : value_(text), write_(nullptr) {}
  template <class T>
    requires(!std::is_array_v<T>)
  Part(const T& value)
      : value_(static_cast<const void*>(&value)),
        write_([](std::ostream& out, const void* part) { out << *static_cast<const T*>(part); }) {}
  // NOLINTEND(google-explicit-constructor)

  void write(std::ostream& out) const;

 private:
  const void* value_;
  void (*write_)(std::ostream&, const void*);  ///< null: text
};

std::string joined(std::initializer_list<Part> parts);
[[noreturn, gnu::cold]] void fail_with(ErrorKind kind, std::initializer_list<Part> parts);
[[noreturn, gnu::cold]] void fail_invariant_with(const char* condition, std::string_view file,
                                                 int line, std::initializer_list<Part> parts);

template <class... Args>
[[noreturn, gnu::cold]] void fail(ErrorKind kind, const Args&... args) {
  fail_with(kind, {Part(args)...});
}
template <class... Args>
[[noreturn, gnu::cold]] void fail_invariant(const char* condition, std::string_view file, int line,
                                            const Args&... args) {
  fail_invariant_with(condition, file, line, {Part(args)...});
}

}  // namespace detail

/// Returns all arguments as text, streamed one after the other.
template <class... Args>
std::string concat(const Args&... args) {
  return detail::joined({detail::Part(args)...});
}

}  // namespace tessera

/// Throws Error of the given kind unless the condition holds: TESSERA_CHECK(condition,
/// ErrorKind::kX, parts of the message...).
#define TESSERA_CHECK(condition, kind, ...)         \
  do {                                              \
    if (!(condition)) [[unlikely]]                  \
      ::tessera::detail::fail((kind), __VA_ARGS__); \
  } while (false)

/// Throws Error of kInternal unless the condition holds: TESSERA_INVARIANT(condition, parts of the
/// message...).
#define TESSERA_INVARIANT(condition, ...)                                             \
  do {                                                                                \
    if (!(condition)) [[unlikely]]                                                    \
      ::tessera::detail::fail_invariant(#condition, __FILE__, __LINE__, __VA_ARGS__); \
  } while (false)
