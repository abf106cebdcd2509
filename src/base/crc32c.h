// CRC32C (Castagnoli): the checksum of TensorBoard's records. Pure; a table, no instructions: the
// records are a hundred bytes.
#pragma once

#include <cstdint>
#include <string_view>

namespace tessera {

/// Polynomial 0x1EDC6F41, reflected, as in RFC 3720.
std::uint32_t crc32c(std::string_view bytes);

}  // namespace tessera
