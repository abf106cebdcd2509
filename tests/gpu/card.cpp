// Without a CUDA device every test of the program is skipped, and says so.

#include "comm/device.h"
#include "support/test.h"

namespace tessera::test {
namespace {

class Card final : public testing::Environment {
  void SetUp() override {
    if (comm::cuda_devices() == 0) {
      GTEST_SKIP() << "no CUDA device: built without CUDA, or there is no driver or no card";
    }
  }
};

[[maybe_unused]] const auto* const card = testing::AddGlobalTestEnvironment(new Card);

}  // namespace
}  // namespace tessera::test
