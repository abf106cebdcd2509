// A program that ranks_test.cpp runs: two ranks by own spawn, of which one computes on a simulated
// device and one on the CPU, as "auto" has it where one host shows a device and another none.
//
//   rank_of_its_kind RANK    which of them has the device
#include <chrono>
#include <cstdlib>
#include <string>

#include "base/environment.h"
#include "launch/launch_environment.h"
#include "sim/sim.h"
#include "tessera/world.h"

int main(int argc, char** argv) {
  if (argc != 2) return 64;
  tessera::WorldOptions options;
  options.backend = "gloo";
  options.init_timeout = options.timeout = std::chrono::seconds(100);
  options.device = "cpu";
  if (tessera::base::environment_variable(tessera::comm::spawn_variable::kRank) == argv[1]) {
    tessera::sim::install(1);
    options.device = "sim:0";
  }
  return tessera::launch(2, [](tessera::World&) { std::_Exit(3); }, options);
}
