#include "support/free_port.h"

#include <random>

#include "launch/hosts.h"
#include "tessera/error.h"

namespace tessera {

std::uint16_t free_port() {
  constexpr int kTries = 100;
  std::random_device draw;
  for (int tries = 1;; ++tries) {
    try {
      return comm::listen_on("0.0.0.0", static_cast<std::uint16_t>(10000U + draw() % 20000U)).port;
    } catch (const Error&) {
      if (tries == kTries) throw;
    }
  }
}

}  // namespace tessera
