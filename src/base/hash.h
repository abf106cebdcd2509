// A stable 64-bit hash of bytes, the same on every rank, compiler and machine (XXH3, little
// endian), and the checksum of TensorBoard's records.
//
// Pure. The hash compares values over ranks, keys random numbers and, with 128 bits, finds bytes of
// a file that changed. It is no cryptographic hash, and not std::hash, which differs between
// standard libraries.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

std::uint64_t hash_bytes(std::string_view bytes, std::uint64_t seed = 0);

/// The XXH3-128 of bytes. Its text has the 32 digits that `xxh128sum` prints.
struct Hash128 {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  bool operator==(const Hash128&) const = default;
};
std::string to_string(const Hash128& hash);
/// Parses that text; none for anything but 32 lower-case hexadecimal digits.
std::optional<Hash128> parse_hash128(std::string_view text);

/// The hash of bytes that come in parts.
class Hash128Stream {
 public:
  Hash128Stream();
  ~Hash128Stream();
  Hash128Stream(Hash128Stream&&) noexcept;
  Hash128Stream& operator=(Hash128Stream&&) noexcept;
  Hash128Stream& add(std::span<const std::byte> bytes);
  Hash128Stream& add(std::string_view text) { return add(std::as_bytes(std::span(text))); }
  Hash128 digest() const;  ///< of all bytes so far

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Hashes fields so that different values never have the same bytes: numbers as 8 little-endian
/// bytes, strings after their length.
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

/// Returns the CRC32C (Castagnoli), by a table, since the records are a hundred bytes long.
/// Polynomial 0x1EDC6F41, reflected, as in RFC 3720.
std::uint32_t crc32c(std::string_view bytes);

}  // namespace tessera
