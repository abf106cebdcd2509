// A port for a program that a test starts.
#pragma once

#include <cstdint>

namespace tessera::test {

/// A port where nobody listens, on any address. Below the range that the kernel hands out: a port of
/// that range is anybody's who connects to anything before the program has it.
std::uint16_t free_port();

}  // namespace tessera::test
