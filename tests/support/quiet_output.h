// What a test's runs print is not what the test says.
#pragma once

#include <iostream>
#include <sstream>

namespace tessera::test {

/// While it lives, std::cout is swallowed.
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
