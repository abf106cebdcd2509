#include "train/report/device_limits.h"

#include <algorithm>
#include <utility>

#include "tessera/dtype.h"
#include "tessera/error.h"

namespace tessera::train {
namespace {

/// The first that the name contains counts. Source: data sheets of NVIDIA, without sparsity.
constexpr std::pair<std::string_view, double> kPeaks[] = {
    {"H100 PCIe", 756e12}, {"H100 NVL", 835e12}, {"H100", 989e12}, {"H200", 989e12},
    {"B200", 2250e12},     {"A100", 312e12},     {"L40S", 362e12},
};

constexpr int kFirstWith16Bits = 80;

}  // namespace

std::optional<double> peak_flops(std::string_view device_name) {
  for (const auto& [part, flops] : kPeaks) {
    if (device_name.find(part) != device_name.npos) return flops;
  }
  return std::nullopt;
}

void require_16_bits(const std::vector<GradContract>& parameters, std::string_view device_name,
                     int capability) {
  if (capability == 0 || capability >= kFirstWith16Bits) return;
  const auto narrow = std::ranges::find_if(parameters, [](const GradContract& one) {
    return one.compute.dtype == DType::kBFloat16 || one.compute.dtype == DType::kFloat16;
  });
  TESSERA_CHECK(narrow == parameters.end(), ErrorKind::kConfig, "precision.param_dtype: found ",
                to_string(narrow->compute.dtype), " (", narrow->name, ") on ", device_name,
                " of compute capability ", capability / 10, ".", capability % 10,
                ", expected 8.0 or above, which has attention and products in it; set "
                "precision.param_dtype = \"float32\", or device = \"cpu\"");
}

}  // namespace tessera::train
