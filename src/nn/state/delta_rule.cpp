#include "nn/state/delta_rule.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "base/first_derivative.h"
#include "base/threads/product.h"
#include "base/threads/shapes_only.h"
#include "kernels/on_cpu.h"
#include "nn/state/delta_chunks.h"
#include "nn/wide_dtype.h"
#include "tessera/error.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// About so many elements of a span's products are formed at once: on the CPU what stays in the
/// cache, on a device 256 MiB.
constexpr std::int64_t kElementsOnCpu = std::int64_t{1} << 18;
constexpr std::int64_t kElementsOnDevice = std::int64_t{1} << 26;
/// So many elements of states are computed together on the CPU.
constexpr std::int64_t kStatesOnCpu = std::int64_t{1} << 18;

/// [a, b, ...] as [a * b, ...].
at::Tensor joined(const at::Tensor& x) { return x.flatten(0, 1); }

/// Products of all matrices [a, b, ., .]. Writes: out, contiguous.
void products_into(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  at::Tensor flat = joined(out);
  base::bmm_out(flat, joined(a), joined(b));
}

/// Products of matrices [a, ., .].
at::Tensor products_of(const at::Tensor& a, const at::Tensor& b) {
  at::Tensor out = at::empty({a.size(0), a.size(1), b.size(2)}, a.options());
  base::bmm_out(out, a, b);
  return out;
}

/// Values that a backward computes again before it goes through the chunks.
struct KeptChunks {
  at::Tensor states;  ///< [N, R, M, K, V], before each chunk
  at::Tensor missed;  ///< [N, R, M, C, V]: values less what the state in front of the chunk says
  at::Tensor writes;  ///< [N, R, M, C, V]: what is written under each key
};

/// The rule over the chunks of a row, forward and backward. A state is [R, M, K, V] in it.
class DeltaScan {
 public:
  DeltaScan(const DeltaInputs& in, const Documents& documents)
      : in_(in), sizes_(in), compute_(wide_dtype(in.v)), gates_(in, documents, sizes_, compute_) {}

  at::Tensor no_state() const {
    return at::zeros({sizes_.R, sizes_.M, sizes_.K, sizes_.V}, options());
  }
  /// Starts at `state`, which becomes the one behind the row. Writes: state, out [B, T, H, V].
  void forward(const at::Tensor& state, const at::Tensor& out);
  /// Starts without a state and forms no output.
  KeptChunks keep();
  /// Gradients of decay and beta are [N, R, M, C], the others as the inputs. Writes: grads.
  void backward(const at::Tensor& grad, const KeptChunks& kept, const DeltaInputs& grads);

 private:
  enum class Direction : std::uint8_t { kForward, kBackward };
  struct Chunk {
    std::int64_t number, length;
    DeltaSpan of;  ///< tensors of this chunk alone
  };
  at::TensorOptions options() const { return in_.v.options().dtype(compute_); }
  at::Tensor empty_values() const {
    return at::empty({sizes_.R, sizes_.M, sizes_.C, sizes_.V}, options());
  }
  /// x [B, T, H, V] at the chunk's positions as [R, M, C, V], zeros behind the row's end.
  void load(const at::Tensor& to, const at::Tensor& x, const Chunk& chunk) const;
  void store(const at::Tensor& x, const at::Tensor& from, const Chunk& chunk) const;
  at::Tensor positions(const at::Tensor& x, const Chunk& chunk, std::int64_t repeat) const {
    return chunks_of(x, {chunk.number, 1, chunk.length}, sizes_, repeat).select(0, 0);
  }
  at::Tensor of_chunk(const at::Tensor& gate, const Chunk& chunk) const {
    return gate.select(0, chunk.number).unsqueeze(3);  // [R, M, C, 1]
  }
  at::Tensor through(const Chunk& chunk) const {
    return of_chunk(gates_.from_start, chunk).narrow(2, sizes_.C - 1, 1);
  }
  template <class F>
  void for_chunks(Direction direction, F&& step);
  /// Fills `missed` and `writes` of a chunk behind `state`.
  void write(const Chunk& chunk, const at::Tensor& state, const at::Tensor& missed,
             const at::Tensor& writes);
  void read(const Chunk& chunk, const at::Tensor& state, const at::Tensor& writes,
            const at::Tensor& out);
  void advance(const Chunk& chunk, const at::Tensor& state, const at::Tensor& writes);
  void step_back(const Chunk& chunk, const at::Tensor& grad_out, const KeptChunks& kept,
                 const at::Tensor& grad_state, const DeltaInputs& grads);
  at::Tensor grad_of_pairs(const Chunk& chunk, const at::Tensor& grad_read,
                           const at::Tensor& grad_written, const at::Tensor& writes,
                           const at::Tensor& grad_beta, const at::Tensor& grad_decay);
  at::Tensor grad_of_writes(const Chunk& chunk, const at::Tensor& grad_read,
                            const at::Tensor& grad_late) const;
  /// By the log of what the state keeps from the chunk's start to its end, [R, M, 1].
  at::Tensor grad_through(const Chunk& chunk, const at::Tensor& state,
                          const at::Tensor& grad_state) const {
    return at::mul(state, grad_state).sum({2, 3}).unsqueeze(2) * through(chunk).squeeze(3);
  }
  void finish_keys(const Chunk& chunk, const at::Tensor& grad_qk, const DeltaInputs& grads) const;

