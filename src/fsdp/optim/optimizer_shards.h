// What the optimizers share: what their numbers may be, and the values that they step, whatever a
// shard is stored in.
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

/// At least 0 and below `highest`, which stays outside. Errors: kUsage.
inline void check_option(const char* name, double value,
                         double highest = std::numeric_limits<double>::infinity()) {
  TESSERA_CHECK(value >= 0 && value < highest, ErrorKind::kUsage, "optimizer: found ", name, " ",
                value, ", expected at least 0 and below ", highest);
}

/// Elements of a shard whose float32 values an optimizer forms at a time. Kernels that divide a
/// tensor by cache lines treat parts of this size as they would the whole: the bits of an update do
/// not depend on it.
inline constexpr std::int64_t kMasterPart = std::int64_t{1} << 20;
/// The same on a device, which takes as long for few elements as for many.
inline constexpr std::int64_t kMasterPartOfDevices = std::int64_t{1} << 25;

/// A stretch of one shard in the dtype in which it is stepped.
struct Stepped {
  at::Tensor values;       ///< to be updated in place
  at::Tensor gradient;     ///< same dtype
  layout::Range elements;  ///< of the shard's
};

/// Where a 16-bit shard has its further bits.
class MasterOfShard {
 public:
  /// What is kept beside the shard, made for the values that it has now: an undefined tensor where
  /// the contract needs none.
  static at::Tensor make(const ShardView& view);
  /// The name of that in checkpoints; "" for none.
  static const char* name(Master master);
  static std::optional<DType> dtype(Master master);

  /// Calls `update` for the shard's chunks and keeps what it leaves. `changed`: somebody else
  /// has written the shard since it was last stepped.
  void step(const ShardView& view, const at::Tensor& kept, bool changed,
            const std::function<void(const Stepped&)>& update);

 private:
  void step_split(const ShardView& view, const at::Tensor& remainder,
                  const std::function<void(const Stepped&)>& update);
  void step_copy(const ShardView& view, const at::Tensor& master,
                 const std::function<void(const Stepped&)>& update);
  at::Tensor widened(const at::Tensor& gradient);

  at::Tensor values_, gradient_;  // one stretch after the other
};

}  // namespace tessera::fsdp
