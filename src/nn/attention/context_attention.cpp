#include "nn/attention/context_attention.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "base/first_derivative.h"
#include "base/test_hooks.h"
#include "grad/region.h"
#include "kernels/kernels.h"
#include "kernels/on_cpu.h"
#include "kernels/seen_blocks.h"
#include "nn/attention/attention.h"
#include "parallel/context_exchange.h"
#include "tessera/error.h"
#include "tessera/wide_scope.h"

namespace tessera::nn {
namespace {

using layout::Range;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kGatherName = "keys and values of attention";
constexpr const char* kHeadsName = "heads of attention";
constexpr const char* kRegionName = "attention over ranks of a context region";

/// The positions whose keys and values a rank passes.
enum class KeysGiven : std::uint8_t { kOwn, kWhole };

/// Holds what a call has besides tensors.
struct PartCall : torch::CustomClassHolder {
  PartCall(parallel::Axis over, std::shared_ptr<const ContextRows> of_rows, Scores kind,
           KeysGiven keys, std::int64_t most, double factor)
      : axis(std::move(over)),
        rows(std::move(of_rows)),
        scores(kind),
        given(keys),
        window(most),
        scale(factor) {}
  const layout::ContextCut& cut() const { return rows->cut; }
  std::vector<int> own_parts() const { return cut().parts_of(axis.rank); }

  const parallel::Axis axis;
  const std::shared_ptr<const ContextRows> rows;
  const Scores scores;
  const KeysGiven given;
  const std::int64_t window;
  const double scale;
};

/// Returns the same parts, all on one rank.
layout::ContextCut not_shared(const layout::ContextCut& cut) {
  return {.ranks = 1,
          .positions = cut.positions,
          .owner = std::vector<int>(static_cast<std::size_t>(cut.parts()), 0)};
}

template <class T>
c10::intrusive_ptr<T> held(AutogradContext* ctx) {
  return c10::dynamic_intrusive_pointer_cast<T>(ctx->saved_data["call"].toCapsule());
}

/// Returns the keys that the queries of each part see, in any row.
std::vector<Range> reach_of_parts(const layout::ContextCut& cut, std::int64_t rows,
                                  const kernels::SeenKeys& seen) {
  std::vector<Range> reach(static_cast<std::size_t>(cut.parts()), Range{cut.positions, 0});
  const kernels::SeenSizes sizes{.rows = rows,
                                 .queries = cut.positions,
                                 .keys = cut.positions,
                                 .block = std::max<std::int64_t>(1, cut.part_size())};
  for (const kernels::SeenBlock& block : kernels::seen_blocks(sizes, seen)) {
    Range& of_part = reach[static_cast<std::size_t>(block.queries.begin / sizes.block)];
    // From a multiple of kFirstKeys, as blocks begin in a whole row.
    of_part.begin =
        std::min(of_part.begin, block.keys.begin / kernels::kFirstKeys * kernels::kFirstKeys);
    of_part.end = std::max(of_part.end, block.keys.end);
  }
  return reach;
}

/// Returns own keys and values as [B*G, n, .], for exchanges.
std::vector<at::Tensor> by_position(const at::Tensor& k, const at::Tensor& v) {
  const std::int64_t rows = k.size(0), groups = k.size(1), positions = k.size(2);
  return {k.reshape({rows * groups, positions, k.size(4)}),
          v.reshape({rows, positions, groups, v.size(2) / groups})
              .transpose(1, 2)
              .reshape({rows * groups, positions, v.size(2) / groups})};
}

/// The tensors that attention of one part reads.
struct OfPart {
  at::Tensor q, keys, values;
  std::optional<at::Tensor> begins, ends;
  std::int64_t first = 0;  ///< the place of its first query among these keys
};

/// The tensors of a call, and which of them a part takes.
class PartInputs {
 public:
  PartInputs(const PartCall& call, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
             const std::optional<at::Tensor>& begins, const std::optional<at::Tensor>& ends)
      : call_(call),
        q_(q),
        begins_(begins),
        ends_(ends),
        own_(by_position(k, v)),
        exchange_{call.given == KeysGiven::kWhole ? parallel::Axis() : call.axis,
                  call.given == KeysGiven::kWhole ? not_shared(call.cut()) : call.cut(),
                  reach_of_parts(call.cut(), q.size(0), {begins, ends, call.window}), kGatherName} {
  }

  const parallel::ContextExchange& exchange() const { return exchange_; }
  const std::vector<at::Tensor>& own() const { return own_; }

