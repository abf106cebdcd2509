#include <ATen/ATen.h>

#include "base/parallel.h"
#include "base/split_float.h"
#include "kernels/implementations.h"

namespace tessera::kernels::cpu {
namespace {

constexpr std::int64_t kMasterGrain = 1 << 15;

// c10::BFloat16 is its bits.
std::uint16_t bits(c10::BFloat16 value) { return value.x; }
c10::BFloat16 bfloat16(std::uint16_t bits) { return {bits, c10::BFloat16::from_bits()}; }

}  // namespace

void join_master(const at::Tensor& shard, const at::Tensor& remainder, const at::Tensor& values) {
  const auto* high = shard.const_data_ptr<c10::BFloat16>();
  const auto* low = remainder.const_data_ptr<std::int16_t>();
  auto* whole = values.mutable_data_ptr<float>();
  base::for_ranges(values.numel(), kMasterGrain, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) whole[i] = join({bits(high[i]), low[i]});
  });
}

void split_master(const at::Tensor& values, const at::Tensor& shard, const at::Tensor& remainder) {
  const auto* whole = values.const_data_ptr<float>();
  auto* high = shard.mutable_data_ptr<c10::BFloat16>();
  auto* low = remainder.mutable_data_ptr<std::int16_t>();
  base::for_ranges(values.numel(), kMasterGrain, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) {
      const auto halves = split(whole[i]);
      high[i] = bfloat16(halves.rounded);
      low[i] = halves.remainder;
    }
  });
}

void round_half_away(const at::Tensor& values, const at::Tensor& shard) {
  const auto* whole = values.const_data_ptr<float>();
  auto* high = shard.mutable_data_ptr<c10::BFloat16>();
  base::for_ranges(values.numel(), kMasterGrain, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) high[i] = bfloat16(split(whole[i]).rounded);
  });
}

void take_over_changes(const at::Tensor& shard, const at::Tensor& master) {
  const auto* stored = shard.const_data_ptr<c10::Half>();
  auto* full = master.mutable_data_ptr<float>();
  base::for_ranges(shard.numel(), kMasterGrain, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i) {
      const auto value = static_cast<float>(stored[i]);
      full[i] = static_cast<float>(static_cast<c10::Half>(full[i])) == value ? full[i] : value;
    }
  });
}

}  // namespace tessera::kernels::cpu