  const DeltaInputs& in_;
  const DeltaSizes sizes_;
  const at::ScalarType compute_;
  const DeltaGates gates_;
};

void DeltaScan::load(const at::Tensor& to, const at::Tensor& x, const Chunk& chunk) const {
  if (chunk.length < sizes_.C) to.zero_();
  to.view({sizes_.R, sizes_.B, sizes_.G, sizes_.C, sizes_.V})
      .narrow(3, 0, chunk.length)
      .copy_(positions(x, chunk, sizes_.R));
}

void DeltaScan::store(const at::Tensor& x, const at::Tensor& from, const Chunk& chunk) const {
  positions(x, chunk, sizes_.R)
      .copy_(
          from.view({sizes_.R, sizes_.B, sizes_.G, sizes_.C, sizes_.V}).narrow(3, 0, chunk.length));
}

template <class F>
void DeltaScan::for_chunks(Direction direction, F&& step) {
  const auto& [B, T, G, R, K, V, M, C, N] = sizes_;
  const std::int64_t most = kernels::on_cpu(in_.v) ? kElementsOnCpu : kElementsOnDevice;
  const std::int64_t together = std::max<std::int64_t>(1, most / std::max(R * M * C * C, C));
  const std::int64_t whole = T / C;  // a shorter chunk is a span of its own
  std::vector<SpanOfChunks> spans;
  for (std::int64_t first = 0; first < whole; first += together) {
    spans.push_back({first, std::min(together, whole - first), C});
  }
  if (whole < N) spans.push_back({whole, 1, T - whole * C});
  const bool backwards = direction == Direction::kBackward;
  if (backwards) std::reverse(spans.begin(), spans.end());
  // In a dry run one chunk of the longest span, which takes what any of them does.
  const bool one = base::shapes_only();
  if (one) spans = {*std::ranges::max_element(spans, {}, &SpanOfChunks::count)};
  for (const SpanOfChunks& span : spans) {
    const DeltaSpan all = delta_span(in_, gates_, sizes_, span);
    for (std::int64_t i = 0; i < (one ? 1 : span.count); ++i) {
      const std::int64_t at = backwards ? span.count - 1 - i : i;
      step(Chunk{span.first + at,
                 span.length,
                 {all.qk[at], all.scale[at], all.products[at], all.decay[at], all.inverse[at]}});
    }
  }
}

void DeltaScan::write(const Chunk& chunk, const at::Tensor& state, const at::Tensor& missed,
                      const at::Tensor& writes) {
  const at::Tensor k = chunk.of.qk.narrow(1, sizes_.C, sizes_.C);
  for (std::int64_t r = 0; r < sizes_.R; ++r) {
    at::Tensor found = writes[r];
    base::bmm_out(found, k, state[r]);
  }
  load(missed, in_.v, chunk);
  missed.addcmul_(writes, of_chunk(gates_.from_start, chunk), -1);
  products_into(writes, chunk.of.inverse, missed * of_chunk(gates_.beta, chunk));
}

