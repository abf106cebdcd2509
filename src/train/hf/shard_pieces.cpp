#include "train/hf/shard_pieces.h"

#include "train/hf/file_forms.h"

namespace tessera::train {

std::vector<layout::Piece> pieces_of(const ShardView& view, const layout::FileShape& file) {
  return pieces_in_file(view.contract->layout, view.contract->shape, file, view.coordinates,
                        {view.begin, view.end});
}

layout::FileShape as_one_tensor(const GradContract& contract) {
  return {1, layout::cut_shape(contract.layout, contract.shape)};
}

bool is_first_holder(const ShardView& view) {
  const ParameterLayout& layout = view.contract->layout;
  for (std::size_t i = 0; i < layout.axes.size(); ++i) {
    // Of a trained parameter that is summed over the axis each rank has other elements.
    const PlacementKind kind = layout.axes[i].parameter.kind;
    const bool same = kind == PlacementKind::kInvariant ||
                      (kind == PlacementKind::kReplicate && view.contract->replicated());
    if (same && view.coordinates[i] != 0) return false;
  }
  return true;
}

}  // namespace tessera::train
