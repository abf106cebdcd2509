// DtypeWatch: which operations of a forward leave the dtype that their unit computes in.
//
// One float32 buffer, parameter or constant that meets bfloat16 activations makes float32 of all
// that follows, at twice the memory and with other numbers, and nothing says so. While a watch is
// alive, each operation that this thread calls inside a unit is looked at. It is not a profiler,
// and nothing is looked at while there is none. Operations that compute wider on purpose (a norm's
// mean, a softmax) stand in a WideScope (wide_scope.h). Kernels without an operator of their own
// are not seen; what they return is. Next: model_contract.h for UnitContract::activation.
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
  std::string unit;   ///< its name, "(root)" for the outermost
  std::string op;     ///< "aten::mul"
  DType expected;     ///< the unit's activation
  std::string found;  ///< "Float"
  /// "buffer layers.0.scale", "parameter w", "input 0 of unit layers.0", "a tensor that aten::ones
  /// made in unit layers.0", "the operation itself" (a cast)...; of all that follows from a result,
  /// what made that.
  std::string cause;
  std::int64_t count = 0;
  bool operator==(const DtypeFinding&) const = default;
};

/// One line each.
std::string to_string(const std::vector<DtypeFinding>& findings);

/// Looks at the forwards of `model` on this thread while it lives, in units whose activation is
/// known. One a thread and a model at a time.
class DtypeWatch {
 public:
  explicit DtypeWatch(const ShardedBase& model);
  ~DtypeWatch();
  DtypeWatch(const DtypeWatch&) = delete;
  DtypeWatch& operator=(const DtypeWatch&) = delete;

  /// In the order in which they were first met.
  std::vector<DtypeFinding> findings() const;

  class Observer;

 private:
  std::unique_ptr<Observer> observer_;
};

}  // namespace tessera
