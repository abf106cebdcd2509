// A complete small training config for the configuration tests.
#pragma once

#include "support/temporary_folder.h"

namespace tessera::train {

inline constexpr const char* kSmallConfig = R"(device = "cpu"
[model]
config = "model.json"
[data]
path = "book.txt"
[training]
steps = 20
seq_len = 64
[optimizer]
lr = 1e-3
)";

}  // namespace tessera::train
