#include "comm/run_place.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/environment.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "base/text/printable.h"
#include "comm/backends/backend.h"
#include "comm/device.h"
#include "comm/process_world.h"
#include "launch/child_ends.h"
#include "launch/failure_record.h"
#include "launch/hosts.h"
#include "launch/peer_watch.h"
#include "launch/spawn.h"
#include "launch/store.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// Returns the number of CUDA devices that a child of this process sees: a driver that is called
/// may start threads, and the parent of own spawn must have one thread. 0 where the child cannot
/// tell: its ranks will report why.
int cuda_devices_by_a_child() {
  constexpr int kMostTold = 255;  // an exit code
  const ChildEnds ends;
  const pid_t child = ::fork();
  if (child < 0) return 0;
  if (child == 0) {
    int found = 0;
    try {
      found = cuda_devices();
    } catch (const std::exception&) {  // its ranks will report it
    }
    ::_exit(std::min(found, kMostTold));
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return 0;
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

/// Refuses before own spawn starts ranks, or logs that "auto" is the CPU for lack of devices.
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

namespace {

// The key under which ranks over a program's store tell each other their hosts.
constexpr const char* kHosts = "the store";

/// Reads the variables of the launcher. Returns none where they mean another rank or contradict
/// each other: then they belong to the program, which knows its ranks in another way.
std::optional<LaunchEnvironment> launcher_of(int rank, int size, const WorldOptions& options) {
  try {
    auto launch =
        read_launch_environment(base::environment(), {options.master_addr, options.master_port});
    if (launch.launcher == Launcher::kSingle) return {};
    if (launch.rank != rank || launch.world_size != size) return {};
    return launch;
  } catch (const Error&) {
    return {};
  }
}

/// A text that also differs between hosts of the same name.
std::string this_host() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) name.front() = '\0';
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return concat(name.data(), " ", boot);
}

std::string name_of(const std::string& host) { return host.substr(0, host.find(' ')); }

std::string host_key(int rank) { return concat("host/", rank); }

/// Finds the hosts of the ranks, which tell each other over the store.
LaunchEnvironment found_over(Store& store, int rank, int size, const WorldOptions& options) {
  const std::string mine = this_host();
  store.set(host_key(rank), mine);
  store.meet(kHosts, rank, all_ranks(size), options.init_timeout, AbortFlag());
  std::vector<std::string> keys;
  for (int of = 0; of < size; ++of) keys.push_back(host_key(of));
  const auto hosts = store.get_all(keys);
  LaunchEnvironment launch;
  launch.rank = rank;
  launch.world_size = size;
  launch.local_rank = static_cast<int>(std::count(hosts.begin(), hosts.begin() + rank, mine));
  const auto other = std::ranges::find_if(hosts, [&](const auto& host) { return host != mine; });
  launch.hosts = other == hosts.end() ? Hosts::kOne : Hosts::kSeveral;
  // The address of this host for another host is the one at which that host finds it.
  launch.master_addr = other == hosts.end() ? "127.0.0.1" : name_of(*other);
  const auto known = launcher_of(rank, size, options);
  if (!known) return launch;
  launch.launcher = known->launcher;
  launch.local_rank = known->local_rank;
  if (launch.hosts == Hosts::kSeveral && !is_loopback(known->master_addr) &&
      !known->master_addr.empty()) {
    launch.master_addr = known->master_addr;
  }
  return launch;
}

/// Reports that this rank ends before it has a World. It still arrives among `size` ranks (none: as
/// many as the first has said), so that the others start their failure watches, which tell them why
/// it is missing.
void tell_end(Store& store, int rank, std::optional<int> size, int code,
              const std::string& why) noexcept {
  const base::NoInterrupts until_told;
  try {
    const FailureRecord failure{FailureClass::kPrimary, monotonic_ns(), rank, code, why};
    store.set_if_absent(store_key::kFailure, encode(failure));
    if (!size) size = store.required_size();
    if (rank >= *size) return;  // no rank waits for it
    store.set(host_key(rank), this_host());
    store.arrive(kHosts, rank, *size);
  } catch (const std::exception&) {
    // The store is gone or silent: no rank can be told.
  }
}

/// As Store::require_size. The others hear of a refusal, too: they wait for this rank.
void require_size(Store& store, int rank, int size) {
  try {
    store.require_size(rank, size);
  } catch (const Error& refusal) {
    if (refusal.kind() == ErrorKind::kUsage) {
      tell_end(store, rank, {}, kRefusedCode, one_line(refusal.what()));
    }
    throw;
  }
}

}  // namespace

std::shared_ptr<World> connect_over(const StorePtr& store, int rank, int size,
                                    WorldOptions options) {
  TESSERA_CHECK(size >= 1, ErrorKind::kUsage, "World::from_store: found size ", size,
                ", expected at least 1");
  TESSERA_CHECK(rank >= 0 && rank < size, ErrorKind::kUsage, "World::from_store: found rank ", rank,
                " of ", size, ", expected one from 0 to ", size - 1);
  TESSERA_CHECK(size == 1 || store.defined(), ErrorKind::kUsage,
                "World::from_store: found no store, expected the one that the ranks share");
  backend_named(options.backend, device_of_rank(options.device, 0).type());
  if (size == 1) return World::of_one(options);
  const auto over = [&] {
    try {
      return Store::over(store, rank, size, options.init_timeout, options.timeout);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      if (base::handles_interrupt()) throw;
      throw LostRank(
          concat("world: the store of the program does not answer: ", one_line(error.what())));
    }
  }();
  const LaunchEnvironment launch = [&] {
    try {
      require_size(*over, rank, size);
      return found_over(*over, rank, size, options);
    } catch (...) {
      if (base::handles_interrupt()) tell_end(*over, rank, size, 1, kInterrupted);
      throw;
    }
  }();
  auto world = std::make_shared<ProcessWorld>(launch, options, over);
  world->attach_thread();
  return world;
}

std::shared_ptr<World> connect_at(const RunPlace& place, WorldOptions options) {
  options.device = place.device;
  auto launch = place.launch;
  // Also where no rank is to be connected.
  const auto device = device_of_rank(options.device, launch.local_rank);
  backend_named(options.backend, device.type());
  if (launch.world_size == 1) return World::of_one(options);
  find_first_host(launch, kScontrolPatience);
  auto world = std::make_shared<ProcessWorld>(launch, options);
  world->attach_thread();
  return world;
}

}  // namespace tessera::comm
