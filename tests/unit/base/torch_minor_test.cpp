#include "base/text/torch_minor.h"

#include "support/test.h"

namespace tessera::base {
namespace {

/// As libtorch makes it.
std::uint64_t abi(std::uint64_t major, std::uint64_t minor, std::uint64_t rest = 0) {
  return major << 56U | minor << 48U | rest;
}

// Naive: the whole numbers are compared, and a patch version is refused.
TEST(TorchMinor, IsOfTheFirstTwoBytesAlone) {
  constexpr std::uint64_t kPatch = 1ULL << 40U;
  EXPECT_EQ(torch_minor(abi(2, 13, 7 * kPatch + 1)), "2.13");
  EXPECT_EQ(torch_minor(abi(255, 255)), "255.255");
  EXPECT_NO_THROW(require_torch_minor(abi(2, 13, kPatch), abi(2, 13), "lib"));
  EXPECT_NO_THROW(require_torch_minor(abi(2, 13), abi(2, 13, 3 * kPatch + 5), "lib"));
}

TEST(TorchMinor, AnotherOneIsRefusedWithBothAndItsPlace) {
  const std::pair<std::uint64_t, const char*> others[] = {
      {abi(2, 15), "2.15"}, {abi(2, 12), "2.12"}, {abi(3, 13), "3.13"}, {0, "0.0"}};
  for (const auto& [loaded, minor] : others) {
    EXPECT_REFUSED(
        kConfig, require_torch_minor(loaded, abi(2, 13), "/x y/libtorch_cpu.so"),
        concat("libtorch: found ", minor, " in '/x y/libtorch_cpu.so', expected 2.13, "));
  }
}

}  // namespace
}  // namespace tessera::base
