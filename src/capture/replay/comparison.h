// Comparison: compares what a program gives with what eager operations gave, step by step.
#pragma once

#include <string>

#include "capture/replay/live_entry.h"
#include "capture/replay/tape.h"

namespace tessera::capture {

class Comparison {
 public:
  /// `eager` keeps bits and has the same steps as the program of `replay`; both outlive this.
  Comparison(const Tape& eager, const LiveEntry& replay) : eager_(eager), replay_(replay) {}
  /// Returns the function to call as the program runs.
  StepSeen seen() {
    return [this](std::size_t step) { look_at(step); };
  }
  /// Returns the first difference, by its operation or parameter; empty: none.
  const std::string& difference() const { return difference_; }

 private:
  void look_at(std::size_t step);
  void look_at_gradient(const TapeGradient& handed, std::size_t step);
  void differs(const std::string& what);

  const Tape& eager_;
  const LiveEntry& replay_;
  std::string difference_;
};

}  // namespace tessera::capture
