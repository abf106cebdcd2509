// PatchGrid: which patches of an image are pooled into which soft token.
//
// An image is a full rectangle of patches, in any order, with padding after or between them; k by k
// neighbours become one soft token. Every fault of a batch is refused here, with the image's
// number. Short symbols: N images, P patches, k pooling kernel, M soft tokens. Next:
// gemma4/gemma4_vision.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "models/spec_parts.h"

namespace tessera::models {

struct PatchGrid {
  /// [M, k*k] i64, numbers of patches (image * P + patch): row-major over (image, cell). With k = 1
  /// the patches as they come.
  at::Tensor patches;
  std::vector<std::int64_t> tokens;  ///< soft tokens, one an image
};

/// position_ids [N, P, 2] i64. Errors: kFormat for another shape or dtype, P that is not a multiple
/// of k^2, half a position, one outside the position table, an image that is all padding, no full
/// rectangle, or whose sides are not multiples of k.
PatchGrid patch_grid(const at::Tensor& position_ids, const ImagePatches& patches);

}  // namespace tessera::models
