#include "train/shard_pieces.h"

#include "train/file_forms.h"

namespace tessera::train {
namespace {

/// Parameters lie over data axes only.
const ParameterLayout& layout_of(const GradContract& /*contract*/) {
  static const ParameterLayout data_axes_only;
  return data_axes_only;
}
std::vector<int> coordinates_of(const ShardView& /*view*/) { return {}; }

}  // namespace

std::vector<layout::Piece> pieces_of(const ShardView& view, const layout::FileShape& file) {
  return pieces_in_file(layout_of(*view.contract), view.contract->shape, file, coordinates_of(view),
                        {view.begin, view.end});
}

layout::FileShape as_one_tensor(const GradContract& contract) {
  return {1, layout::cut_shape(layout_of(contract), contract.shape)};
}

bool is_first_holder(const ShardView& view) {
  const ParameterLayout& layout = layout_of(*view.contract);
  const std::vector<int> coordinates = coordinates_of(view);
  for (std::size_t i = 0; i < layout.axes.size(); ++i) {
    // Of a trained parameter that is summed over the axis each rank has other elements.
    const PlacementKind kind = layout.axes[i].parameter.kind;
    const bool same = kind == PlacementKind::kInvariant ||
                      (kind == PlacementKind::kReplicate && view.contract->replicated());
    if (same && coordinates[i] != 0) return false;
  }
  return true;
}

}  // namespace tessera::train
