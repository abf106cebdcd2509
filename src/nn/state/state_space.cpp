#include "nn/state/state_space.h"

#include <ATen/ops/addcmul.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/first_derivative.h"
#include "base/threads/shapes_only.h"
#include "tessera/error.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr double kNothingLeft = -std::numeric_limits<double>::infinity();
/// The least exponent of one step: nothing is left of a state, and sums over a chunk are numbers.
constexpr double kLeastExponent = -1e6;
/// Longer chunks cost memory by the square of their length and change the order of additions alone.
constexpr std::int64_t kLongestChunk = 256;

struct StateSpaceSizes {
  std::int64_t rows, positions, heads, head_dim, groups, state;
  std::int64_t of_group() const { return heads / groups; }
};

StateSpaceSizes sizes_of(const StateSpaceInputs& in) {
  const StateSpaceSizes sizes{in.x.size(0), in.x.size(1), in.x.size(2),
                              in.x.size(3), in.b.size(2), in.b.size(3)};
  TESSERA_INVARIANT(sizes.positions > 0 && sizes.heads % sizes.groups == 0 &&
                        in.c.sizes() == in.b.sizes() && in.dt.sizes() == in.x.sizes().slice(0, 3),
                    "state space: x ", in.x.sizes(), ", dt ", in.dt.sizes(), ", b ", in.b.sizes(),
                    ", c ", in.c.sizes());
  return sizes;
}

