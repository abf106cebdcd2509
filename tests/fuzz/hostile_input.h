// The requirement of every fuzz target on a parser: a value, or a kFormat error with a short
// message.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string_view>

#include "tessera/error.h"

namespace tessera::fuzz {

/// Aborts, which libFuzzer records as a finding.
inline void require(bool condition, std::string_view what) {
  if (condition) return;
  std::cerr << "broken promise: " << what << '\n';
  std::abort();
}

inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// Any other exception escapes and is a finding.
template <class Parse>
void value_or_error(ErrorKind kind, Parse&& parse) {
  constexpr std::string_view::size_type kMaxMessageBytes = 4096;
  try {
    parse();
  } catch (const Error& error) {
    const std::string_view message = error.what();
    require(error.kind() == kind, "the error's kind");
    require(message.size() <= kMaxMessageBytes, "a short message");
    for (const char c : message) {
      require(static_cast<unsigned char>(c) >= 0x20U && c != '\x7F', "a message on one line");
    }
  }
}

}  // namespace tessera::fuzz
