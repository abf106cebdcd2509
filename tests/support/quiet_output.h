// Keeps what runs print out of the output of their test.
#pragma once

#include <iostream>
#include <sstream>

namespace tessera::test {

/// Discards what is written to std::cout during its lifetime.
class QuietOutput {
 public:
  QuietOutput() : before_(std::cout.rdbuf(swallowed_.rdbuf())) {}
  ~QuietOutput() { std::cout.rdbuf(before_); }
  QuietOutput(const QuietOutput&) = delete;
  QuietOutput& operator=(const QuietOutput&) = delete;

 private:
  std::ostringstream swallowed_;
  std::streambuf* before_;
};

}  // namespace tessera::test
