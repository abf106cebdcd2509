// Copies between host and device that are on their way until a host thread has waited for them.
//
// One to the host shows its target as NaN until it lands (integers with every bit turned, truths as
// untruths), and as unreadable where it is pinned: so code that reads too early fails each time. One from pinned memory is checked when it lands: a GPU
// reads the source somewhere between the two.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "sim/clocks.h"

namespace tessera::sim {

/// Threads: whoever holds the simulator's mutex.
class LateCopies {
 public:
  /// What has landed, to be let go without the mutex: tensors free memory of the simulator.
  struct Landed {
    std::vector<at::Tensor> tensors;
    std::vector<std::string> changed;  ///< a report for each source that was written too early
  };

  /// value: what arrives in `target`, both on the host, of one shape and dtype.
  void to_host(const Access& copy, const at::Tensor& target, const at::Tensor& value);
  void from_pinned(const Access& copy, const at::Tensor& source);
  /// Those that `known` is behind, in the order of their launches.
  Landed land(const Clock& known);

 private:
  struct Copy {
    Access access;
    at::Tensor host, value;
    bool arrives = false;
  };
  std::vector<Copy> copies_;
};

}  // namespace tessera::sim