void DeltaScan::read(const Chunk& chunk, const at::Tensor& state, const at::Tensor& writes,
                     const at::Tensor& out) {
  const at::Tensor found = empty_values();
  const at::Tensor q = chunk.of.qk.narrow(1, 0, sizes_.C);
  for (std::int64_t r = 0; r < sizes_.R; ++r) {
    at::Tensor of_head = found[r];
    base::bmm_out(of_head, q, state[r]);
  }
  found.mul_(of_chunk(gates_.from_start, chunk));
  const at::Tensor seen = chunk.of.decay * chunk.of.products.narrow(1, 0, sizes_.C);
  base::add_bmm(joined(found), joined(seen), joined(writes));
  store(out, found, chunk);
}

void DeltaScan::advance(const Chunk& chunk, const at::Tensor& state, const at::Tensor& writes) {
  state.mul_(through(chunk));
  const at::Tensor late = writes * of_chunk(gates_.to_end, chunk);
  const at::Tensor k = chunk.of.qk.narrow(1, sizes_.C, sizes_.C).transpose(1, 2);
  for (std::int64_t r = 0; r < sizes_.R; ++r) base::add_bmm(state[r], k, late[r]);
}

void DeltaScan::forward(const at::Tensor& state, const at::Tensor& out) {
  const at::Tensor missed = empty_values(), writes = empty_values();
  for_chunks(Direction::kForward, [&](const Chunk& chunk) {
    write(chunk, state, missed, writes);
    read(chunk, state, writes, out);
    advance(chunk, state, writes);
  });
}

KeptChunks DeltaScan::keep() {
  const auto& [B, T, G, R, K, V, M, C, N] = sizes_;
  KeptChunks kept{at::empty({N, R, M, K, V}, options()), at::empty({N, R, M, C, V}, options()),
                  at::empty({N, R, M, C, V}, options())};
  kept.states[0].zero_();
  for_chunks(Direction::kForward, [&](const Chunk& chunk) {
    const std::int64_t n = chunk.number;
    write(chunk, kept.states[n], kept.missed[n], kept.writes[n]);
    if (n + 1 == N) return;
    kept.states[n + 1].copy_(kept.states[n]);
    advance(chunk, kept.states[n + 1], kept.writes[n]);
  });
  return kept;
}

void DeltaScan::backward(const at::Tensor& grad, const KeptChunks& kept, const DeltaInputs& grads) {
  const at::Tensor grad_state = no_state();
  for_chunks(Direction::kBackward,
             [&](const Chunk& chunk) { step_back(chunk, grad, kept, grad_state, grads); });
}

/// Names: o = e (q S) + m u is read, u = inverse (beta (v - e (k S))) is written, the next state is
/// `through` S + k^T (f u); e and f are the gates from_start and to_end, m is decay * q k^T.
void DeltaScan::step_back(const Chunk& chunk, const at::Tensor& grad_out, const KeptChunks& kept,
                          const at::Tensor& grad_state, const DeltaInputs& grads) {
  const auto& [B, T, G, R, K, V, M, C, N] = sizes_;
  const at::Tensor state = kept.states[chunk.number], writes = kept.writes[chunk.number];
  const at::Tensor qk = chunk.of.qk, q = qk.narrow(1, 0, C), k = qk.narrow(1, C, C);
  const at::Tensor e = of_chunk(gates_.from_start, chunk), f = of_chunk(gates_.to_end, chunk);
  const at::Tensor grad_read = empty_values();
  load(grad_read, grad_out, chunk);

  // A value that is written is read later in the chunk, and through the state.
  const at::Tensor grad_late = empty_values();
  for (std::int64_t r = 0; r < R; ++r) {
    at::Tensor of_head = grad_late[r];
    base::bmm_out(of_head, k, grad_state[r]);
  }
  grad_late.mul_(f);
  const at::Tensor at_end = at::mul(grad_late, writes).sum(3);  // [R, M, C]
  const at::Tensor grad_written = grad_of_writes(chunk, grad_read, grad_late);
  const at::Tensor grad_beta = at::mul(grad_written, kept.missed[chunk.number]).sum(3);
  const at::Tensor grad_decay = at::empty({R, M, C}, options());
  const at::Tensor grad_pairs =
      grad_of_pairs(chunk, grad_read, grad_written, writes, grad_beta, grad_decay);
  grad_written.mul_(of_chunk(gates_.beta, chunk));
  store(grads.v, grad_written, chunk);

  // Gradients of q S and k S, one above the other.
  const at::Tensor grad_found = at::empty({R, M, 2 * C, V}, options());
  at::Tensor of_queries = grad_found.narrow(2, 0, C), of_keys = grad_found.narrow(2, C, C);
  at::mul_out(of_queries, grad_read, e);
  at::mul_out(of_keys, grad_written, e).neg_();
  const at::Tensor grad_qk = products_of(grad_pairs, k);
  at::Tensor grad_k = products_of(grad_pairs.transpose(1, 2), qk);
  const at::Tensor at_start = at::empty({R, M, C}, options());
  const at::Tensor late = writes * f;
  for (std::int64_t r = 0; r < R; ++r) {
    const at::Tensor of_head = products_of(grad_found[r], state[r].transpose(1, 2));
    grad_qk.add_(of_head);
    at_start[r].copy_(at::mul(of_head, qk).sum(2).view({M, 2, C}).sum(1));
    base::add_bmm(grad_k, late[r], grad_state[r].transpose(1, 2));
  }
  grad_qk.narrow(1, C, C).add_(grad_k);
  finish_keys(chunk, grad_qk, grads);

  const at::Tensor up_to = gates_.ahead.logical_not().to(compute_);  // row i, column t <= i
  grad_decay.add_(grad_through(chunk, state, grad_state))
      .add_(at_start.matmul(up_to))
      .add_(at_end.matmul(gates_.ahead.to(compute_)));
  grads.beta.select(0, chunk.number).copy_(grad_beta);
  grads.decay.select(0, chunk.number).copy_(grad_decay);

  grad_state.mul_(through(chunk));
  for (std::int64_t r = 0; r < R; ++r) {
    base::add_bmm(grad_state[r], qk.transpose(1, 2), grad_found[r]);
  }
}

