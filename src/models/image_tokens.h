// ImageTokens: what a batch must know of a model that sees images.
//
// Next: patch_grid.h.
#pragma once

#include <cstdint>

namespace tessera::models {

/// How a picture becomes soft tokens. The names are those of config.json's keys.
struct ImagePatches {
  std::int64_t patch_size = 0;               ///< pixels along each side of a patch
  std::int64_t pooling_kernel_size = 0;      ///< patches along each side of a soft token
  std::int64_t position_embedding_size = 0;  ///< positions along each side of a picture
};

struct ImageTokens {
  std::int64_t id = 0;  ///< stands in input_ids where a soft token goes
  ImagePatches patches;
};

}  // namespace tessera::models
