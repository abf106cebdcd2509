// A float32 as a bfloat16 and 16 more bits: an optimizer keeps these bits as the master of a
// bfloat16 shard.
//
// The bfloat16 is the float32 rounded to nearest, halves away from zero (adding 0x8000 to the bits
// and cutting off the lower half; a cast rounds halves to even). The remainder is the lower half as
// a signed number, so that the two together restore the float32 bit for bit: finite values, zeros
// of either sign, denormals and infinities. NaNs become the quiet NaN of their sign. A finite value
// of at least 0x1.ffp127 has the bfloat16 infinity, and is restored all the same.
#pragma once

#include <bit>
#include <cstdint>

namespace tessera {

struct SplitFloat {
  std::uint16_t rounded;   ///< bits of the bfloat16
  std::int16_t remainder;  ///< difference to the float32, in units of its last place
};

constexpr SplitFloat split(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  constexpr std::uint32_t kInfinity = 0x7F800000U;
  if ((bits & 0x7FFFFFFFU) > kInfinity) {
    return {static_cast<std::uint16_t>((bits >> 16U & 0x8000U) | 0x7FC0U), 0};
  }
  return {static_cast<std::uint16_t>((bits + 0x8000U) >> 16U),
          static_cast<std::int16_t>(static_cast<std::uint16_t>(bits))};
}

constexpr float join(SplitFloat halves) {
  const auto high = static_cast<std::uint32_t>(halves.rounded) << 16U;
  return std::bit_cast<float>(high + static_cast<std::uint32_t>(std::int32_t{halves.remainder}));
}

}  // namespace tessera
