// c10d's own Gloo compared with a World: what benchmarks set ours next to.
#pragma once

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/environment.h"
#include "launch/launch_environment.h"
#include "tessera/world.h"

namespace bench {

/// All ranks of a world on this host; a store of its own, at the port behind the World's.
inline c10::intrusive_ptr<c10d::ProcessGroupGloo> plain_gloo(const tessera::World& world) {
  const auto launch = tessera::comm::read_launch_environment(tessera::base::environment());
  c10d::TCPStoreOptions store_options;
  store_options.port = static_cast<std::uint16_t>(launch.master_port + 1);
  store_options.isServer = world.rank() == 0;
  store_options.numWorkers = static_cast<std::size_t>(world.size());
  auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", store_options);
  auto options = c10d::ProcessGroupGloo::Options::create();
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, world.rank(), world.size(), options);
}

}  // namespace bench
