// Transition: a forward and its backward, and the parts of a tensor that they take and return.
// Private to parallel/ and to tests that inject faults.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/zeros.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "layout/range.h"
#include "parallel/axis.h"
#include "parallel/collectives.h"
#include "tessera/error.h"

namespace tessera::parallel {

/// Holds what is needed, in addition to kind and axis, to compute a transition's results from the
/// inputs of all ranks.
struct TransitionForm {
  std::int64_t dim = 0;                              ///< the dim that is cut or joined
  std::optional<std::int64_t> total = std::nullopt;  ///< see Shard
  /// Whether values and gradients of the whole tensor are the same on every rank (I and not R).
  bool is_invariant = false;
  Splits splits = {};  ///< rows to other ranks
};

/// A transition of one tensor. Neither direction saves tensors.
class Transition : public torch::CustomClassHolder {
 public:
  Transition(std::string_view what, const Axis& over, std::string caller)
      : kind(what), axis(over), where(std::move(caller)) {}
  virtual at::Tensor forward(const at::Tensor& x) const = 0;
  virtual at::Tensor backward(const at::Tensor& grad) const = 0;
  virtual TransitionForm form() const { return {}; }

  const std::string_view kind;  ///< "all_gather"
  const Axis axis;
  const std::string where;
};

at::Tensor apply_transition(const at::Tensor& x, c10::intrusive_ptr<Transition> transition);

template <class T, class... Args>
at::Tensor apply(const at::Tensor& x, Args&&... args) {
  return apply_transition(x, c10::make_intrusive<T>(std::forward<Args>(args)...));
}

/// Returns the size of the whole dim. Errors: kUsage where parts are not equal and shard.total is
/// not set.
inline std::int64_t whole_of(const at::Tensor& x, const Axis& axis, const Shard& shard,
                             const std::string& where) {
  const std::int64_t total = x.size(shard.dim);
  TESSERA_CHECK(shard.total ? *shard.total == total : total % axis.size == 0, ErrorKind::kUsage,
                where, ": found ", total, " in dim ", shard.dim, ", expected ",
                shard.total ? concat(*shard.total) : concat("a multiple of ", axis.size), " (axis ",
                axis.name, ")");
  return total;
}

/// Errors: kUsage, showing `found`, where x is not this rank's part of `total`.
template <class Found>
void check_part(const at::Tensor& x, const Found& found, const Axis& axis, std::int64_t dim,
                std::int64_t total, const std::string& where) {
  const std::int64_t expected = layout::part_of(total, axis.size, axis.rank).size();
  TESSERA_CHECK(x.size(dim) == expected, ErrorKind::kUsage, where, ": found a part of ", found,
                ", expected ", expected, " of ", total, " in dim ", dim, " (axis ", axis.name,
                ", rank ", axis.rank, ")");
}

/// Returns this rank's part: a view where all dims before the cut have size 1, else a copy.
inline at::Tensor own_part(const at::Tensor& x, const Axis& axis, std::int64_t dim) {
  const layout::Range part = layout::part_of(x.size(dim), axis.size, axis.rank);
  return x.narrow(dim, part.begin, part.size()).contiguous();
}

inline at::Tensor in_zeros(const at::Tensor& own, const Axis& axis, std::int64_t dim,
                           std::int64_t total) {
  std::vector<std::int64_t> sizes = own.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = total;
  const layout::Range part = layout::part_of(total, axis.size, axis.rank);
  const at::Tensor whole = at::zeros(sizes, own.options());
  whole.narrow(dim, part.begin, part.size()).copy_(own);
  return whole;
}

}  // namespace tessera::parallel
