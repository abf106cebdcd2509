// The keys of experts that Qwen3's families with experts share.
//
// Private to the families' own readers. Next: ../spec_keys.h.
#pragma once

#include "models/family.h"

namespace tessera::models {

/// Which layers have experts, their sizes and their router. The counts are read by
/// read_expert_counts().
KeyRows qwen_expert_rows();

}  // namespace tessera::models
