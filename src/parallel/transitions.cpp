#include "parallel/transitions.h"

#include <ATen/ops/zeros_like.h>

#include "parallel/transition.h"

namespace tessera::parallel {
namespace {

// P -> R and P -> I.
struct AllReduce : Transition {
  AllReduce(const Axis& over, To placement, std::string name, SumDtype dtype, at::ScalarType own)
      : Transition("all_reduce", over, std::move(name)), to(placement), result(dtype), input(own) {}

  at::Tensor forward(const at::Tensor& x) const override {
    return exchange_sum(x, axis, result, where);
  }
  at::Tensor backward(const at::Tensor& grad) const override {
    if (to == To::kInvariant) return grad.to(input);
    return exchange_sum(grad, axis, input, where, Direction::kBackward);
  }
  TransitionForm form() const override { return {.is_invariant = to == To::kInvariant}; }

  const To to;
  const SumDtype result;
  const at::ScalarType input;
};

// I -> R.
struct Copy : Transition {
  Copy(const Axis& over, std::string name) : Transition("copy", over, std::move(name)) {}

  at::Tensor forward(const at::Tensor& x) const override { return x; }
  at::Tensor backward(const at::Tensor& grad) const override {
    return exchange_sum(grad, axis, std::nullopt, where, Direction::kBackward);
  }
  TransitionForm form() const override { return {.is_invariant = true}; }
};

// S -> R and S -> I.
struct AllGather : Transition {
  AllGather(const Axis& over, const Shard& how, To placement, std::string name)
      : Transition("all_gather", over, std::move(name)), shard(how), to(placement) {}

  at::Tensor forward(const at::Tensor& x) const override {
    return exchange_gather(x, axis, shard, where);
  }
  at::Tensor backward(const at::Tensor& grad) const override {
    if (to == To::kInvariant) return own_part(grad, axis, shard.dim);
    return exchange_reduce_scatter(grad, axis, shard, std::nullopt, where, Direction::kBackward);
  }
  TransitionForm form() const override {
    return {.dim = shard.dim, .total = shard.total, .is_invariant = to == To::kInvariant};
  }

  const Shard shard;
  const To to;
};

// P -> S.
struct ReduceScatter : Transition {
  ReduceScatter(const Axis& over, const Shard& how, std::string name, SumDtype dtype,
                at::ScalarType own)
      : Transition("reduce_scatter", over, std::move(name)),
        shard(how),
        result(dtype),
        input(own) {}

  at::Tensor forward(const at::Tensor& x) const override {
    return exchange_reduce_scatter(x, axis, shard, result, where);
  }
  at::Tensor backward(const at::Tensor& grad) const override {
    return exchange_gather(grad.to(input), axis, shard, where, Direction::kBackward);
  }
  TransitionForm form() const override { return {.dim = shard.dim, .total = shard.total}; }

  const Shard shard;
  const SumDtype result;
  const at::ScalarType input;
};

// I -> S and R -> S.
struct Slice : Transition {
  Slice(const Axis& over, const Shard& how, From placement, std::string name)
      : Transition("slice", over, std::move(name)), shard(how), from(placement) {}

  at::Tensor forward(const at::Tensor& x) const override { return own_part(x, axis, shard.dim); }
  at::Tensor backward(const at::Tensor& grad) const override {
    if (from == From::kReplicate) return in_zeros(grad, axis, shard.dim, *shard.total);
    return exchange_gather(grad, axis, shard, where, Direction::kBackward);
  }
  TransitionForm form() const override {
    return {.dim = shard.dim, .total = shard.total, .is_invariant = from == From::kInvariant};
  }

  const Shard shard;
  const From from;
};

// S -> P.
struct Pad : Transition {
  Pad(const Axis& over, std::int64_t of, std::int64_t whole, std::string name)
      : Transition("pad", over, std::move(name)), dim(of), total(whole) {}

  at::Tensor forward(const at::Tensor& x) const override { return in_zeros(x, axis, dim, total); }
  at::Tensor backward(const at::Tensor& grad) const override { return own_part(grad, axis, dim); }
  TransitionForm form() const override { return {.dim = dim, .total = total}; }

  const std::int64_t dim;
  const std::int64_t total;
};

// R -> P.
struct OnlyFirst : Transition {
  explicit OnlyFirst(const Axis& over) : Transition("only_first", over, "only first") {}

  at::Tensor forward(const at::Tensor& x) const override {
    return axis.rank == 0 ? x : at::zeros_like(x);
  }
  at::Tensor backward(const at::Tensor& grad) const override {
    return axis.rank == 0 ? grad : at::zeros_like(grad);
  }
};

}  // namespace

at::Tensor all_reduce(const at::Tensor& x, const Axis& axis, To to, const std::string& where,
                      SumDtype result) {
  if (axis.alone()) return x.to(result.value_or(x.scalar_type()));
  return apply<AllReduce>(x, axis, to, where, result, x.scalar_type());
}

at::Tensor copy(const at::Tensor& x, const Axis& axis, const std::string& where) {
  return axis.alone() ? x : apply<Copy>(x, axis, where);
}

at::Tensor all_gather(const at::Tensor& x, const Axis& axis, const Shard& shard, To to,
                      const std::string& where) {
  return axis.alone() ? x : apply<AllGather>(x, axis, shard, to, where);
}

at::Tensor reduce_scatter(const at::Tensor& x, const Axis& axis, const Shard& shard,
                          const std::string& where, SumDtype result) {
  if (axis.alone()) return x.to(result.value_or(x.scalar_type()));
  const Shard whole{shard.dim, whole_of(x, axis, shard, where)};
  return apply<ReduceScatter>(x, axis, whole, where, result, x.scalar_type());
}

at::Tensor slice(const at::Tensor& x, const Axis& axis, const Shard& shard, From from,
                 const std::string& where) {
  if (axis.alone()) return x;
  return apply<Slice>(x, axis, Shard{shard.dim, whole_of(x, axis, shard, where)}, from, where);
}

at::Tensor pad(const at::Tensor& x, const Axis& axis, const Shard& shard,
               const std::string& where) {
  if (axis.alone()) return x;
  const std::int64_t own = x.size(shard.dim);
  const std::int64_t total = shard.total.value_or(own * axis.size);
  check_part(x, own, axis, shard.dim, total, where);
  return apply<Pad>(x, axis, shard.dim, total, where);
}

at::Tensor only_first(const at::Tensor& x, const Axis& axis) {
  return axis.alone() ? x : apply<OnlyFirst>(x, axis);
}

}  // namespace tessera::parallel
