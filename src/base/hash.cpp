#include "base/hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>

namespace tessera {

namespace {

constexpr std::string_view kDigits = "0123456789abcdef";
constexpr std::size_t kDigitsOfHalf = 16;

std::uint64_t parse_half(std::string_view text) {
  std::uint64_t value = 0;
  for (const char c : text) value = value << 4 | kDigits.find(c);
  return value;
}

}  // namespace

struct Hash128Stream::State {
  XXH3_state_t xxh;  // declared with an alignment of 64 bytes
};

std::uint64_t hash_bytes(std::string_view bytes, std::uint64_t seed) {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

std::string to_string(const Hash128& hash) {
  std::string text(2 * kDigitsOfHalf, '0');
  for (std::size_t i = 0; i < text.size(); ++i) {
    const std::uint64_t half = i < kDigitsOfHalf ? hash.high : hash.low;
    text[i] = kDigits[half >> (60 - 4 * (i % kDigitsOfHalf)) & 0xFU];
  }
  return text;
}

std::optional<Hash128> parse_hash128(std::string_view text) {
  const bool digits = std::all_of(text.begin(), text.end(),
                                  [](char c) { return kDigits.find(c) != std::string_view::npos; });
  if (text.size() != 2 * kDigitsOfHalf || !digits) return std::nullopt;
  return Hash128{parse_half(text.substr(0, kDigitsOfHalf)), parse_half(text.substr(kDigitsOfHalf))};
}

Hash128Stream::Hash128Stream() : state_(std::make_unique<State>()) {
  XXH3_128bits_reset(&state_->xxh);
}
Hash128Stream::~Hash128Stream() = default;
Hash128Stream::Hash128Stream(Hash128Stream&&) noexcept = default;
Hash128Stream& Hash128Stream::operator=(Hash128Stream&&) noexcept = default;

Hash128Stream& Hash128Stream::add(std::span<const std::byte> bytes) {
  XXH3_128bits_update(&state_->xxh, bytes.data(), bytes.size());
  return *this;
}

Hash128 Hash128Stream::digest() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(&state_->xxh);
  return {hash.high64, hash.low64};
}

Hasher& Hasher::add(std::uint64_t value) {
  for (int byte = 0; byte < 8; ++byte) {
    bytes_.push_back(static_cast<char>((value >> (8 * byte)) & 0xFF));
  }
  return *this;
}

Hasher& Hasher::add(std::string_view text) {
  add(std::uint64_t{text.size()});
  bytes_.append(text);
  return *this;
}

namespace {

constexpr std::uint32_t kReflectedPolynomial = 0x82F63B78;

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < table.size(); ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc & 1U) != 0 ? (crc >> 1U) ^ kReflectedPolynomial : crc >> 1U;
    }
    table[byte] = crc;
  }
  return table;
}

constexpr auto kTable = make_table();

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t crc = 0xFFFFFFFF;
  for (const char c : bytes) {
    crc = kTable[(crc ^ static_cast<unsigned char>(c)) & 0xFFU] ^ (crc >> 8U);
  }
  return ~crc;
}

}  // namespace tessera
