#include "parallel/moves.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <vector>

#include "tessera/error.h"

namespace tessera::parallel {
namespace {

at::ScalarType on_wire(const at::Tensor& x, const Axis& axis) {
  return axis.sums().value_or(x.scalar_type());
}

/// The dtype in which addends are added.
at::ScalarType added_in(at::ScalarType wire) { return at::promote_types(wire, at::kFloat); }

at::Tensor all_reduced(const at::Tensor& x, const Axis& axis) {
  const at::ScalarType wire = on_wire(x, axis);
  at::Tensor data = x.to(wire).contiguous();
  const at::ScalarType sum = added_in(wire);
  if (sum == wire) {
    if (data.is_alias_of(x)) data = data.clone();
    axis.run(comm::AllReduce{data}, "all_reduce");
    return data.to(x.scalar_type());
  }
  const at::Tensor result = at::empty(x.sizes(), x.options().dtype(sum));
  axis.run(comm::AllReduce{data, result}, "all_reduce");
  return result.to(x.scalar_type());
}

/// [.., n * t, ..] -> [n, .., t, ..], contiguous: the part of each rank after the other.
at::Tensor by_rank(const at::Tensor& x, int ranks, std::int64_t dim) {
  return x.unflatten(dim, {ranks, x.size(dim) / ranks}).movedim(dim, 0).contiguous();
}

/// The inverse: [n, .., t, ..] -> [.., n * t, ..].
at::Tensor joined(const at::Tensor& parts, std::int64_t dim) {
  return parts.movedim(0, dim).flatten(dim, dim + 1);
}

at::Tensor reduce_scattered(const at::Tensor& x, const Axis& axis, std::int64_t dim) {
  TESSERA_INVARIANT(x.size(dim) % axis.size() == 0, "a dim of ", x.size(dim), " over ", axis.size(),
                    " ranks");
  const at::Tensor addends = by_rank(x.to(on_wire(x, axis)), axis.size(), dim);
  const at::Tensor result =
      at::empty(addends.sizes().slice(1), x.options().dtype(added_in(addends.scalar_type())));
  axis.run(comm::ReduceScatter{addends.view({-1}), result.view({-1})}, "reduce_scatter");
  return result.to(x.scalar_type());
}

/// Parts as long as the longest, so that every rank sends the same; what is too much is cut off.
at::Tensor all_gathered(const at::Tensor& x, const Axis& axis, const Split& split) {
  const int ranks = axis.size();
  const std::int64_t longest = part_of(split.whole, ranks, 0).size;
  TESSERA_INVARIANT(x.size(split.dim) == part_of(split.whole, ranks, axis.rank()).size,
                    "a part of another size");
  std::vector<std::int64_t> shape = x.sizes().vec();
  shape[static_cast<std::size_t>(split.dim)] = longest;
  shape.insert(shape.begin(), ranks);
  const at::Tensor parts = at::empty(shape, x.options());
  if (parts.numel() > 0) {
    parts.select(0, axis.rank()).narrow(split.dim, 0, x.size(split.dim)).copy_(x);
    axis.run(comm::AllGather{parts.view({-1})}, "all_gather");
  }
  if (longest * ranks == split.whole) return joined(parts, split.dim);
  std::vector<at::Tensor> pieces;
  for (int rank = 0; rank < ranks; ++rank) {
    pieces.push_back(
        parts.select(0, rank).narrow(split.dim, 0, part_of(split.whole, ranks, rank).size));
  }
  return at::cat(pieces, split.dim);
}

at::Tensor own_part(const at::Tensor& x, const Axis& axis, std::int64_t dim) {
  const Part part = part_of(x.size(dim), axis.size(), axis.rank());
  return x.narrow(dim, part.begin, part.size).contiguous();
}

at::Tensor padded(const at::Tensor& x, const Axis& axis, const Split& split) {
  const Part part = part_of(split.whole, axis.size(), axis.rank());
  std::vector<std::int64_t> shape = x.sizes().vec();
  shape[static_cast<std::size_t>(split.dim)] = split.whole;
  const at::Tensor whole = at::empty(shape, x.options()).zero_();
  whole.narrow(split.dim, part.begin, part.size).copy_(x);
  return whole;
}

}  // namespace

Part part_of(std::int64_t whole, int ranks, int rank) {
  const std::int64_t each = whole / ranks;
  const std::int64_t longer = whole % ranks;
  return {rank * each + std::min<std::int64_t>(rank, longer), each + (rank < longer ? 1 : 0)};
}

at::Tensor moved(Move move, const at::Tensor& x, const Axis& axis, const Split& split) {
  switch (move) {
    case Move::kIdentity:
      return x.alias();
    case Move::kAllReduce:
      return all_reduced(x, axis);
    case Move::kAllGather:
      return all_gathered(x, axis, split);
    case Move::kReduceScatter:
      return reduce_scattered(x, axis, split.dim);
    case Move::kOwnPart:
      return own_part(x, axis, split.dim);
    case Move::kPad:
      return padded(x, axis, split);
    case Move::kOnlyFirst:
      return axis.rank() == 0 ? x.alias() : at::zeros_like(x);
  }
  TESSERA_INVARIANT(false, "a move that is not listed");
}

}  // namespace tessera::parallel
