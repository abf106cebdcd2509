#include "checkpoint/file_forms.h"

#include <algorithm>

#include "tessera/error.h"

namespace tessera::checkpointing {
namespace {

bool cuts_nothing(const ParameterLayout& layout) {
  return std::ranges::none_of(layout.axes, [](const AxisPlacement& axis) {
    return axis.parameter.kind == PlacementKind::kShard;
  });
}

/// Returns the range of a whole parameter as a range of each tensor that it reaches.
std::vector<layout::Piece> ranges_of_tensors(const layout::FileShape& file, layout::Range range) {
  const TensorBox whole = TensorBox::whole(file.shape);
  const std::int64_t each = whole.numel();
  std::vector<layout::Piece> found;
  for (std::int64_t begin = range.begin; begin < range.end;) {
    const std::int64_t tensor = begin / each;
    const std::int64_t end = std::min(range.end, (tensor + 1) * each);
    found.push_back({{begin, end},
                     static_cast<std::size_t>(tensor),
                     whole,
                     {begin - tensor * each, end - tensor * each}});
    begin = end;
  }
  return found;
}

}  // namespace

FileForm FileForms::of(const GradContract& contract, const std::string& name) const {
  const auto found = stacked_.find(contract.name);
  return found == stacked_.end() ? FileForm{{name}, {1, contract.shape}} : found->second;
}

std::vector<std::string> FileForms::names_of(const std::string& parameter) const {
  const auto found = stacked_.find(parameter);
  return found == stacked_.end() ? std::vector{parameter} : found->second.names;
}

std::vector<layout::Piece> pieces_in_file(const ParameterLayout& layout,
                                          const std::vector<std::int64_t>& shape,
                                          const layout::FileShape& file,
                                          const std::vector<int>& coordinates,
                                          layout::Range range) {
  if (cuts_nothing(layout)) return ranges_of_tensors(file, range);
  return layout::pieces(layout, shape, file, coordinates, range);
}

layout::Piece part_of(const layout::Piece& piece, std::int64_t begin, std::int64_t end) {
  TESSERA_INVARIANT(0 <= begin && begin <= end && end <= piece.local.size(), "a part of a piece");
  layout::Piece part = piece;
  part.local = {piece.local.begin + begin, piece.local.begin + end};
  part.in_box = {piece.in_box.begin + begin, piece.in_box.begin + end};
  return part;
}

}  // namespace tessera::checkpointing
