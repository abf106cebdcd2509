// A stable 64-bit hash of bytes: the same on every rank, compiler and machine (XXH3, little
// endian).
//
// For comparing values over ranks and for keying random numbers; not a cryptographic hash, and not
// std::hash, whose result each standard library chooses for itself.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera {

std::uint64_t hash_bytes(std::string_view bytes, std::uint64_t seed = 0);

/// Collects fields in a form in which different values never give the same bytes: numbers as 8
/// little-endian bytes, strings with their length in front.
class Hasher {
 public:
  Hasher& add(std::uint64_t value);
  Hasher& add(std::int64_t value) { return add(static_cast<std::uint64_t>(value)); }
  Hasher& add(double value) { return add(std::bit_cast<std::uint64_t>(value)); }
  Hasher& add(bool value) { return add(std::uint64_t{value}); }
  Hasher& add(std::string_view text);
  std::uint64_t digest() const { return hash_bytes(bytes_); }

 private:
  std::string bytes_;
};

}  // namespace tessera
