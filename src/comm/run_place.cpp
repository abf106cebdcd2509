#include "comm/run_place.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/environment.h"
#include "base/log.h"
#include "comm/backends/backend.h"
#include "comm/device.h"
#include "comm/process_world.h"
#include "launch/child_ends.h"
#include "launch/hosts.h"
#include "launch/spawn.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// How many CUDA devices a child of this process sees: a driver that is asked may start threads,
/// and the parent of own spawn has to have one. 0 where the child cannot tell: its ranks will say
/// why.
int cuda_devices_by_a_child() {
  constexpr int kMostTold = 255;  // an exit code
  const ChildEnds ends;
  const pid_t child = ::fork();
  if (child < 0) return 0;
  if (child == 0) {
    int found = 0;
    try {
      found = cuda_devices();
    } catch (const std::exception&) {  // as its ranks will say
    }
    ::_exit(std::min(found, kMostTold));
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return 0;
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

/// Before own spawn starts them: refuses, or says that "auto" is the CPU for want of devices.
void check_devices(const RunPlace& place, const std::string& backend) {
  if (place.device == "cpu") return;
  const int devices = cuda_devices_by_a_child();
  const auto device = device_of_spawned(place.device, backend, place.ranks, devices);
  if (device == place.device) return;
  log::info("device = \"auto\": found ", place.ranks, " ranks and ", devices,
            " CUDA device(s) of this host: all of them take the ", device);
}

}  // namespace

RunPlace read_place(const WorldOptions& options) {
  RunPlace place;
  place.launch =
      read_launch_environment(base::environment(), {options.master_addr, options.master_port});
  place.ranks = place.launch.world_size;
  place.device = options.device;
  return place;
}

std::optional<int> start_ranks(RunPlace& place, const WorldOptions& options) {
  if (!place.launched() && place.ranks != 1) {
    check_devices(place, options.backend);
    return spawn_ranks(place.ranks);
  }
  if (place.launch.launcher == Launcher::kOwnSpawn) {  // as its parent found
    place.device = device_of_spawned(place.device, options.backend, place.ranks,
                                     place.device == "cpu" ? 0 : cuda_devices());
  }
  return {};
}

std::shared_ptr<World> connect_at(const RunPlace& place, WorldOptions options) {
  options.device = place.device;
  auto launch = place.launch;
  // Also where nobody is to be connected.
  const auto device = device_of_rank(options.device, launch.local_rank);
  backend_named(options.backend, device.type());
  if (launch.world_size == 1) return World::of_one(options);
  find_first_host(launch, kScontrolPatience);
  auto world = std::make_shared<ProcessWorld>(launch, options);
  world->attach_thread();
  return world;
}

}  // namespace tessera::comm
