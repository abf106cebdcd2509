// Where a step goes (`tessera train --profile`): self time of every kernel, of waiting and of the
// optimizer on the rank's thread.
//
// Uses libtorch's RecordFunction, so it sees each ATen call of forward and backward and our own
// scopes ("tessera::..."). What none of them covers is our own code and autograd's. It costs a few
// per cent while it is on.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tessera::train {

enum class Profiling : std::uint8_t { kNo, kYes };

class StepProfile {
 public:
  /// Starts to listen on this thread. One at a time a thread. On a device calls are timed by what
  /// its stream does, and the host waits for the end of each step that counts.
  explicit StepProfile(c10::Device device = c10::kCPU);
  ~StepProfile();
  StepProfile(const StepProfile&) = delete;
  StepProfile& operator=(const StepProfile&) = delete;

  /// Brackets the steps that count.
  void begin_step();
  void end_step();

  /// Shares of the counted steps by kind ("products", "other kernels", "waiting for communication",
  /// "optimizer", "own code"), then "step_ms", then the most expensive names in ms a step.
  std::string to_json() const;
  /// The same for people: ms a step and per cent, which add up to the whole step.
  std::string to_table() const;

 private:
  struct State;
  struct Summary;
  Summary summary() const;

  std::unique_ptr<State> state_;
};

}  // namespace tessera::train
