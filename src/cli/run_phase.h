// How far a run has come, for whoever has to say what its failure means. Pure.
#pragma once

#include <atomic>
#include <cstdint>

namespace tessera::cli {

enum class Phase : std::uint8_t { kPreparing, kStepping };

/// Set by the trainer's callback, when everything was checked and the first step begins. Threads:
/// any.
class RunPhase {
 public:
  void begin_steps() { stepping_.store(true); }
  Phase now() const { return stepping_.load() ? Phase::kStepping : Phase::kPreparing; }

 private:
  std::atomic<bool> stepping_{false};
};

}  // namespace tessera::cli