  /// Collective.
  void gather(parallel::Direction direction) {
    whole_ = parallel::gather_reached(own_, exchange_, direction);
    for (at::Tensor& one : whole_) {
      one = one.view({q_.size(0), q_.size(1), one.size(1), one.size(2)});
    }
  }

  /// Returns the tensors of the `index`-th of own parts, which is part `number` of the row.
  OfPart part(std::int64_t index, int number) const {
    const Range queries = call_.cut().part(number);
    const Range& reach = exchange_.reach[static_cast<std::size_t>(number)];
    const auto of_keys = [&](const at::Tensor& all) {
      return all.narrow(2, reach.begin, reach.size());
    };
    const auto of_queries = [&](const std::optional<at::Tensor>& all) {
      return all ? std::optional(all->narrow(1, queries.begin, queries.size()) - reach.begin)
                 : std::nullopt;
    };
    return {q_.narrow(2, index * queries.size(), queries.size()).contiguous(),
            of_keys(whole_[0]),
            of_keys(whole_[1]),
            of_queries(begins_),
            of_queries(ends_),
            queries.begin - reach.begin};
  }

 private:
  const PartCall& call_;
  const at::Tensor q_;
  const std::optional<at::Tensor> begins_, ends_;
  const std::vector<at::Tensor> own_;
  const parallel::ContextExchange exchange_;
  std::vector<at::Tensor> whole_;  // [B, G, T, .]
};

/// The tensors that a call keeps, in this order; then the kernels' own, as many a part.
enum Kept : std::size_t { kQ, kK, kV, kSinks, kBegins, kEnds, kResult, kOfKernels };

/// The addends of one part to gradients: of keys and values [B, G, reach, .], wide.
struct Addends {
  at::Tensor q, keys, values;
  at::Tensor sinks;  ///< undefined where it is not requested
};

Addends addends_of(const PartCall& call, const OfPart& part, const at::Tensor& grad,
                   const at::Tensor& result, const at::Tensor& sinks, bool of_sinks,
                   at::TensorList kept) {
  if (call.scores == Scores::kWide) {
    auto [q, keys, values, of_heads] = kernels::windowed_attention_backward(
        grad, part.q, part.keys, part.values, given(sinks), part.begins, part.ends, part.first,
        call.window, call.scale, of_sinks);
    return {q, keys, values, of_heads};
  }
  auto [q, keys, values] =
      kernels::part_attention_backward(grad, result, part.q, part.keys, part.values, kept,
                                       part.begins, part.ends, part.first, call.window, call.scale);
  return {q, keys, values, {}};
}

struct PartAttentionFunction : torch::autograd::Function<PartAttentionFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const std::optional<at::Tensor>& sinks,
                            const std::optional<at::Tensor>& begins,
                            const std::optional<at::Tensor>& ends,
                            const c10::intrusive_ptr<PartCall>& call) {
    // The result lives longer than what is gathered, and is allocated before it: so the next layer
    // finds room in the memory of the latter.
    at::Tensor mixed = at::empty({q.size(0), q.size(2), v.size(2) * q.size(3)}, q.options());
    PartInputs inputs(*call, q, k, v, begins, ends);
    inputs.gather(parallel::Direction::kForward);
    const at::Tensor none;
    std::vector<at::Tensor> saved{
        q, k, v, sinks.value_or(none), begins.value_or(none), ends.value_or(none), none};
    const std::vector<int> parts = call->own_parts();
    const std::int64_t size = call->cut().part_size();
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const auto index = static_cast<std::int64_t>(i);
      const OfPart part = inputs.part(index, parts[i]);
      const at::Tensor here = mixed.narrow(1, index * size, size);
      if (call->scores == Scores::kWide) {
        here.copy_(kernels::windowed_attention(part.q, part.keys, part.values, sinks, part.begins,
                                               part.ends, part.first, call->window, call->scale));
        continue;
      }
      auto [result, kept] =
          kernels::part_attention_forward(part.q, part.keys, part.values, part.begins, part.ends,
                                          part.first, call->window, call->scale);
      here.copy_(result);
      saved.insert(saved.end(), kept.begin(), kept.end());
    }
    if (!kernels::on_cpu(q)) saved[kResult] = mixed;
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    return mixed;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    const variable_list saved = ctx->get_saved_variables();
    const auto call = held<PartCall>(ctx);
    // An unused result has zeros for its gradient: all ranks have to issue the same exchanges.
    const at::Tensor &q = saved[kQ], &k = saved[kK], &v = saved[kV];
    const at::Tensor grad_q = at::empty(q.sizes(), q.options());
    PartInputs inputs(*call, q, k, v, given(saved[kBegins]), given(saved[kEnds]));
    inputs.gather(parallel::Direction::kBackward);
    const WideScope addends;
    const std::vector<int> parts = call->own_parts();
    const std::size_t kept = (saved.size() - kOfKernels) / parts.size();
    const std::int64_t size = call->cut().part_size();
    parallel::PartSums sums(inputs.exchange(), inputs.own(),
                            at::promote_types(k.scalar_type(), at::kFloat));
    at::Tensor grad_sinks;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::int64_t begin = static_cast<std::int64_t>(i) * size;
      const auto of_part = [&](const at::Tensor& x) {
        return x.defined() ? x.narrow(1, begin, size) : x;
      };
      const Addends found = addends_of(*call, inputs.part(static_cast<std::int64_t>(i), parts[i]),
                                       of_part(grads[0]), of_part(saved[kResult]), saved[kSinks],
                                       saved[kSinks].defined() && ctx->needs_input_grad(3),
                                       at::TensorList(saved).slice(kOfKernels + i * kept, kept));
      grad_q.narrow(2, begin, size).copy_(found.q);
      sums.add(parts[i], {found.keys.flatten(0, 1), found.values.flatten(0, 1)});
      if (found.sinks.defined()) {
        grad_sinks = grad_sinks.defined() ? grad_sinks + found.sinks : found.sinks;
      }
    }
    auto [grad_k, grad_v] = as_given(sums.finish(), k, v);
    const at::Tensor none;
    return {grad_q, grad_k, grad_v, grad_sinks, none, none, none};
  }

 private:
  /// Sums [B*G, ., .] in the shapes and dtypes of k and v.
  static std::tuple<at::Tensor, at::Tensor> as_given(const std::vector<at::Tensor>& sums,
                                                     const at::Tensor& k, const at::Tensor& v) {
    return {sums[0].to(k.scalar_type()).view(k.sizes()),
            sums[1]
                .to(v.scalar_type())
                .view({k.size(0), k.size(1), k.size(2), v.size(2) / k.size(1)})
                .transpose(1, 2)
                .reshape(v.sizes())};
  }
};

