#include "train/report/device_limits.h"

#include <gmock/gmock.h>

#include "unit/io/temporary_folder.h"

namespace tessera::train::device_limits_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// Naive: an H100 PCIe found as an H100.
TEST(DeviceLimits, PeaksFollowTheName) {
  EXPECT_EQ(peak_flops("NVIDIA H100 80GB HBM3"), 989e12);
  EXPECT_EQ(peak_flops("NVIDIA H100 PCIe"), 756e12);
  EXPECT_EQ(peak_flops("NVIDIA H100 NVL"), 835e12);
  EXPECT_EQ(peak_flops("NVIDIA H200"), 989e12);
  EXPECT_EQ(peak_flops("NVIDIA B200"), 2250e12);
  EXPECT_EQ(peak_flops("NVIDIA A100-SXM4-80GB"), 312e12);
  EXPECT_EQ(peak_flops("Tesla T4"), std::nullopt);
  EXPECT_EQ(peak_flops(""), std::nullopt);
}

std::vector<GradContract> one_in(DType compute) {
  GradContract contract;
  contract.name = "layers.0.mlp.up_proj.weight";
  contract.compute.dtype = compute;
  return {contract};
}

TEST(DeviceLimits, SixteenBitsNeedADeviceThatHasThem) {
  EXPECT_THAT(
      error_of(ErrorKind::kConfig,
               [] { require_16_bits(one_in(DType::kBFloat16), "Tesla T4", 75); }),
      AllOf(StartsWith("precision.param_dtype: found bfloat16 (layers.0.mlp.up_proj.weight) on "
                       "Tesla T4 of compute capability 7.5"),
            HasSubstr("expected 8.0 or above"),
            HasSubstr("set precision.param_dtype = \"float32\", or device")));
  EXPECT_THAT(error_of(ErrorKind::kConfig,
                       [] { require_16_bits(one_in(DType::kFloat16), "Tesla T4", 75); }),
              HasSubstr("found float16"));
  require_16_bits(one_in(DType::kFloat32), "Tesla T4", 75);
  require_16_bits(one_in(DType::kBFloat16), "NVIDIA A100-SXM4-80GB", 80);
  require_16_bits(one_in(DType::kBFloat16), "", 0);  // nobody knows
}

}  // namespace
}  // namespace tessera::train::device_limits_test
