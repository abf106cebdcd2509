#include "tessera/placement.h"

#include <limits>

#include "tessera/error.h"

namespace tessera {

std::string to_string(const Placement& placement) {
  switch (placement.kind) {
    case PlacementKind::kReplicate:
      return "R";
    case PlacementKind::kShard:
      return concat("S(", placement.dim, ")");
    case PlacementKind::kPartial:
      return "P";
    case PlacementKind::kInvariant:
      return "I";
  }
  return "?";
}

AxisPlacement AxisPlacement::shard(std::string_view axis, int size, int dim) {
  const Placement part{PlacementKind::kShard, dim};
  return {std::string(axis), size, part, part};
}

AxisPlacement AxisPlacement::partial(std::string_view axis, int size) {
  return {std::string(axis), size, {PlacementKind::kReplicate}, {PlacementKind::kPartial}};
}

AxisPlacement AxisPlacement::invariant(std::string_view axis, int size) {
  return {std::string(axis), size, {PlacementKind::kInvariant}, {PlacementKind::kInvariant}};
}

std::string to_string(const AxisPlacement& placement) {
  return concat(placement.axis, " ", placement.size, " ", to_string(placement.parameter),
                ", gradient ", to_string(placement.gradient));
}

std::string to_string(const ParameterLayout& layout) {
  std::string text;
  for (const AxisPlacement& axis : layout.axes) {
    text += concat(text.empty() ? "" : "; ", to_string(axis));
  }
  if (!layout.sharded_shape.empty()) {
    text += " of ";
    for (std::size_t d = 0; d < layout.sharded_shape.size(); ++d) {
      text += concat(d == 0 ? "" : "x", layout.sharded_shape[d]);
    }
  }
  for (std::size_t i = 0; i < layout.sections.size(); ++i) {
    text += concat(i == 0 ? " of rows " : "+", layout.sections[i]);
  }
  if (layout.mesh == MeshKind::kSparse) text += text.empty() ? "sparse mesh" : " (sparse mesh)";
  return text.empty() ? "nothing declared" : text;
}

bool is_divisor(double factor) {
  return factor >= static_cast<double>(std::numeric_limits<float>::min()) &&
         factor <= static_cast<double>(std::numeric_limits<float>::max());
}

std::string to_string(const ReductionPlan& reductions) {
  const auto joined = [](const std::vector<std::string>& axes) {
    std::string text;
    for (const std::string& axis : axes) text += (text.empty() ? "" : " x ") + axis;
    return text;
  };
  const std::string shard = joined(reductions.shard_axes);
  const std::string replica = joined(reductions.replica_axes);
  std::string text = "no sum";
  if (!shard.empty()) text = "sum over " + shard;
  if (!replica.empty()) text = shard.empty() ? "sum over " + replica : text + ", then " + replica;
  if (!reductions.copies.empty()) {
    std::string ranks;
    for (const int rank : reductions.copies) ranks += concat(ranks.empty() ? "" : " and ", rank);
    text =
        concat(text == "no sum" ? "sum over" : text + ", then", " the copies of pp ranks ", ranks);
  }
  if (reductions.divide_factor != 1.0) text += concat(", / ", reductions.divide_factor);
  return text;
}

}  // namespace tessera
