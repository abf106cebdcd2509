// A place for part of a test.
#pragma once

#include <utility>

#include "support/place.h"

namespace tessera::sim {

/// While it lives, ranks that are made are there; tests begin on the CPU.
class In {
 public:
  explicit In(const test::Place& where) : before_(std::exchange(test::place(), where)) {}
  ~In() { test::place() = before_; }
  In(const In&) = delete;
  In& operator=(const In&) = delete;

 private:
  const test::Place before_;
};

}  // namespace tessera::sim
