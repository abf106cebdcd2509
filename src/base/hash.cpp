#include "base/hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tessera {

std::uint64_t hash_bytes(std::string_view bytes, std::uint64_t seed) {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
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

}  // namespace tessera
