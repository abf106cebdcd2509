// The constants of Philox 4x32 (random.h). nn/dropout.cpp draws the same numbers by operations on a
// device.
#pragma once

#include <array>
#include <cstdint>

namespace tessera {

struct PhiloxConstants {
  static constexpr int kRounds = 10;
  static constexpr std::array<std::uint32_t, 2> kFactors{0xD2511F53, 0xCD9E8D57};
  static constexpr std::array<std::uint32_t, 2> kKeySteps{0x9E3779B9, 0xBB67AE85};
};

}  // namespace tessera
