#include "models/expert_tokens.h"

#include <c10/util/accumulate.h>

#include "parallel/transitions.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

at::Tensor flat(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

/// R -> S(0), parts as equal as they can be.
at::Tensor own_rows_of(const at::Tensor& x, const parallel::Axis& axis) {
  return parallel::slice(x, axis, {0, x.size(0)}, parallel::From::kReplicate, "tokens of experts");
}

/// Without a gradient: the rows that slices along dim 0 give this rank.
at::Tensor own_rows(const at::Tensor& x, const parallel::Axis& axis) {
  return own_rows_of(x.detach(), axis);
}

}  // namespace

ExpertTokens::ExpertTokens(const ModelAxes& axes) : region_(axes.tensor) {
  if (region_.size() == 1) return;
  const ParallelDims& degrees = axes.degrees;
  if (degrees.etp > 1) {
    mode_ = DispatchMode::kAllCut;
  } else if (degrees.router == RouterTokens::kAll) {
    mode_ = DispatchMode::kAllRouted;
  } else if (region_.sequence() == SequenceParallel::kNo) {
    mode_ = DispatchMode::kSliced;
  }
}

at::Tensor ExpertTokens::enter(const at::Tensor& x) const {
  return sums_at_exit() ? region_.enter(x) : x;
}

at::Tensor ExpertTokens::routed(const at::Tensor& x, const at::Tensor& entered,
                                SharedExperts shared) const {
  if (mode_ != DispatchMode::kSliced) return flat(entered);
  if (shared == SharedExperts::kPresent) return own_rows_of(flat(entered), region_.axis());
  const at::Tensor tokens = flat(x);
  return parallel::slice(tokens, region_.axis(), {0, tokens.size(0)}, parallel::From::kInvariant,
                         "tokens of experts");
}

std::optional<at::Tensor> ExpertTokens::values_of_routed(const std::optional<at::Tensor>& values,
                                                         std::int64_t rows,
                                                         std::int64_t positions) const {
  if (!values || region_.size() == 1 || routes_all()) return values;
  if (mode_ == DispatchMode::kSliced) return own_rows(*values, region_.axis());
  const std::int64_t all = positions * region_.size();
  TESSERA_CHECK(values->dim() == 2 && values->size(0) == rows * all, ErrorKind::kFormat,
                "imposed routing or fillers: found ", values->sizes(), ", expected values of ",
                rows * all, " tokens");
  return flat(
      values->view({rows, all, values->size(1)}).narrow(1, region_.rank() * positions, positions));
}

at::Tensor ExpertTokens::sent(const at::Tensor& tokens) const {
  return mode_ == DispatchMode::kAllRouted ? own_rows_of(tokens, region_.axis()) : tokens;
}

moe::Routing ExpertTokens::sent(const moe::Routing& routing) const {
  if (mode_ != DispatchMode::kAllRouted) return routing;
  moe::Routing own = routing;
  own.indices = own_rows(routing.indices, region_.axis());
  own.weights = own_rows_of(routing.weights, region_.axis());
  return own;
}

at::Tensor ExpertTokens::returned(const at::Tensor& y, at::IntArrayRef shape) const {
  if (mode_ == DispatchMode::kOwn || mode_ == DispatchMode::kAllCut) return y.view(shape);
  const std::int64_t tokens = c10::multiply_integers(shape.begin(), shape.end() - 1);
  return parallel::pad(y, region_.axis(), {0, tokens}, "tokens of experts").view(shape);
}

at::Tensor ExpertTokens::leave(const at::Tensor& addend) const {
  return sums_at_exit() ? region_.leave(addend) : addend;
}

RouterLoad ExpertTokens::counted(RouterLoad load) const {
  if (!routes_all()) return load;
  // All ranks have seen the same tokens: the first one's count.
  load.visit_tensors([&](at::Tensor& each) {
    if (each.defined()) each = parallel::only_first(each, region_.axis());
  });
  return load;
}

}  // namespace tessera::models