/// -> the gradient of beta (v - e (k S)) [R, M, C, V]; grad_late: that of what is written by way of
/// the state, which becomes the whole one.
at::Tensor DeltaScan::grad_of_writes(const Chunk& chunk, const at::Tensor& grad_read,
                                     const at::Tensor& grad_late) const {
  const at::Tensor seen = chunk.of.decay * chunk.of.products.narrow(1, 0, sizes_.C);
  base::add_bmm(joined(grad_late), joined(seen).transpose(1, 2), joined(grad_read));
  const at::Tensor result = empty_values();
  products_into(result, chunk.of.inverse.transpose(2, 3), grad_late);
  return result;
}

/// -> the gradient of the products q k^T and k k^T [M, 2C, C]; adds to grad_beta, fills grad_decay.
/// A decay between two positions counts for all between them: what does not span a position is
/// left out of its sum, not subtracted from it, so a strong decay has a gradient of 0 indeed.
at::Tensor DeltaScan::grad_of_pairs(const Chunk& chunk, const at::Tensor& grad_read,
                                    const at::Tensor& grad_written, const at::Tensor& writes,
                                    const at::Tensor& grad_beta, const at::Tensor& grad_decay) {
  const auto& [B, T, G, R, K, V, M, C, N] = sizes_;
  const at::Tensor written = writes.transpose(2, 3);
  const at::Tensor of_queries = at::empty({R, M, C, C}, options());
  const at::Tensor of_keys = at::empty_like(of_queries);
  products_into(of_queries, grad_read, written);
  products_into(of_keys, grad_written, written);
  const at::Tensor pairs = at::empty({R, M, 2 * C, C}, options());
  at::Tensor upper = pairs.narrow(2, 0, C), lower = pairs.narrow(2, C, C);
  at::mul_out(upper, of_queries, chunk.of.decay);
  at::mul_out(lower, of_keys.tril_(-1), chunk.of.decay);
  const at::Tensor weighed = pairs * chunk.of.products;
  const at::Tensor of_reads = weighed.narrow(2, 0, C), of_writes = weighed.narrow(2, C, C);
  const at::Tensor minus_beta = of_chunk(gates_.beta, chunk).neg();
  grad_beta.sub_(of_writes.sum(3));
  lower.mul_(minus_beta);
  of_queries.copy_(of_reads).addcmul_(of_writes, minus_beta);  // by log of the decay of a pair

  const at::Tensor earlier = gates_.ahead.to(compute_);  // row j, column t > j
  at::Tensor spans = of_keys.view({R * M * C, C});
  base::mm_out(spans, of_queries.view({R * M * C, C}), earlier);
  of_keys.tril_();  // t <= i
  at::Tensor result = grad_decay;
  at::sum_out(result, of_keys, {2});
  return R == 1 ? pairs[0] : pairs.sum(0);
}

