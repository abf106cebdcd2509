// Transitions between placements: the communication of layers, forward and backward. (The loss over
// a cut vocabulary, nn/loss.h, and the dispatch to experts, moe/experts.h, also communicate; they
// have their own derivatives.)
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
// All are collective and blocking, on the rank's thread. Every rank calls the same ones in the same
// order, and autograd runs the backwards in the same order where graphs are the same: whether a
// tensor requires a gradient must not differ between ranks. Addends are sent in the axis' reduce
// dtype; 16-bit ones are added in fp32 and rounded once, to the tensor's dtype or the requested
// one. `where` names the caller: where ranks mean different collectives, the error names both.
// Second derivatives are refused (kUsage). Bytes: docs/communication.md. Next: axis.h.
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

/// Rows between the two ends of an all_to_all. Operations until finish() overlap with the exchange,
/// and their backward with the exchange of gradients, since autograd runs in reverse.
class MovingRows {
 public:
  /// Waits for the rows and returns them: [rows received, ...]. Must be called at most once.
  at::Tensor finish();

 private:
  friend MovingRows begin_all_to_all(const at::Tensor& rows, const Axis& axis, const Splits& splits,
                                     const std::string& where,
                                     std::function<void()> meanwhile_back);
  at::Tensor arriving_;
  c10::intrusive_ptr<torch::CustomClassHolder> under_way_;  ///< null: arriving_ has its values
};
/// S(0) -> S(0): issues rows to other ranks, in rank order. `meanwhile_back` is called in each
/// backward while the rows' gradients are under way: after the backward of the operations until
/// finish(), and before the wait.
MovingRows begin_all_to_all(const at::Tensor& rows, const Axis& axis, const Splits& splits,
                            const std::string& where, std::function<void()> meanwhile_back = {});
/// Issues and waits.
at::Tensor all_to_all(const at::Tensor& rows, const Axis& axis, const Splits& splits,
                      const std::string& where);

}  // namespace tessera::parallel
