// LayerType: how far back the attention of one layer looks.
#pragma once

#include <cstdint>

namespace tessera::models {

enum class LayerType : std::uint8_t {
  kSliding,  ///< query i sees key j where i - window < j <= i
  kFull,
};

// As transformers' `layer_types` spell them.
inline constexpr const char* kSlidingAttention = "sliding_attention";
inline constexpr const char* kFullAttention = "full_attention";

}  // namespace tessera::models
