#include "cli/ranks.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/environment.h"
#include "base/log.h"
#include "base/mapped_file.h"
#include "base/threads/parallel.h"
#include "cli/program_end.h"
#include "cli/program_start.h"
#include "comm/device.h"
#include "comm/failure_report.h"
#include "launch/failure_record.h"
#include "launch/launch_environment.h"
#include "launch/spawn.h"
#include "tessera/error.h"
#include "train/config/config_resolve.h"

namespace tessera::cli {
namespace {

std::string_view backend_word(train::BackendName name) {
  switch (name) {
    case train::BackendName::kAuto:
      return "auto";
#define TESSERA_BACKEND(enumerator, folder, name, ...) \
  case train::BackendName::enumerator:                 \
    return name;
#include "comm/backends/backends.def"
  }
  return "auto";
}

const char* device_word(train::DeviceName name) {
  switch (name) {
    case train::DeviceName::kAuto:
      return "auto";
    case train::DeviceName::kCpu:
      return "cpu";
    case train::DeviceName::kCuda:
      return "cuda";
  }
  return "auto";
}

}  // namespace

WorldOptions world_options(const train::Config& config) {
  const train::CommConfig& comm = config.comm;
  WorldOptions options;
  options.device = device_word(config.device);
  options.backend = backend_word(comm.backend);
  options.init_timeout = std::chrono::seconds(comm.init_timeout_seconds);
  options.timeout = std::chrono::seconds(comm.timeout_seconds);
  options.master_addr = comm.master_addr.value_or("");
  options.master_port = static_cast<int>(comm.master_port.value_or(0));
  return options;
}

namespace {

/// How many CUDA devices a child of this process sees: a driver that is asked may start threads,
/// and the parent of own spawn has to have one. 0 where the child cannot tell: its ranks will say why.
int cuda_devices_by_a_child() {
  constexpr int kMostTold = 255;  // an exit code
  const pid_t child = ::fork();
  if (child < 0) return 0;
  if (child == 0) {
    int found = 0;
    try {
      found = comm::cuda_devices();
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
void check_devices(const WorldOptions& options, int ranks) {
  if (options.device == "cpu") return;
  const int devices = cuda_devices_by_a_child();
  const auto device = comm::device_of_spawned(options.device, options.backend, ranks, devices);
  if (device == options.device) return;
  log::info("device = \"auto\": found ", ranks, " ranks and ", devices,
            " CUDA device(s) of this host: all of them take the ", device);
}

// As the rank that this process is. A rank among others must not unwind past its groups when it
// fails.
int run_as_rank(const WorldOptions& options, int rank, int world_size, const RankBody& body) {
  name_process_of_rank(rank);
  base::heed_cpu_quota();
  std::shared_ptr<World> world;
  RunPhase phase([&world] { world->end_start_up(); });
  try {
    world = World::connect(options);
    world->begin_start_up();
    body(*world, phase);
  } catch (const std::exception& error) {
    if (world_size == 1) {
      const int code = report(error, phase.now());
      if (code == kRefused) phase.refused();
      return code;
    }
    comm::report_failure(world.get(), error, exit_code(error, phase.now()));
  }
  world.reset();  // waits for the others
  return kDone;
}

}  // namespace

int run_ranks(const train::Config& config, std::optional<int> nproc, const RankBody& body) {
  // CUDA reads them once, and the ranks that are started here inherit them.
  if (config.debug.deterministic) comm::prepare_deterministic_products();
  if (config.device != train::DeviceName::kCpu) comm::prepare_growing_segments();
  WorldOptions options = world_options(config);
  const comm::LaunchEnvironment place = comm::read_launch_environment(
      base::environment(), {options.master_addr, options.master_port});
  const bool launched = place.launcher != comm::Launcher::kSingle;
  TESSERA_CHECK(!launched || !nproc || *nproc == place.world_size, ErrorKind::kUsage,
                "--nproc: found ", nproc.value_or(0), ", expected ", place.world_size,
                ", the ranks that ", to_string(place.launcher),
                " started; leave --nproc out under a launcher");
  const int ranks =
      launched ? place.world_size : nproc.value_or(train::ranks_to_spawn(config.parallelism));
  train::resolve_parallelism(config.parallelism, ranks);
  if (!launched && ranks > 1) {
    check_devices(options, ranks);
    return comm::spawn_ranks(ranks);
  }
  if (place.launcher == comm::Launcher::kOwnSpawn) {
    report_cut_files(
        {place.error_fd,
         encode(comm::FailureRecord{
             comm::FailureClass::kPrimary, comm::monotonic_ns(), place.rank, kFailed, {}})});
    // As its parent found.
    options.device = comm::device_of_spawned(options.device, options.backend, ranks,
                                             options.device == "cpu" ? 0 : comm::cuda_devices());
  }
  return run_as_rank(options, place.rank, ranks, body);
}

}  // namespace tessera::cli