void DeltaScan::finish_keys(const Chunk& chunk, const at::Tensor& grad_qk,
                            const DeltaInputs& grads) const {
  const auto& [B, T, G, R, K, V, M, C, N] = sizes_;
  const at::Tensor along = at::mul(grad_qk, chunk.of.qk).sum(2, /*keepdim=*/true);
  along.narrow(1, 0, C).mul_(static_cast<double>(K));  // q is 1 / sqrt(K) of a unit vector
  grad_qk.addcmul_(chunk.of.qk, along, -1).mul_(chunk.of.scale);
  const at::Tensor parts = grad_qk.view({B, G, 2, C, K}).narrow(3, 0, chunk.length);
  positions(grads.q, chunk, 1).select(0, 0).copy_(parts.select(2, 0));
  positions(grads.k, chunk, 1).select(0, 0).copy_(parts.select(2, 1));
}

/// [N, R, M, C] -> [B, T, H].
at::Tensor by_position(const at::Tensor& gate, const DeltaSizes& sizes) {
  return gate.view({sizes.N, sizes.R, sizes.B, sizes.G, sizes.C})
      .permute({2, 0, 4, 3, 1})
      .reshape({sizes.B, sizes.N * sizes.C, sizes.G * sizes.R})
      .narrow(1, 0, sizes.T);
}

/// Views of so many key heads and their value heads.
DeltaInputs heads_of(const DeltaInputs& in, std::int64_t first, std::int64_t count) {
  const std::int64_t repeat = in.v.size(2) / in.q.size(2);
  const auto values = [&](const at::Tensor& x) {
    return x.narrow(2, first * repeat, count * repeat);
  };
  return {in.q.narrow(2, first, count), in.k.narrow(2, first, count), values(in.v),
          values(in.decay), values(in.beta)};
}

/// Calls f(inputs of some key heads, the first of them): heads know nothing of each other, and the
/// states of a few of them stay in the cache of a CPU. A device takes all at once.
template <class F>
void for_heads(const DeltaInputs& in, F&& f) {
  const DeltaSizes sizes(in);
  const std::int64_t of_one = std::max<std::int64_t>(1, sizes.B * sizes.R * sizes.K * sizes.V);
  const std::int64_t step =
      kernels::on_cpu(in.v) ? std::max<std::int64_t>(1, kStatesOnCpu / of_one) : sizes.G;
  for (std::int64_t first = 0; first < sizes.G; first += step) {
    f(heads_of(in, first, std::min(step, sizes.G - first)), first);
  }
}

at::Tensor read_all(const DeltaInputs& in, const Documents& documents) {
  const WideScope inside;
  const at::Tensor out = at::empty(in.v.sizes(), in.v.options());
  if (out.numel() == 0) return out;
  for_heads(in, [&](const DeltaInputs& part, std::int64_t first) {
    DeltaScan scan(part, documents);
    at::Tensor state = scan.no_state();
    const std::int64_t heads = part.v.size(2), repeat = heads / part.q.size(2);
    scan.forward(state, out.narrow(2, first * repeat, heads));
  });
  return out;
}

DeltaInputs gradients_of(const DeltaInputs& in, const Documents& documents,
                         const at::Tensor& grad) {
  const WideScope inside;
  const auto like = [](const at::Tensor& x) { return at::empty(x.sizes(), x.options()); };
  const DeltaInputs grads{like(in.q), like(in.k), like(in.v), like(in.decay), like(in.beta)};
  if (in.v.numel() == 0) return grads;
  for_heads(in, [&](const DeltaInputs& part, std::int64_t first) {
    DeltaScan scan(part, documents);
    const DeltaSizes sizes(part);
    const DeltaInputs of_part = heads_of(grads, first, sizes.G);
    DeltaInputs of_chunks = of_part;
    of_chunks.decay =
        at::empty({sizes.N, sizes.R, sizes.M, sizes.C}, in.v.options().dtype(wide_dtype(in.v)));
    of_chunks.beta = at::empty_like(of_chunks.decay);
    scan.backward(grad.narrow(2, first * sizes.R, sizes.G * sizes.R), scan.keep(), of_chunks);
    of_part.decay.copy_(by_position(of_chunks.decay, sizes));
    of_part.beta.copy_(by_position(of_chunks.beta, sizes));
  });
  return grads;
}

