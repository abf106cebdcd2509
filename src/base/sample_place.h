// Where a forward stands in training: what counter-based dropout is keyed by.
//
// A layer sees rows of a micro-batch, not which rows of the step they are. Whoever runs the
// micro-batch says so for the thread; checkpoint() restores it when it recomputes, as it does
// random state. Without a scope nothing is being trained, and nothing is dropped.
#pragma once

#include <cstdint>
#include <optional>

namespace tessera {

struct SamplePlace {
  std::uint64_t seed = 0;
  std::int64_t step = 0;       ///< from 1
  std::int64_t first_row = 0;  ///< row 0 of the micro-batch, counted over the step's global batch
  bool operator==(const SamplePlace&) const = default;
};

/// Of this thread.
std::optional<SamplePlace> sample_place();

/// Sets it while it lives; scopes nest.
class SampleScope {
 public:
  explicit SampleScope(std::optional<SamplePlace> place);
  ~SampleScope();
  SampleScope(const SampleScope&) = delete;
  SampleScope& operator=(const SampleScope&) = delete;

 private:
  std::optional<SamplePlace> outer_;
};

}  // namespace tessera
