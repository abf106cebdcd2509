// Counts what becomes of a run's regions (tessera/compile.h), step by step.
#pragma once

#include <string>

#include "tessera/compile.h"
#include "tessera/shard.h"

namespace tessera::train {

class ReplayedCalls {
 public:
  explicit ReplayedCalls(const ShardedBase& model) : model_(model) {}
  /// The calls of this rank since the last call of this.
  ReplayCalls of_step();
  /// All so far, and why some were eager, in one line.
  std::string as_text() const;

 private:
  const ShardedBase& model_;
  ReplayCalls before_;
};

}  // namespace tessera::train
