// Without a CUDA device every test of the program is skipped, and says so.
#include <ATen/Context.h>
#include <gtest/gtest.h>

namespace tessera::test {
namespace {

class Card final : public testing::Environment {
  void SetUp() override {
    if (!at::hasCUDA()) {
      GTEST_SKIP() << "no CUDA device: built against a libtorch without CUDA, or no driver";
    }
  }
};

[[maybe_unused]] const auto* const card = testing::AddGlobalTestEnvironment(new Card);

}  // namespace
}  // namespace tessera::test
