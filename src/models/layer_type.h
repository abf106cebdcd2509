// LayerType: how far back the attention of one layer looks.
#pragma once

#include <cstdint>

namespace tessera::models {

enum class LayerType : std::uint8_t {
  kSliding,  ///< query i sees key j where i - window < j <= i
  kFull,
};

}  // namespace tessera::models
