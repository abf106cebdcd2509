#include "sim/sim.h"
#include "support/drawn_place.h"
#include "support/place.h"

const char* const tessera::test::kPlaces[] = {"sim", "sim:0", "sim side", "sim:0 side", nullptr};

namespace tessera::sim {
namespace {

[[maybe_unused]] const bool kTellsRaces = [] {
  test::found_by_devices() = take_races;
  return true;
}();

}  // namespace
}  // namespace tessera::sim
