// Copies between host and device that are on their way until a host thread has waited for them.
//
// A copy to the host shows its target as NaN until it lands (integers with every bit turned,
// booleans negated), and as unreadable where it is pinned: so code that reads too early fails each
// time. A copy from pinned memory is checked when it lands: a GPU reads the source at some time
// between the two.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "sim/clocks.h"

namespace tessera::sim {

/// Threads: the holder of the simulator's mutex.
class LateCopies {
 public:
  /// Copies that have landed, to be destroyed without the mutex: tensors free memory of the
  /// simulator.
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
