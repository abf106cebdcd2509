#include <string>
#include <vector>

#include "sim/nccl/stand_in.h"
#include "sim/sim.h"
#include "sim/simulator.h"
#include "support/drawn_place.h"
#include "support/place.h"

const char* const tessera::test::kPlaces[] = {"sim nccl", "sim side nccl", nullptr};

namespace tessera::sim {
namespace {

std::vector<std::string> findings() {
  std::vector<std::string> all = take_races();
  for (std::string& each : take_nccl_findings()) all.push_back(std::move(each));
  return all;
}

[[maybe_unused]] const bool kTells = [] {
  test::found_by_devices() = findings;
  test::failed_ranks() = {[] { break_open("sim: another rank has failed"); }, settle};
  return true;
}();

}  // namespace
}  // namespace tessera::sim
