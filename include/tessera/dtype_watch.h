// DtypeWatch: finds the operations of a forward that leave the compute dtype of their unit.
//
// One float32 buffer, parameter or constant that meets bfloat16 activations silently promotes all
// later activations to float32, with twice the memory and other numbers. While a watch is alive, it
// checks each operation that this thread calls inside a unit; without a watch nothing is checked.
// It is not a profiler. Operations that compute wider on purpose (a norm's mean, a softmax) stand
// in a WideScope (wide_scope.h). The watch does not see kernels without an operator of their own,
// but it sees their results. Next: model_contract.h for UnitContract::activation.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/shard.h"
#include "tessera/wide_scope.h"

namespace tessera {

/// Operations of one unit that gave another dtype for the same reason.
struct DtypeFinding {
  std::string unit;   ///< name of the unit, "(root)" for the outermost
  std::string op;     ///< "aten::mul"
  DType expected;     ///< UnitContract::activation
  std::string found;  ///< dtype of the result: "Float"
  /// The tensor that brought the other dtype: "buffer layers.0.scale", "parameter w", "input 0 of
  /// unit layers.0", "a tensor that aten::ones made in unit layers.0", or "the operation itself" (a
  /// cast). Where the tensor follows from an earlier finding, the cause of that one.
  std::string cause;
  std::int64_t count = 0;  ///< number of such operations
  bool operator==(const DtypeFinding&) const = default;
};

/// Prints one line for each finding.
std::string to_string(const std::vector<DtypeFinding>& findings);

/// Watches the forwards of `model` on this thread while it lives, in units with a known activation
/// dtype. A thread has one watch at a time, and so has a model.
class DtypeWatch {
 public:
  /// Starts to watch.
  explicit DtypeWatch(const ShardedBase& model);
  ~DtypeWatch();
  DtypeWatch(const DtypeWatch&) = delete;
  DtypeWatch& operator=(const DtypeWatch&) = delete;

  /// Returns the findings so far, in the order in which they were first met.
  std::vector<DtypeFinding> findings() const;

  class Observer;

 private:
  std::unique_ptr<Observer> observer_;
};

}  // namespace tessera
