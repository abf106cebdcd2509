#include "moe/expert_layout.h"

#include <string_view>
#include <utility>

#include "tessera/mesh.h"

namespace tessera::moe {
namespace {

/// Without ep the ranks of the sparse mesh are those of the dense one.
ParameterLayout over_experts(const ExpertShare& share) {
  ParameterLayout layout;
  if (share.ep > 1) {
    layout.mesh = MeshKind::kSparse;
    layout.axes.push_back(AxisPlacement::cut(axis::kExpert, share.ep, 0));
  } else if (share.etp == 1 && share.tp > 1) {
    layout.axes.push_back(AxisPlacement::summed(axis::kTensor, share.tp));
  }
  return layout;
}

std::string_view inner_axis(const ExpertShare& share) {
  return share.ep > 1 ? axis::kExpertTensor : axis::kTensor;
}

}  // namespace

ParameterLayout expert_layout(const ExpertShare& share, int inner_dim,
                              std::vector<std::int64_t> cut_shape) {
  ParameterLayout layout = over_experts(share);
  if (share.etp == 1) return layout;
  layout.cut_shape = std::move(cut_shape);
  layout.axes.push_back(AxisPlacement::cut(inner_axis(share), share.etp, inner_dim));
  return layout;
}

ParameterLayout expert_sum_layout(const ExpertShare& share) {
  ParameterLayout layout = over_experts(share);
  if (share.etp > 1) layout.axes.push_back(AxisPlacement::summed(inner_axis(share), share.etp));
  return layout;
}

}  // namespace tessera::moe