/// The axis and the cut that an all-to-all of heads needs in both directions.
struct HeadsCall : torch::CustomClassHolder {
  HeadsCall(parallel::Axis over, layout::ContextCut of_rows)
      : axis(std::move(over)), cut(std::move(of_rows)) {}
  const parallel::Axis axis;
  const layout::ContextCut cut;
};

/// Three of [B, G, n, .] -> [B, G / ranks, T, .].
struct ToHeadsFunction : torch::autograd::Function<ToHeadsFunction> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const c10::intrusive_ptr<HeadsCall>& call) {
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    return parallel::to_heads({q, k, v}, call->axis, call->cut, kHeadsName);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    const auto call = held<HeadsCall>(ctx);
    auto back = parallel::to_positions(grads, call->axis, call->cut, kHeadsName,
                                       parallel::Direction::kBackward);
    back.emplace_back();
    return back;
  }
};

/// [B, G / ranks, T, .] -> [B, G, n, .].
struct ToPositionsFunction : torch::autograd::Function<ToPositionsFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                            const c10::intrusive_ptr<HeadsCall>& call) {
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    return parallel::to_positions({x}, call->axis, call->cut, kHeadsName).front();
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    base::refuse_double_backward();
    const auto call = held<HeadsCall>(ctx);
    return {parallel::to_heads({grads[0]}, call->axis, call->cut, kHeadsName,
                               parallel::Direction::kBackward)
                .front(),
            at::Tensor()};
  }
};

/// Returns the mask with the sinks of the heads that the rank has in the form kHeads.
AttentionMask of_own_heads(AttentionMask mask, const ContextRegion& region) {
  if (!mask.sinks.defined()) return mask;
  const std::int64_t heads = mask.sinks.size(0) / region.axis.size;
  mask.sinks = mask.sinks.narrow(0, region.axis.rank * heads, heads);
  return mask;
}

at::Tensor attention_of_rows(const AttentionHeads& heads, double scale, const AttentionMask& mask,
                             Scores scores) {
  if (scores == Scores::kOfInputs) return causal_attention(heads.q, heads.k, heads.v, scale, mask);
  const at::Tensor values = heads.v.unflatten(2, {heads.q.size(1), -1}).transpose(1, 2);
  return windowed_attention(heads.q, heads.k.squeeze(3), values, mask, scale);
}

}  // namespace

