// A port for a program that a test starts.
#pragma once

#include <cstdint>

namespace tessera {

/// Returns a port on which no socket listens, at any address. It is below the range of ephemeral
/// ports: the kernel can give one of those to any other process that connects, before the program
/// listens on it.
std::uint16_t free_port();

}  // namespace tessera
