#include "fsdp/optim/state_of_units.h"

#include <algorithm>
#include <map>
#include <string_view>

#include "tessera/dtype.h"

namespace tessera::fsdp {
namespace {

constexpr std::int64_t kCacheLine = 64;

std::vector<std::int64_t> element_sizes_of(const GradContract& contract, int states) {
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(states), size_of(contract.state));
  if (contract.master == Master::kRemainder) sizes.push_back(size_of(DType::kInt16));
  if (contract.master == Master::kCopy) sizes.push_back(size_of(DType::kFloat32));
  return sizes;
}

}  // namespace

std::int64_t part_bytes(std::span<const std::int64_t> element_sizes, std::int64_t numel) {
  std::int64_t bytes = 0;
  for (const auto size : element_sizes) {
    bytes += (numel * size + kCacheLine - 1) / kCacheLine * kCacheLine;
  }
  return bytes;
}

std::int64_t kept_bytes(std::span<const std::int64_t> element_sizes, std::int64_t numel) {
  const auto whole = numel / kMasterPart;
  return whole * part_bytes(element_sizes, kMasterPart) +
         part_bytes(element_sizes, numel - whole * kMasterPart);
}

std::vector<StateBytes> state_of_units(const layout::ModelPlan& plan,
                                       const std::vector<GradContract>& contracts, int states) {
  std::map<std::string_view, const GradContract*> by_name;
  for (const auto& contract : contracts) by_name.emplace(contract.name, &contract);
  std::vector<StateBytes> units;
  for (const auto& unit : plan.units) {
    auto& of = units.emplace_back();
    for (const auto& bucket : unit.plan.buckets) {
      if (!bucket.key.trainable) continue;
      std::int64_t most = 0;
      for (int place = 0; place < bucket.ranks; ++place) {
        std::int64_t bytes = 0;
        for (const auto& placed : bucket.parameters) {
          const auto& contract = *by_name.at(unit.items.at(placed.parameter).name);
          const auto sizes = element_sizes_of(contract, states);
          const auto numel = bucket.owned(placed, place).size();
          bytes += kept_bytes(sizes, numel);
          of.largest_part =
              std::max(of.largest_part, part_bytes(sizes, std::min(numel, kMasterPart)));
        }
        most = std::max(most, bytes);
      }
      of.bytes += most;
    }
  }
  return units;
}

StateBytes sum_of(const std::vector<StateBytes>& units) {
  StateBytes sum;
  for (const auto& unit : units) {
    sum.bytes += unit.bytes;
    sum.largest_part = std::max(sum.largest_part, unit.largest_part);
  }
  return sum;
}

std::int64_t chunk_bytes(const StateBytes& offloaded) {
  return std::max(offloaded.largest_part, std::min(kMostChunkBytes, offloaded.bytes / 8));
}

}  // namespace tessera::fsdp
