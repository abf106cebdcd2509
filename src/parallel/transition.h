// What transitions are made of: a forward and the backward that belongs to it, and the parts of a
// tensor that they take and give. Private to parallel/ and to the tests that put faults in.
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

/// Holds all that is needed beside kind and axis to work out a transition's results from the inputs of
/// all ranks.
struct TransitionForm {
  std::int64_t dim = 0;                              ///< that is cut or joined
  std::optional<std::int64_t> total = std::nullopt;  ///< as Shard
  /// The whole tensor's values and gradients are the same on every rank (I and not R).
  bool is_invariant = false;
  Splits splits = {};  ///< of rows to other ranks
};

/// Of one tensor. Knows what it needs: neither direction saves tensors.
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

/// The size of the whole dim. Errors: kUsage where parts are not equal and nothing says that they
/// need not be.
inline std::int64_t whole_of(const at::Tensor& x, const Axis& axis, const Shard& shard,
                             const std::string& where) {
  const std::int64_t total = x.size(shard.dim);
  TESSERA_CHECK(shard.total ? *shard.total == total : total % axis.size == 0, ErrorKind::kUsage,
                where, ": found ", total, " in dim ", shard.dim, ", expected ",
                shard.total ? concat(*shard.total) : concat("a multiple of ", axis.size), " (axis ",
                axis.name, ")");
  return total;
}

/// Errors: kUsage, showing `found` of it, where x is not this rank's part of `total`.
template <class Found>
void check_part(const at::Tensor& x, const Found& found, const Axis& axis, std::int64_t dim,
                std::int64_t total, const std::string& where) {
  const std::int64_t expected = layout::part_of(total, axis.size, axis.rank).size();
  TESSERA_CHECK(x.size(dim) == expected, ErrorKind::kUsage, where, ": found a part of ", found,
                ", expected ", expected, " of ", total, " in dim ", dim, " (axis ", axis.name,
                ", rank ", axis.rank, ")");
}

/// A view where only dims of size 1 lie before the cut, else a copy.
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