struct GatedDeltaRuleFunction : torch::autograd::Function<GatedDeltaRuleFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const at::Tensor& decay, const at::Tensor& beta,
                            const std::optional<at::Tensor>& starts) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({q, k, v, decay, beta, starts.value_or(at::Tensor())});
    return read_all({q, k, v, decay, beta}, {starts.value_or(at::Tensor())});
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    if (!grads[0].defined()) return variable_list(6);  // [Note: left-out results]
    const variable_list saved = ctx->get_saved_variables();
    const DeltaInputs of =
        gradients_of({saved[0], saved[1], saved[2], saved[3], saved[4]}, {saved[5]}, grads[0]);
    return {of.q, of.k, of.v, of.decay, of.beta, at::Tensor()};
  }
};

void check_heads(const DeltaInputs& in) {
  TESSERA_INVARIANT(in.q.sizes() == in.k.sizes() && in.q.dim() == 4 && in.v.dim() == 4 &&
                        in.v.size(2) % in.q.size(2) == 0 && in.q.size(1) > 0,
                    "heads of the delta rule that do not fit");
}

/// One position by the rule as it stands.
at::Tensor read_one(const DeltaInputs& in, at::Tensor& state) {
  const DeltaSizes sizes(in);
  const auto& [B, T, G, R, K, V, M, C, N] = sizes;
  const at::ScalarType compute = state.scalar_type();
  const auto of_heads = [&](const at::Tensor& x) {
    const at::Tensor wide = x.to(compute);
    const at::Tensor scale = wide.square().sum(3, /*keepdim=*/true).add_(kHeadNormEps).rsqrt_();
    return (wide * scale).unflatten(2, {G, 1}).expand({B, 1, G, R, K}).reshape({B * G * R, 1, K});
  };
  const auto of_gate = [&](const at::Tensor& x) {
    return x.to(compute).reshape({B * G * R, 1, 1});
  };
  const at::Tensor k = of_heads(in.k);
  const at::Tensor q = of_heads(in.q) * (1.0 / std::sqrt(static_cast<double>(K)));
  const at::Tensor next = joined(state) * of_gate(in.decay).exp();
  const at::Tensor value = in.v.to(compute).reshape({B * G * R, 1, V});
  const at::Tensor written = (value - products_of(k, next)).mul_(of_gate(in.beta));
  base::add_bmm(next, k.transpose(1, 2), written);
  state = next.view({B, G * R, K, V});
  return products_of(q, next).view({B, 1, G * R, V}).to(in.v.scalar_type());
}

}  // namespace

at::Tensor gated_delta_rule(const DeltaInputs& in, const Documents& documents) {
  check_heads(in);
  if (!c10::GradMode::is_enabled()) return read_all(in, documents);
  return GatedDeltaRuleFunction::apply(in.q, in.k, in.v, in.decay, in.beta,
                                       given(documents.starts));
}

at::Tensor gated_delta_rule_after(const DeltaInputs& in, at::Tensor& state) {
  check_heads(in);
  const at::NoGradGuard no_grad;
  const WideScope inside;
  const DeltaSizes sizes(in);
  const auto& [B, T, G, R, K, V, M, C, N] = sizes;
  if (!state.defined()) {
    state = at::zeros({B, G * R, K, V}, in.v.options().dtype(wide_dtype(in.v)));
  }
  if (in.v.numel() == 0) return at::empty(in.v.sizes(), in.v.options());
  if (T == 1) return read_one(in, state);
  const at::Tensor out = at::empty(in.v.sizes(), in.v.options());
  DeltaScan scan(in, {});
  at::Tensor by_key_head =
      state.view({B, G, R, K, V}).permute({2, 0, 1, 3, 4}).reshape({R, M, K, V});
  if (by_key_head.is_alias_of(state)) by_key_head = by_key_head.clone();
  scan.forward(by_key_head, out);
  state = by_key_head.view({R, B, G, K, V}).permute({1, 2, 0, 3, 4}).reshape({B, G * R, K, V});
  return out;
}

}  // namespace tessera::nn
