// Transitions: the only ways in which an activation changes its placement over an axis, each with
// its backward.
//
// R the same values on every rank, whose gradients are addends; P an addend on every rank, whose
// gradients are the same; S(d) a part along dim d; I the same values and the same gradients. Local
// tensors carry no type: which transition stands where is what a layer says, and the type of a
// gradient follows from that of its tensor alone (R -> P, P -> R, S -> S, I -> I). With one rank
// each is the identity. All run on the calling thread, forward and backward in the same order on
// all ranks, also where a rank has no rows. Source: the pairs of design.md section 5; Megatron-LM's
// mappings. Next: axis.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "parallel/axis.h"

namespace tessera::parallel {

/// I -> R: nothing; backward all_reduce (P -> I).
at::Tensor copy_in(const at::Tensor& x, const Axis& axis);
/// P -> I: all_reduce; backward nothing (I -> R).
at::Tensor all_reduce_out(const at::Tensor& x, const Axis& axis);
/// P -> R: all_reduce; backward all_reduce (P -> R).
at::Tensor all_reduce(const at::Tensor& x, const Axis& axis);

/// S(dim) -> R: all_gather of equal parts; backward reduce_scatter (P -> S).
at::Tensor gather_shards(const at::Tensor& x, const Axis& axis, std::int64_t dim);
/// S(dim) -> I: all_gather of the parts of `whole`; backward the own part (I -> S).
at::Tensor gather_invariant(const at::Tensor& x, const Axis& axis, std::int64_t dim,
                            std::int64_t whole);
/// P -> S(dim): reduce_scatter into equal parts; backward all_gather (S -> R).
at::Tensor reduce_scatter(const at::Tensor& x, const Axis& axis, std::int64_t dim);

/// I -> S(dim): the own part; backward all_gather (S -> I).
at::Tensor slice_invariant(const at::Tensor& x, const Axis& axis, std::int64_t dim);
/// R -> S(dim): the own part; backward zeros around it (S -> P).
at::Tensor slice_replicated(const at::Tensor& x, const Axis& axis, std::int64_t dim);
/// S(dim) -> P: zeros around the part of `whole`; backward the own part (R -> S).
at::Tensor pad_shards(const at::Tensor& x, const Axis& axis, std::int64_t dim, std::int64_t whole);
/// R -> P: the first rank's; backward likewise (R -> P). What is added to a Partial sum once.
at::Tensor only_first(const at::Tensor& x, const Axis& axis);

}  // namespace tessera::parallel
