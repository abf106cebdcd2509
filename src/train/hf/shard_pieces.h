// Where the elements of a rank's shard lie in the tensors of files, whatever the layout.
#pragma once

#include <vector>

#include "layout/local_part.h"
#include "tessera/shard.h"

namespace tessera::train {

/// In the order of the shard's elements: Piece::local counts them in the flattened part of this
/// rank, as ShardView::begin does.
std::vector<layout::Piece> pieces_of(const ShardView& view, const layout::FileShape& file);

/// The parameter as a file would hold it in one tensor, of the shape that is cut.
layout::FileShape as_one_tensor(const GradContract& contract);

/// Of the ranks that hold the same elements (replicas of the data aside) exactly one does.
bool is_first_holder(const ShardView& view);

}  // namespace tessera::train