at::ScalarType computed_in(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// Positions of a chunk and views of tensors as its products take them. Elementwise operations see
/// [B, L, G, R, .], R the heads of a group; products see [B H, L, .] and [B G, L, R .]. One memory
/// order, [L, B, G, R, .], serves all three without a copy.
class ChunkShape {
 public:
  ChunkShape(const StateSpaceSizes& sizes, std::int64_t begin, std::int64_t length)
      : sizes_(sizes), begin_(begin), length_(length) {}

  std::int64_t begin() const { return begin_; }
  std::int64_t length() const { return length_; }

  /// [B, T, H, ...] -> [B, L, G, R, ...], a view.
  at::Tensor of_heads(const at::Tensor& all) const {
    return all.narrow(1, begin_, length_).unflatten(2, {sizes_.groups, sizes_.of_group()});
  }
  /// [B, T, G, N] -> [B G, L, N].
  at::Tensor of_groups(const at::Tensor& all, at::ScalarType dtype) const {
    return all.narrow(1, begin_, length_).to(dtype).transpose(1, 2).flatten(0, 1);
  }
  /// [B G, L, N] -> [B, L, G, N].
  at::Tensor groups_back(const at::Tensor& values) const {
    return values.unflatten(0, {sizes_.rows, sizes_.groups}).transpose(1, 2);
  }
  /// An empty [B, L, G, R, P] in the memory order of products.
  at::Tensor fresh(const at::TensorOptions& options) const {
    return at::empty({length_, sizes_.rows, sizes_.groups, sizes_.of_group(), sizes_.head_dim},
                     options)
        .transpose(0, 1);
  }
  at::Tensor ordered(const at::Tensor& values, at::ScalarType dtype) const {
    return values.to(dtype).transpose(0, 1).contiguous().transpose(0, 1);
  }
  at::Tensor product(const at::Tensor& values, const at::Tensor& factors) const {
    at::Tensor result = fresh(factors.options());
    at::mul_out(result, values, factors);
    return result;
  }
  /// [B, L, G, R, P] in the memory order of products -> [B H, L, P].
  at::Tensor by_head(const at::Tensor& values) const {
    return values.transpose(0, 1).flatten(1, 3).transpose(0, 1);
  }
  /// [B, L, G, R, P] in the memory order of products -> [B G, L, R P].
  at::Tensor by_group(const at::Tensor& values) const {
    return values.transpose(0, 1).flatten(3, 4).flatten(1, 2).transpose(0, 1);
  }
  /// [B H, L, P] -> [B, L, G, R, P].
  at::Tensor from_heads(const at::Tensor& values) const {
    return values.view({sizes_.rows, sizes_.groups, sizes_.of_group(), length_, sizes_.head_dim})
        .permute({0, 3, 1, 2, 4});
  }
  /// [B G, L, R P] -> [B, L, G, R, P].
  at::Tensor from_groups(const at::Tensor& values) const {
    return values.view({sizes_.rows, sizes_.groups, length_, sizes_.of_group(), sizes_.head_dim})
        .transpose(1, 2);
  }
  /// [B H, L] -> [B, L, G, R, 1].
  at::Tensor factors(const at::Tensor& of_positions) const {
    return of_positions.view({sizes_.rows, sizes_.groups, sizes_.of_group(), length_, 1})
        .permute({0, 3, 1, 2, 4});
  }
  /// [B, L, G, R] -> [B H, L].
  at::Tensor positions_last(const at::Tensor& values) const {
    return values.permute({0, 2, 3, 1}).reshape({sizes_.rows * sizes_.heads, length_});
  }
  /// [B H, L, L] -> [B G, R, L, L].
  at::Tensor grouped_pairs(const at::Tensor& pairs) const {
    return pairs.unflatten(0, {sizes_.rows * sizes_.groups, sizes_.of_group()});
  }
  /// A state [B G, R P, N] -> [B H, P N].
  at::Tensor states_by_head(const at::Tensor& state) const {
    return state.view({sizes_.rows * sizes_.heads, sizes_.head_dim * sizes_.state});
  }

 private:
  StateSpaceSizes sizes_;
  std::int64_t begin_, length_;
};

/// Values that forward and backward of a chunk both need, in the dtype of computing.
struct ChunkValues {
  at::Tensor dt;     ///< [B, L, G, R, 1]
  at::Tensor u;      ///< dt x, [B, L, G, R, P] in the memory order of products
  at::Tensor b, c;   ///< [B G, L, N]
  at::Tensor decay;  ///< [B H, L, L]: of what position j brings, what is left at i; 0 where unseen
  at::Tensor entered;  ///< [B H, L]: what is left of the state before the chunk; 0 behind a border
  at::Tensor weights;  ///< c b^T, [B G, L, L]

  at::Tensor left() const { return decay.select(1, decay.size(1) - 1); }  ///< [B H, L]: at the end
  at::Tensor of_state() const { return entered.narrow(1, entered.size(1) - 1, 1); }  ///< [B H, 1]
};

class ChunkedStateSpace {
 public:
  ChunkedStateSpace(const StateSpaceInputs& in, std::int64_t chunk, at::Tensor starts)
      : in_(in), sizes_(sizes_of(in)), starts_(std::move(starts)), dtype_(computed_in(in.x)) {
    chunk_ = std::min({chunk, sizes_.positions, kLongestChunk});
    a_ = in.a.to(dtype_).unflatten(0, {sizes_.groups, sizes_.of_group()});
    d_ = in.d.to(dtype_).view({sizes_.groups, sizes_.of_group(), 1});
    unseen_ = at::full({chunk_, chunk_}, kNothingLeft, wide_options()).triu_(1);
  }

  std::int64_t chunks() const { return (sizes_.positions + chunk_ - 1) / chunk_; }
  /// In a dry run the first two chunks and the last one take what any of them does.
  bool skips(std::int64_t number) const {
    return base::shapes_only() && number > 1 && number + 1 < chunks();
  }
  at::TensorOptions wide_options() const { return in_.x.options().dtype(dtype_); }

  /// Empty states behind all chunks but the last, [chunks - 1, B G, R P, N].
  at::Tensor empty_states() const {
    return at::empty({chunks() - 1, sizes_.rows * sizes_.groups,
                      sizes_.of_group() * sizes_.head_dim, sizes_.state},
                     wide_options());
  }

  /// Fills `states`.
  at::Tensor forward_keeping(at::Tensor& states) const;
  /// Replaces `state` [B G, R P, N] (undefined: zero).
  at::Tensor forward_from(at::Tensor& state) const;
  /// Gradients of x, dt, a, b, c and d.
  variable_list backward(const at::Tensor& grad, const at::Tensor& states) const;

 private:
  struct Gradients {
    at::Tensor x, dt, a, b, c, d;
    at::Tensor state;  ///< behind the chunk that is next, [B G, R P, N]; undefined behind the last
  };
  ChunkShape shape_of(std::int64_t number) const {
    const std::int64_t begin = number * chunk_;
    return {sizes_, begin, std::min(chunk_, sizes_.positions - begin)};
  }
  ChunkValues values_of(const ChunkShape& shape) const;
  void write_output(at::Tensor& y, const ChunkShape& shape, const ChunkValues& values,
                    const at::Tensor& state) const;
  static void write_state(at::Tensor& to, const ChunkShape& shape, const ChunkValues& values,
                          const at::Tensor& state);
  void backward_of(Gradients& grads, const at::Tensor& grad_y, const ChunkShape& shape,
                   const at::Tensor& state) const;
  void finish(Gradients& grads, const ChunkShape& shape, const at::Tensor& grad_decay,
              const at::Tensor& grad_u, const at::Tensor& grad_y, const ChunkValues& values) const;

  StateSpaceInputs in_;
  StateSpaceSizes sizes_;
  at::Tensor starts_;
  at::ScalarType dtype_;
  std::int64_t chunk_ = 0;
  at::Tensor a_, d_;   ///< [G, R], [G, R, 1]
  at::Tensor unseen_;  ///< [L, L]: -inf of later positions, else 0
};

ChunkValues ChunkedStateSpace::values_of(const ChunkShape& shape) const {
  ChunkValues values;
  const std::int64_t length = shape.length();
  values.dt = shape.of_heads(in_.dt).to(dtype_).unsqueeze(-1);
  values.u = shape.product(shape.of_heads(in_.x), values.dt);
  values.b = shape.of_groups(in_.b, dtype_);
  values.c = shape.of_groups(in_.c, dtype_);
  values.weights = at::bmm(values.c, values.b.transpose(1, 2));
  // Exponents of decays are differences of these sums. Kept in two parts, a strong decay does not
  // cost the precision of weak ones behind it.
  const at::Tensor exact =
      at::cumsum(shape.positions_last((values.dt.squeeze(-1) * a_).clamp_min_(kLeastExponent)), 1,
                 at::kDouble);
  const at::Tensor summed = exact.to(dtype_), rest = (exact - summed).to(dtype_);
  at::Tensor unseen = unseen_.narrow(0, 0, length).narrow(1, 0, length);
  at::Tensor from_before = summed;
  if (starts_.defined()) {
    const at::Tensor starts = starts_.narrow(1, shape.begin(), length);
    unseen =
        at::where(starts.unsqueeze(2) == starts.unsqueeze(1), unseen, kNothingLeft).unsqueeze(1);
    const at::Tensor is_before = (starts < shape.begin()).unsqueeze(1);
    from_before =
        at::where(is_before, summed.unflatten(0, {sizes_.rows, sizes_.heads}), kNothingLeft)
            .flatten(0, 1);
  }
  values.decay = at::sub(summed.unsqueeze(2), summed.unsqueeze(1));
  values.decay.add_(rest.unsqueeze(2)).sub_(rest.unsqueeze(1));
  values.decay.unflatten(0, {sizes_.rows, sizes_.heads}).add_(unseen);
  values.decay.exp_();
  values.entered = at::exp(from_before);
  return values;
}

void ChunkedStateSpace::write_output(at::Tensor& y, const ChunkShape& shape,
                                     const ChunkValues& values, const at::Tensor& state) const {
  const at::Tensor seen =
      (shape.grouped_pairs(values.decay) * values.weights.unsqueeze(1)).flatten(0, 1);
  at::Tensor sum = shape.from_heads(at::bmm(seen, shape.by_head(values.u)));
  if (state.defined()) {
    sum.addcmul_(shape.from_groups(at::bmm(values.c, state.transpose(1, 2))),
                 shape.factors(values.entered));
  }
  sum.addcmul_(shape.of_heads(in_.x).to(dtype_), d_);
  shape.of_heads(y).copy_(sum);
}

void ChunkedStateSpace::write_state(at::Tensor& to, const ChunkShape& shape,
                                    const ChunkValues& values, const at::Tensor& state) {
  const at::Tensor brought = shape.product(values.u, shape.factors(values.left()));
  const at::Tensor columns = shape.by_group(brought).transpose(1, 2);
  if (!state.defined()) {
    at::bmm_out(to, columns, values.b);
    return;
  }
  at::Tensor by_head = shape.states_by_head(to);
  at::mul_out(by_head, shape.states_by_head(state), values.of_state());
  to.baddbmm_(columns, values.b);
}

at::Tensor ChunkedStateSpace::forward_keeping(at::Tensor& states) const {
  at::Tensor y = at::empty(in_.x.sizes(), in_.x.options());
  for (std::int64_t number = 0; number < chunks(); ++number) {
    if (skips(number)) continue;
    const ChunkShape shape = shape_of(number);
    const ChunkValues values = values_of(shape);
    const at::Tensor state = number > 0 ? states.select(0, number - 1) : at::Tensor();
    write_output(y, shape, values, state);
    if (number + 1 == chunks()) break;
    at::Tensor next = states.select(0, number);
    write_state(next, shape, values, state);
  }
  return y;
}

at::Tensor ChunkedStateSpace::forward_from(at::Tensor& state) const {
  at::Tensor y = at::empty(in_.x.sizes(), in_.x.options());
  for (std::int64_t number = 0; number < chunks(); ++number) {
    const ChunkShape shape = shape_of(number);
    const ChunkValues values = values_of(shape);
    write_output(y, shape, values, state);
    at::Tensor next =
        at::empty({sizes_.rows * sizes_.groups, sizes_.of_group() * sizes_.head_dim, sizes_.state},
                  wide_options());
    write_state(next, shape, values, state);
    state = next;
  }
  return y;
}

/// Sums each position [B H, L] and all later ones.
at::Tensor sums_from(const at::Tensor& of_positions) {
  return of_positions.flip({1}).cumsum(1).flip({1});
}
/// Sums all positions before each one, [B H, L].
at::Tensor sums_before(const at::Tensor& of_positions) {
  at::Tensor sums = at::zeros_like(of_positions);
  const std::int64_t behind = of_positions.size(1) - 1;
  sums.narrow(1, 1, behind).copy_(of_positions.narrow(1, 0, behind).cumsum(1));
  return sums;
}
/// Sums for each position k the pairs (i, j) with j < k <= i, whose decay is also that of k.
/// Consumes pairs [B H, L, L].
at::Tensor sums_across(at::Tensor pairs) {
  const std::int64_t length = pairs.size(1);
  at::Tensor sums = at::zeros({pairs.size(0), length}, pairs.options());
  const at::Tensor across = pairs.cumsum_(2).tril_(-1).sum(1);
  sums.narrow(1, 1, length - 1).copy_(across.narrow(1, 0, length - 1));
  return sums;
}

// The exponent of a position is in every decay over it, and each decay's gradient times the decay
// is added to it. These are summed one by one, never as a difference of larger sums: after a strong
// decay or a border nothing may be left.
void ChunkedStateSpace::backward_of(Gradients& grads, const at::Tensor& grad_y,
                                    const ChunkShape& shape, const at::Tensor& state) const {
  const ChunkValues values = values_of(shape);
  const std::int64_t length = shape.length();
  const at::Tensor grad_by_head = shape.by_head(grad_y);
  at::Tensor pairs = shape.grouped_pairs(values.decay);
  at::Tensor grad_u = shape.from_heads(
      at::bmm((pairs * values.weights.unsqueeze(1)).flatten(0, 1).transpose(1, 2), grad_by_head));
  at::Tensor grad_pairs =
      shape.grouped_pairs(at::bmm(grad_by_head, shape.by_head(values.u).transpose(1, 2)));
  grad_pairs.mul_(pairs);
  const at::Tensor grad_weights = grad_pairs.sum(1);
  grad_pairs.mul_(values.weights.unsqueeze(1));
  at::Tensor grad_decay = sums_across(grad_pairs.flatten(0, 1));
  at::Tensor grad_b = at::bmm(grad_weights.transpose(1, 2), values.c);
  at::Tensor grad_c = at::bmm(grad_weights, values.b);
  if (grads.state.defined()) {  // of what the chunk brought into the state behind it
    const at::Tensor left = shape.factors(values.left());
    const at::Tensor brought = shape.product(values.u, left);
    grad_b.baddbmm_(shape.by_group(brought), grads.state);
    const at::Tensor by_state = shape.from_groups(at::bmm(values.b, grads.state.transpose(1, 2)));
    grad_u.addcmul_(by_state, left);
    grad_decay.add_(sums_before(shape.positions_last((brought * by_state).sum(-1))));
  }
  if (state.defined()) {  // of the state before it
    const at::Tensor grad_entered = shape.product(grad_y, shape.factors(values.entered));
    const at::Tensor columns = shape.by_group(grad_entered);
    grad_c.baddbmm_(columns, state);
    const at::Tensor out = shape.from_groups(at::bmm(values.c, state.transpose(1, 2)));
    grad_decay.add_(sums_from(shape.positions_last((grad_entered * out).sum(-1))));
    at::Tensor grad_state = at::bmm(columns.transpose(1, 2), values.c);
    if (grads.state.defined()) {
      const at::Tensor behind = shape.states_by_head(grads.state) * values.of_state();
      grad_decay.add_((behind * shape.states_by_head(state)).sum(1, /*keepdim=*/true));
      shape.states_by_head(grad_state).add_(behind);
    }
    grads.state = std::move(grad_state);
  }
  grads.b.narrow(1, shape.begin(), length).copy_(shape.groups_back(grad_b));
  grads.c.narrow(1, shape.begin(), length).copy_(shape.groups_back(grad_c));
  finish(grads, shape, grad_decay, grad_u, grad_y, values);
}

void ChunkedStateSpace::finish(Gradients& grads, const ChunkShape& shape,
                               const at::Tensor& grad_decay, const at::Tensor& grad_u,
                               const at::Tensor& grad_y, const ChunkValues& values) const {
  const at::Tensor x = shape.of_heads(in_.x).to(dtype_);
  const at::Tensor exponents = shape.factors(grad_decay).squeeze(-1);
  grads.a.add_((exponents * values.dt.squeeze(-1)).sum({0, 1}));
  grads.d.add_((grad_y * x).sum({0, 1, 4}));
  shape.of_heads(grads.dt).copy_((grad_u * x).sum(-1).addcmul_(exponents, a_));
  shape.of_heads(grads.x).copy_(at::addcmul(grad_u * values.dt, grad_y, d_));
}

variable_list ChunkedStateSpace::backward(const at::Tensor& grad, const at::Tensor& states) const {
  const at::Tensor sums = at::zeros({2, sizes_.groups, sizes_.of_group()}, wide_options());
  const auto like = [](const at::Tensor& tensor) {
    return at::empty(tensor.sizes(), tensor.options());
  };
  Gradients grads{.x = like(in_.x),
                  .dt = like(in_.dt),
                  .a = sums[0],
                  .b = like(in_.b),
                  .c = like(in_.c),
                  .d = sums[1],
                  .state = {}};
  for (std::int64_t number = chunks() - 1; number >= 0; --number) {
    if (skips(number)) continue;
    const ChunkShape shape = shape_of(number);
    const at::Tensor grad_y = shape.ordered(shape.of_heads(grad), dtype_);
    backward_of(grads, grad_y, shape, number > 0 ? states.select(0, number - 1) : at::Tensor());
  }
  return {grads.x, grads.dt, grads.a.flatten().to(in_.a.scalar_type()),
          grads.b, grads.c,  grads.d.flatten().to(in_.d.scalar_type())};
}

struct StateSpaceFunction : torch::autograd::Function<StateSpaceFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& dt,
                            const at::Tensor& a, const at::Tensor& b, const at::Tensor& c,
                            const at::Tensor& d, const std::optional<at::Tensor>& starts,
                            std::int64_t chunk) {
    const StateSpaceInputs in{x, dt, a, b, c, d};
    const ChunkedStateSpace chunked(in, chunk, starts.value_or(at::Tensor()));
    at::Tensor states = chunked.empty_states();
    at::Tensor y = chunked.forward_keeping(states);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({x, dt, a, b, c, d, starts.value_or(at::Tensor()), states});
    ctx->saved_data["chunk"] = chunk;
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(8);  // [Note: left-out results]
    const WideScope inside;
    const variable_list saved = ctx->get_saved_variables();
    const StateSpaceInputs in{saved[0], saved[1], saved[2], saved[3], saved[4], saved[5]};
    const ChunkedStateSpace chunked(in, ctx->saved_data["chunk"].toInt(), saved[6]);
    variable_list result = chunked.backward(grads[0], saved[7]);
    result.resize(8);
    return result;
  }
};

}  // namespace

at::Tensor state_space(const StateSpaceInputs& in, std::int64_t chunk, const Documents& documents) {
  const WideScope inside;
  if (!c10::GradMode::is_enabled()) {
    at::Tensor state;
    return ChunkedStateSpace(in, chunk, documents.starts).forward_from(state);
  }
  return StateSpaceFunction::apply(in.x, in.dt, in.a, in.b, in.c, in.d, given(documents.starts),
                                   chunk);
}

at::Tensor state_space_after(const StateSpaceInputs& in, std::int64_t chunk, at::Tensor& state) {
  const WideScope inside;
  const at::NoGradGuard no_grad;
  const StateSpaceSizes sizes = sizes_of(in);
  if (state.defined()) {
    state = state.view({sizes.rows * sizes.groups, sizes.of_group() * sizes.head_dim, sizes.state});
  }
  at::Tensor y = ChunkedStateSpace(in, chunk, {}).forward_from(state);
  state = state.view({sizes.rows, sizes.heads, sizes.head_dim, sizes.state});
  return y;
}

}  // namespace tessera::nn
