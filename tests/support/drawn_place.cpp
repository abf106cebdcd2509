#include "support/drawn_place.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdio>
#include <string>
#include <utility>

#include "base/environment.h"
#include "base/hash.h"
#include "support/place.h"

namespace tessera::test {
namespace {

Place parsed(const std::string& name) {
  const auto has = [&](const char* word) { return name.find(word) != std::string::npos; };
  return {name.substr(0, name.find(' ')), has(" side"), has(" nccl")};
}

class DrawnPlace final : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& info) override {
    std::size_t places = 0;
    while (kPlaces[places]) ++places;
    const auto asked = base::environment_variable("TESSERA_TEST_PLACE");
    const auto hash = hash_bytes(std::string(info.test_suite_name()) + "." + info.name());
    const std::string name = asked ? *asked : kPlaces[hash % places];
    place() = parsed(name);
    testing::Test::RecordProperty("place", name);
  }
  // Also reports races whose exception a test has swallowed.
  void OnTestEnd(const testing::TestInfo& /*info*/) override {
    for (const std::string& found : found_by_devices()()) ADD_FAILURE() << found;
  }
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.passed()) return;
    const auto& [device, side, nccl] = place();
    std::printf("on %s%s%s\n", device.c_str(), side ? ", side streams" : "",
                nccl ? ", over NCCL" : "");
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
}  // namespace tessera::test
