// Gloo connections: the one door to c10d::ProcessGroupGloo.
//
// Only opened here; what goes over them is point_to_point.h. gloo.cpp alone includes
// ProcessGroupGloo.hpp: Debian's Gloo headers (libtorch brings none) are older than the Gloo inside
// libtorch and lay out some classes differently, so nothing of Gloo's own may be called, only
// c10d's.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/launch_environment.h"

namespace tessera::comm {

/// When the ranks of a group connect to each other.
enum class Connect : std::uint8_t {
  kAtOnce,    ///< all to all, when the group is opened
  kWhenUsed,  ///< two ranks at the first transfer between them (connections.h)
};
/// Groups for control messages, which are relayed, need few of their connections.
Connect connect_for(std::string_view group_name);

/// A socket to listen on and the thread that moves bytes; shared by the groups of one World. Those
/// that connect when used have one of their own each: two groups of one lazy device take each
/// other's connections, and wait for ever.
class GlooDevice {
 public:
  /// GLOO_SOCKET_IFNAME's first interface if it is set, loopback where that reaches all ranks, else
  /// the address from which this host reaches the store. From here on the process ignores SIGPIPE,
  /// unless it has a handler of its own. Errors: kComm.
  explicit GlooDevice(const LaunchEnvironment& launch);
  ~GlooDevice();
  GlooDevice(const GlooDevice&) = delete;
  GlooDevice& operator=(const GlooDevice&) = delete;

  /// A group of all `size` ranks that share the store. Collective. Errors: PeerLost where one does
  /// not come, or the store does not answer.
  c10::intrusive_ptr<c10d::Backend> connect(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            int size, std::chrono::milliseconds timeout,
                                            Connect when);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::comm
