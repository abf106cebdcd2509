#include "cli/ranks.h"

#include "base/mapped_file.h"
#include "base/threads/parallel.h"
#include "cli/program_end.h"
#include "cli/program_start.h"
#include "comm/device.h"
#include "comm/failure_report.h"
#include "comm/run_place.h"
#include "launch/failure_record.h"
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

// As the rank that this process is. A rank among others must not unwind past its groups when it
// fails.
int run_as_rank(const comm::RunPlace& place, const WorldOptions& options, const RankBody& body) {
  name_process_of_rank(place.launch.rank);
  base::heed_cpu_quota();
  std::shared_ptr<World> world;
  RunPhase phase([&world] { world->end_start_up(); });
  try {
    world = comm::connect_at(place, options);
    world->begin_start_up();
    body(*world, phase);
  } catch (const std::exception& error) {
    if (place.ranks == 1) {
      const int code = report(error, phase.now());
      if (code == kRefused) phase.refused();
      return code;
    }
    const int code = exit_code(error, phase.now());
    if (!world) comm::report_failure(place, error, code);
    comm::report_failure(*world, error, code);
  }
  world.reset();  // waits for the others
  return kDone;
}

}  // namespace

int run_ranks(const train::Config& config, std::optional<int> nproc, const RankBody& body) {
  // CUDA reads them once, and the ranks that are started here inherit them.
  if (config.debug.deterministic) comm::prepare_deterministic_products();
  if (config.device != train::DeviceName::kCpu) comm::prepare_growing_segments();
  const WorldOptions options = world_options(config);
  comm::RunPlace place = comm::read_place(options);
  TESSERA_CHECK(!place.launched() || !nproc || *nproc == place.ranks, ErrorKind::kUsage,
                "--nproc: found ", nproc.value_or(0), ", expected ", place.ranks,
                ", the ranks that ", to_string(place.launch.launcher),
                " started; leave --nproc out under a launcher");
  if (!place.launched()) place.ranks = nproc.value_or(train::ranks_to_spawn(config.parallelism));
  train::resolve_parallelism(config.parallelism, place.ranks);
  if (place.launch.launcher == comm::Launcher::kOwnSpawn) {
    report_cut_files(
        {place.launch.error_fd,
         encode(comm::FailureRecord{
             comm::FailureClass::kPrimary, comm::monotonic_ns(), place.launch.rank, kFailed, {}})});
  }
  if (const auto code = comm::start_ranks(place, options)) return *code;
  return run_as_rank(place, options, body);
}

}  // namespace tessera::cli
