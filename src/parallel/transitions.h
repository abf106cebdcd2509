// Transitions between placements: where layers communicate, forward and backward. (Besides them do
// the loss over a cut vocabulary, nn/loss.h, and the dispatch to experts,
// moe/experts.h, whose derivatives are their own.)
//
// Local tensors carry no placement; what a layer does to it is one of these, each a fixed pair of a
// forward and its backward. The placement of a gradient follows from that of the tensor alone:
//
//   tensor     R replicate   P partial   I invariant   S(d) shard
//   gradient   P             R           I             S(d)
//
//   forward               does               backward does
//   all_reduce     P->R   sum                sum                R's gradient P -> P's gradient R
//   all_reduce     P->I   sum                nothing            I -> R
//   copy           I->R   nothing            sum                P -> I
//   all_gather     S->R   gather             reduce-scatter     P -> S
//   all_gather     S->I   gather             slice              I -> S
//   reduce_scatter P->S   reduce-scatter     gather             S -> R
//   slice          I->S   slice              gather             S -> I
//   slice          R->S   slice              pad with zeros     S -> P
//   pad            S->P   pad with zeros     slice              R -> S
//   only_first     R->P   zeros but rank 0   zeros but rank 0   R -> P
//   all_to_all     S->S   rows change rank   rows go back       S -> S
//
// Collective, blocking, from the rank's own thread; every rank calls the same ones in the same
// order, and autograd runs the backwards in the same order where graphs are the same: whether a
// tensor requires a gradient must not differ between ranks. Addends travel in the axis' reduce
// dtype; 16-bit ones are added in fp32 and rounded once, to the tensor's dtype or the one asked
// for. `where` names the caller: ranks that mean different collectives are both named. Second
// derivatives are refused (kUsage). Bytes: docs/communication.md. Next: axis.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <string>

#include "parallel/axis.h"
#include "parallel/collectives.h"

namespace tessera::parallel {

enum class To : std::uint8_t { kReplicate, kInvariant };
enum class From : std::uint8_t { kReplicate, kInvariant };

/// P -> `to`.
at::Tensor all_reduce(const at::Tensor& x, const Axis& axis, To to, const std::string& where,
                      SumDtype result = std::nullopt);

/// I -> R.
at::Tensor copy(const at::Tensor& x, const Axis& axis, const std::string& where);

/// S(shard.dim) -> `to`. Errors: kUsage for a part that is not this rank's.
at::Tensor all_gather(const at::Tensor& x, const Axis& axis, const Shard& shard, To to,
                      const std::string& where);

/// P -> S(shard.dim); parts are equal unless shard.total says otherwise. Errors: kUsage.
at::Tensor reduce_scatter(const at::Tensor& x, const Axis& axis, const Shard& shard,
                          const std::string& where, SumDtype result = std::nullopt);

/// `from` -> S(shard.dim); parts as in reduce_scatter. Errors: kUsage.
at::Tensor slice(const at::Tensor& x, const Axis& axis, const Shard& shard, From from,
                 const std::string& where);

/// S(shard.dim) -> P.
at::Tensor pad(const at::Tensor& x, const Axis& axis, const Shard& shard, const std::string& where);

/// R -> P.
at::Tensor only_first(const at::Tensor& x, const Axis& axis);

/// Rows between the two ends of an all_to_all. What is computed until finish() goes on beside the
/// exchange, and so does its backward beside the way back: autograd takes them in reverse.
class MovingRows {
 public:
  /// [rows received, ...]: waits for them. Once.
  at::Tensor finish();

 private:
  friend MovingRows begin_all_to_all(const at::Tensor& rows, const Axis& axis, const Splits& splits,
                                     const std::string& where,
                                     std::function<void()> meanwhile_back);
  at::Tensor arriving_;
  c10::intrusive_ptr<torch::CustomClassHolder> under_way_;  ///< null: arriving_ is there
};
/// S(0) -> S(0): rows to other ranks, in rank order, issued here. `meanwhile_back` is called in each
/// backward while the rows' gradients travel back: behind the backward of what was computed until
/// finish(), and before they are waited for.
MovingRows begin_all_to_all(const at::Tensor& rows, const Axis& axis, const Splits& splits,
                            const std::string& where, std::function<void()> meanwhile_back = {});
/// Both ends at once.
at::Tensor all_to_all(const at::Tensor& rows, const Axis& axis, const Splits& splits,
                      const std::string& where);

}  // namespace tessera::parallel