at::Tensor over_heads(const AttentionHeads& heads, const ContextRegion& region,
                      const ContextRows& rows,
                      const std::function<at::Tensor(const AttentionHeads&)>& attend) {
  if (region.axis.alone()) return attend(heads);
  grad::refuse_recording(kRegionName);
  const std::int64_t groups = heads.q.size(1), repeat = heads.q.size(3);
  const std::int64_t own = groups / region.axis.size;
  TESSERA_INVARIANT(own * region.axis.size == groups, groups, " heads of keys and values over ",
                    region.axis.size, " ranks");
  const auto call = c10::make_intrusive<HeadsCall>(region.axis, rows.cut);
  const variable_list whole =
      ToHeadsFunction::apply(heads.q.flatten(3, 4), heads.k.flatten(3, 4),
                             heads.v.unflatten(2, {groups, -1}).transpose(1, 2), call);
  const AttentionHeads of_rows{whole[0].unflatten(3, {repeat, -1}), whole[1].unsqueeze(3),
                               whole[2].transpose(1, 2).flatten(2, 3)};
  const at::Tensor mixed = attend(of_rows).unflatten(2, {own, -1}).transpose(1, 2);
  return ToPositionsFunction::apply(mixed, call).transpose(1, 2).flatten(2, 3);
}

namespace {

AttentionMask seen_by_tests(AttentionMask mask, const Documents& documents) {
  if (const auto* hook = test_hooks::context_mask.get()) (*hook)(mask, documents);
  return mask;
}

at::Tensor by_parts(const AttentionHeads& heads, double scale, const AttentionMask& mask,
                    Scores scores, KeysGiven keys, const ContextRegion& region,
                    const Documents& documents) {
  grad::refuse_recording(kRegionName);
  const WideScope inside;
  return PartAttentionFunction::apply(
      heads.q, heads.k, heads.v, given(mask.sinks), given(mask.begins), given(mask.ends),
      c10::make_intrusive<PartCall>(region.axis, documents.context, scores, keys,
                                    mask.window.value_or(kernels::kNoWindow), scale));
}

}  // namespace

at::Tensor context_attention(const AttentionHeads& heads, double scale, const AttentionMask& mask,
                             Scores scores, const ContextRegion& region,
                             const Documents& documents) {
  if (documents.context == nullptr) return attention_of_rows(heads, scale, mask, scores);
  const AttentionMask seen = seen_by_tests(mask, documents);
  if (region.form == ContextForm::kHeads) {
    return over_heads(heads, region, *documents.context, [&](const AttentionHeads& all) {
      return attention_of_rows(all, scale, of_own_heads(seen, region), scores);
    });
  }
  return by_parts(heads, scale, seen, scores, KeysGiven::kOwn, region, documents);
}

at::Tensor attention_to_whole(const AttentionHeads& heads, double scale, const AttentionMask& mask,
                              const ContextRegion& region, const Documents& documents) {
  return by_parts(heads, scale, mask, Scores::kOfInputs, KeysGiven::kWhole, region, documents);
}

namespace {

/// Returns what all parts of a rank reach together, in the place of its first part, so that a rank
/// has one addend; its other parts reach nothing.
std::vector<Range> reach_of_ranks(const layout::ContextCut& cut, const std::vector<Range>& reach) {
  std::vector<Range> of_ranks(reach.size());
  for (int rank = 0; rank < cut.ranks; ++rank) {
    const std::vector<int> parts = cut.parts_of(rank);
    Range& first = of_ranks[static_cast<std::size_t>(parts.front())];
    first = {cut.positions, 0};
    for (const int part : parts) {
      const Range& one = reach[static_cast<std::size_t>(part)];
      first.begin = std::min(first.begin, one.begin);
      first.end = std::max(first.end, one.end);
    }
  }
  return of_ranks;
}

}  // namespace

at::Tensor whole_of_context(const at::Tensor& own, const AttentionMask& mask,
                            const ContextRegion& region, const Documents& documents) {
  const layout::ContextCut& cut = documents.context->cut;
  const kernels::SeenKeys seen{given(mask.begins), given(mask.ends),
                               mask.window.value_or(kernels::kNoWindow)};
  return parallel::gather_places(
      own,
      {region.axis, cut, reach_of_ranks(cut, reach_of_parts(cut, own.size(0), seen)), kGatherName});
}

}  // namespace tessera::nn
