// `--section.key VALUE` among the words of a command line. Pure; no other option has a dot in its
// name.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "train/config.h"

namespace tessera::cli {

using Overrides = std::vector<std::pair<std::string, std::string>>;

struct SplitWords {
  Overrides overrides;             ///< in their order: the last one wins
  std::vector<std::string> other;  ///< everything else, in its order
};

/// Takes `--section.key VALUE`, `--section.key=VALUE` and the same of keys at top level out of
/// `words`. Errors: kUsage for one without a VALUE. Whether the key exists is apply()'s to say.
SplitWords split_overrides(const std::vector<std::string>& words);

/// Errors: as train::apply_override.
void apply(const Overrides& overrides, train::Config& config);

}  // namespace tessera::cli
