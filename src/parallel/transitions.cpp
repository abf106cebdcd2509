#include "parallel/transitions.h"

#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "parallel/moves.h"
#include "tessera/error.h"

namespace tessera::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Pair {
  Move forward;
  Move backward;
};

/// What backward needs besides the gradient.
struct Held : torch::CustomClassHolder {
  Held(Axis on, Move with, Split of) : axis(std::move(on)), move(with), split(of) {}
  Axis axis;
  Move move;
  Split split;
};

struct Transition : torch::autograd::Function<Transition> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Axis& axis,
                            const Pair& pair, const Split& split) {
    ctx->saved_data["held"] =
        c10::IValue::make_capsule(c10::make_intrusive<Held>(axis, pair.backward, split));
    return moved(pair.forward, x, axis, split);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    TESSERA_CHECK(
        !c10::GradMode::is_enabled(), ErrorKind::kUsage,
        "backward: found create_graph, expected none; second derivatives are not supported");
    const auto holder = ctx->saved_data["held"].toCapsule();
    const auto& held = static_cast<const Held&>(*holder);
    return {moved(held.move, grads[0], held.axis, held.split), at::Tensor(), at::Tensor(),
            at::Tensor()};
  }
};

at::Tensor run(const at::Tensor& x, const Axis& axis, const Pair& pair, const Split& split = {}) {
  return axis.size() == 1 ? x : Transition::apply(x, axis, pair, split);
}

}  // namespace

at::Tensor copy_in(const at::Tensor& x, const Axis& axis) {
  return run(x, axis, {Move::kIdentity, Move::kAllReduce});
}

at::Tensor all_reduce_out(const at::Tensor& x, const Axis& axis) {
  return run(x, axis, {Move::kAllReduce, Move::kIdentity});
}

at::Tensor all_reduce(const at::Tensor& x, const Axis& axis) {
  return run(x, axis, {Move::kAllReduce, Move::kAllReduce});
}

at::Tensor gather_shards(const at::Tensor& x, const Axis& axis, std::int64_t dim) {
  return run(x, axis, {Move::kAllGather, Move::kReduceScatter}, {dim, x.size(dim) * axis.size()});
}

at::Tensor gather_invariant(const at::Tensor& x, const Axis& axis, std::int64_t dim,
                            std::int64_t whole) {
  return run(x, axis, {Move::kAllGather, Move::kOwnPart}, {dim, whole});
}

at::Tensor reduce_scatter(const at::Tensor& x, const Axis& axis, std::int64_t dim) {
  return run(x, axis, {Move::kReduceScatter, Move::kAllGather}, {dim, x.size(dim)});
}

at::Tensor slice_invariant(const at::Tensor& x, const Axis& axis, std::int64_t dim) {
  return run(x, axis, {Move::kOwnPart, Move::kAllGather}, {dim, x.size(dim)});
}

at::Tensor slice_replicated(const at::Tensor& x, const Axis& axis, std::int64_t dim) {
  return run(x, axis, {Move::kOwnPart, Move::kPad}, {dim, x.size(dim)});
}

at::Tensor pad_shards(const at::Tensor& x, const Axis& axis, std::int64_t dim, std::int64_t whole) {
  return run(x, axis, {Move::kPad, Move::kOwnPart}, {dim, whole});
}

at::Tensor only_first(const at::Tensor& x, const Axis& axis) {
  return run(x, axis, {Move::kOnlyFirst, Move::kOnlyFirst});
}

}  // namespace tessera::parallel
