// The tests of tests/dist on devices: each in one place, which its name draws, or in the one that
// TESSERA_SIM_PLACE names: "sim" (each rank its own device), "sim:0" (all ranks one), and the same
// with " side", not on the default stream.
#include <gtest/gtest.h>

#include <cstdio>
#include <iterator>
#include <string>
#include <utility>

#include "base/environment.h"
#include "base/hash.h"
#include "dist/place.h"
#include "sim/sim.h"

namespace tessera::sim {
namespace {

constexpr const char* kPlaces[] = {"sim", "sim:0", "sim side", "sim:0 side"};

test::Place parsed(const std::string& name) {
  const auto device = name.substr(0, name.find(' '));
  return {device, /*side=*/device != name};
}

class DrawnPlace final : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& info) override {
    const auto asked = base::environment_variable("TESSERA_SIM_PLACE");
    const auto hash = hash_bytes(std::string(info.test_suite_name()) + "." + info.name());
    const std::string name = asked ? *asked : kPlaces[hash % std::size(kPlaces)];
    test::place() = parsed(name);
    testing::Test::RecordProperty("place", name);
  }
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.passed()) return;
    const auto& [device, side] = test::place();
    std::printf("on %s%s\n", device.c_str(), side ? ", side streams" : "");
  }
};

class Places final : public testing::Environment {
  void SetUp() override {
    static bool there = false;  // set up again for each repetition
    if (std::exchange(there, true)) return;
    testing::UnitTest::GetInstance()->listeners().Append(new DrawnPlace);
  }
};

[[maybe_unused]] const auto* const places = testing::AddGlobalTestEnvironment(new Places);

}  // namespace
}  // namespace tessera::sim
