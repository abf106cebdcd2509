// Gradients that are declared to be the same on the ranks of an axis, compared.
#include <ATen/ATen.h>

#include <cstring>

#include "base/hash.h"
#include "fsdp/runtime.h"
#include "fsdp/unit.h"
#include "tessera/clip.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::vector<std::string_view> invariant_axes(const ParameterLayout& layout) {
  std::vector<std::string_view> axes;
  for (const auto& axis : layout.axes) {
    if (axis.parameter.kind == PlacementKind::kInvariant) axes.push_back(axis.axis);
  }
  return axes;
}

/// Of the bytes of the gradient's sum on this rank's shard.
std::uint64_t hash_of(const fsdp::Parameter& parameter) {
  const auto& bucket = parameter.unit->bucket_of(parameter);
  const auto owned = parameter.owned();
  if (!bucket.trainable() || !bucket.has_sum() || owned.empty()) return 0;
  const auto sum =
      bucket.accumulator()
          .narrow(0, bucket.plan().offset_in_slice(parameter.placed(), bucket.rank()), owned.size())
          .contiguous();
  return hash_bytes({static_cast<const char*>(sum.const_data_ptr()), sum.nbytes()});
}

}  // namespace

std::vector<std::string> check_invariant_gradients(const ShardedBase& model) {
  auto& runtime = fsdp::unit_of_handle(model.unit()).runtime();
  runtime.require_reduced("invariant gradients");
  std::vector<const fsdp::Parameter*> parameters;
  for (const auto* unit : runtime.units()) {
    for (const auto& parameter : unit->parameters()) {
      if (!invariant_axes(parameter->contract.layout).empty())
        parameters.push_back(parameter.get());
    }
  }
  if (parameters.empty()) return {};
  std::vector<std::uint64_t> mine;
  for (const auto* parameter : parameters) mine.push_back(hash_of(*parameter));
  const std::string bytes(reinterpret_cast<const char*>(mine.data()),
                          mine.size() * sizeof(std::uint64_t));
  const auto all = comm::all_gather_fixed(*runtime.data_group(), bytes, "invariant gradients");
  const auto& shapes = runtime.mesh().shapes();
  const auto stage = shapes.stage_of(runtime.world().rank());
  const auto hash_on = [&](int rank, std::size_t parameter) {
    const auto at = std::find(stage.begin(), stage.end(), rank) - stage.begin();
    std::uint64_t hash = 0;
    std::memcpy(&hash, all.at(static_cast<std::size_t>(at)).data() + parameter * sizeof hash,
                sizeof hash);
    return hash;
  };
  std::vector<std::string> names;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& layout = parameters[i]->contract.layout;
    const bool same = std::all_of(stage.begin(), stage.end(), [&](int rank) {
      const auto alike = shapes.of(layout.mesh).group_of(rank, invariant_axes(layout));
      return hash_on(rank, i) == hash_on(alike.front(), i);
    });
    if (!same) names.push_back(parameters[i]->contract.name);
  }
  return names;
}

}  // namespace tessera
