// Where a step goes: self time of every kernel, of waiting and of the optimizer on the rank's own
// thread.
//
// Uses libtorch's RecordFunction, so it sees each ATen call of forward and backward and our own
// scopes
// ("tessera::..."). It costs a few per cent while it is on. Switched on by TESSERA_PROFILE=1 until
// --profile.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>

namespace tessera::train {

class StepProfile {
 public:
  /// Starts to listen on this thread. One at a time a thread.
  StepProfile();
  ~StepProfile();
  StepProfile(const StepProfile&) = delete;
  StepProfile& operator=(const StepProfile&) = delete;

  /// Brackets the steps that count.
  void begin_step();
  void end_step();

  /// Shares of the counted steps by kind ("products", "other kernels", "waiting for communication",
  /// "optimizer", "own code"), then "step_ms", then the ten most expensive names in ms a step.
  std::string to_json() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::train
