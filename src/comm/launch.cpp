#include <iostream>

#include "base/environment.h"
#include "base/printable.h"
#include "comm/failure_report.h"
#include "launch/launch_environment.h"
#include "launch/refusal.h"
#include "launch/spawn.h"
#include "tessera/error.h"
#include "tessera/world.h"

namespace tessera {
namespace {

/// As the rank that this process is.
void run_as_rank(const std::function<void(World&)>& body, const WorldOptions& options) {
  std::shared_ptr<World> world;
  try {
    world = World::connect(options);
    body(*world);
  } catch (const std::exception& error) {
    comm::report_failure(world.get(), error, comm::default_exit_code(error));
  } catch (...) {
    const Error error(ErrorKind::kInternal, "the body threw something that is no std::exception");
    comm::report_failure(world.get(), error, comm::default_exit_code(error));
  }
  world.reset();  // waits for the others
}

}  // namespace

int launch(int nproc, const std::function<void(World&)>& body, const WorldOptions& options) {
  try {
    const auto place = comm::read_launch_environment(base::environment(),
                                                     {options.master_addr, options.master_port});
    if (place.launcher == comm::Launcher::kSingle && nproc != 1) return comm::spawn_ranks(nproc);
    TESSERA_CHECK(nproc == place.world_size, ErrorKind::kUsage, "launch: found nproc ", nproc,
                  ", expected the ", place.world_size, " ranks that ", to_string(place.launcher),
                  " started");
    run_as_rank(body, options);
    return 0;
  } catch (const std::exception& error) {
    const int code = comm::default_exit_code(error);
    comm::refuse_once(error, code, [&] { std::cerr << one_line(error.what()) << std::endl; });
    return code;
  }
}

}  // namespace tessera
