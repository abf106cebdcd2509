// How far a run has come, for whoever has to say what its failure means. Pure.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

namespace tessera::cli {

enum class Phase : std::uint8_t { kPreparing, kStepping };

/// Set by the trainer's callback, when everything was checked and the first step begins. Threads:
/// any.
class RunPhase {
 public:
  /// `prepared` is called as the first step begins: what it throws is still about the preparation.
  explicit RunPhase(std::function<void()> prepared = {}) : prepared_(std::move(prepared)) {}
  void begin_steps() {
    if (prepared_) prepared_();
    stepping_.store(true);
  }
  Phase now() const { return stepping_.load() ? Phase::kStepping : Phase::kPreparing; }

 private:
  const std::function<void()> prepared_;
  std::atomic<bool> stepping_{false};
};

}  // namespace tessera::cli
