// Every program that links the simulator has its devices before the first test, and no test leaves
// a race that it did not ask for (take_races).

#include <gtest/gtest.h>

#include "sim/sim.h"

namespace tessera::sim {
namespace {

constexpr int kDevices = 8;  // as many as the tests' ranks

class NoRaceIsLeft final : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& /*test*/) override { settle(); }
  void OnTestEnd(const testing::TestInfo& /*test*/) override {
    for (const std::string& race : take_races()) ADD_FAILURE() << race;
  }
};

class Devices final : public testing::Environment {
  void SetUp() override {
    static bool there = false;  // set up again for each repetition
    if (std::exchange(there, true)) return;
    install(kDevices);
    testing::UnitTest::GetInstance()->listeners().Append(new NoRaceIsLeft);
  }
};

[[maybe_unused]] const auto* const environment = testing::AddGlobalTestEnvironment(new Devices);

}  // namespace
}  // namespace tessera::sim
