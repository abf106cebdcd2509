// The common parts of optimizers: checks of their numbers, and the values that they update, in any
// storage dtype of a shard.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>

#include "layout/range.h"
#include "tessera/contract.h"
#include "tessera/error.h"
#include "tessera/optim.h"

namespace tessera::fsdp {

/// Requires that `value` is at least 0 and below `highest`. Errors: kUsage.
inline void check_option(const char* name, double value,
                         double highest = std::numeric_limits<double>::infinity()) {
  TESSERA_CHECK(value >= 0 && value < highest, ErrorKind::kUsage, "optimizer: found ", name, " ",
                value, ", expected at least 0 and below ", highest);
}

/// Number of a shard's elements whose float32 values an optimizer forms at a time. Kernels that
/// split a tensor by cache lines treat parts of this size as they would the whole, so that the bits
/// of an update do not depend on it.
inline constexpr std::int64_t kMasterPart = std::int64_t{1} << 20;
/// The number on a device, where few elements take as long as many.
inline constexpr std::int64_t kMasterPartOfDevices = std::int64_t{1} << 25;

/// A range of one shard in the dtype in which it is updated.
struct Stepped {
  at::Tensor values;       ///< updated in place
  at::Tensor gradient;     ///< in the dtype of `values`
  layout::Range elements;  ///< the range in the shard
};

/// The state that has the further bits of a 16-bit shard.
class MasterOfShard {
 public:
  /// Makes that state for the shard's current values; an undefined tensor where the contract needs
  /// none.
  static at::Tensor make(const ShardView& view);
  /// Returns the name of the state in checkpoints; "" for none.
  static const char* name(Master master);
  static std::optional<DType> dtype(Master master);

  /// Calls `update` for the shard's chunks and stores the results. `changed`: whether the shard was
  /// written to since its last update.
  void step(const ShardView& view, const at::Tensor& kept, bool changed,
            const std::function<void(const Stepped&)>& update);

 private:
  void step_split(const ShardView& view, const at::Tensor& remainder,
                  const std::function<void(const Stepped&)>& update);
  void step_copy(const ShardView& view, const at::Tensor& master,
                 const std::function<void(const Stepped&)>& update);
  at::Tensor widened(const at::Tensor& gradient);

  at::Tensor values_, gradient_;  // for one range at a time
};

}  // namespace tessera::fsdp
