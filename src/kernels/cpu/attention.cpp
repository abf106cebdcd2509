// Matrix products around a fused softmax, by blocks of queries with the keys that they see. The
// products use the matrix units that the machine has, and a block's scores stay in its cache. Of
// the scores two numbers a row are kept; backward computes a block's weights again. Then the
// softmax of a block of rows with a window and sinks.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <span>
#include <utility>
#include <vector>

#include "base/threads/parallel.h"
#include "base/threads/product.h"
#include "base/threads/shapes_only.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/implementations.h"
#include "kernels/results.h"
#include "kernels/seen_blocks.h"
#include "layout/range.h"

namespace tessera::kernels::cpu {
namespace {

/// B rows, G key/value heads, T positions of queries, the first at position `first` among the keys,
/// R query heads of each, D head_dim.
struct Sizes {
  explicit Sizes(const at::Tensor& q, std::int64_t first_query = 0)
      : first(first_query),
        rows(q.size(0)),
        groups(q.size(1)),
        positions(q.size(2)),
        repeat(q.size(3)),
        head_dim(q.size(4)) {}
  std::int64_t first, rows, groups, positions, repeat, head_dim;
};

/// Whether a call returns a tensor or uses it only for itself.
enum class Role { kResult, kTemporary };

at::Tensor empty(at::IntArrayRef sizes, const at::Tensor& like, Role role) {
  return role == Role::kResult ? result(sizes, like.options()) : at::empty(sizes, like.options());
}

/// Exchanges dims 1 and 2 of x [., ., ., .], viewed as `sizes`; copies only where necessary.
at::Tensor turned(const at::Tensor& x, at::IntArrayRef sizes, Role role) {
  const at::Tensor other = x.transpose(1, 2);
  if (other.is_contiguous()) return other.view(sizes);
  const at::Tensor copy = empty(sizes, x, role);
  copy.view(other.sizes()).copy_(other);
  return copy;
}

/// [B, G, N, D] -> [B*G, N, D]; copies only where the heads of a row do not follow each other.
at::Tensor by_head(const at::Tensor& x) {
  return x.reshape({x.size(0) * x.size(1), x.size(2), x.size(3)});
}

/// Copies [B, T, G*n*D] -> [B*G, T*n, D]. D is x's own: values may have another one than queries.
at::Tensor by_group(const at::Tensor& x, const Sizes& sizes, std::int64_t n, Role role) {
  const std::int64_t head_dim = x.size(2) / (sizes.groups * n);
  return turned(x.view({sizes.rows, sizes.positions, sizes.groups, n * head_dim}),
                {sizes.rows * sizes.groups, sizes.positions * n, head_dim}, role);
}

/// The inverse of by_group.
at::Tensor by_position(const at::Tensor& x, const Sizes& sizes, std::int64_t n) {
  const std::int64_t head_dim = x.size(2);
  return turned(x.view({sizes.rows, sizes.groups, sizes.positions, n * head_dim}),
                {sizes.rows, sizes.positions, sizes.groups * n * head_dim}, Role::kResult);
}

/// Views [B, G, T, n, D] as [B*G, T*n, D].
at::Tensor flat(const at::Tensor& x) {
  return x.view({x.size(0) * x.size(1), x.size(2) * x.size(3), x.size(4)});
}

/// Queries of a block, of some of the rows and groups, which are computed together.
struct Part {
  SeenBlock block;
  layout::Range rows, groups;  ///< whole rows, or groups of one row
  std::int64_t entries() const { return rows.size() * groups.size(); }
};

/// The scores of a part stay in the cache of a core or two.
constexpr std::int64_t kScoresBytes = std::int64_t{1} << 20;

/// Short enough that few scores are computed that no query sees, long enough for efficient
/// products: those of 16 bits need longer ones.
std::int64_t queries_of_block(const Sizes& sizes, const SeenKeys& seen,
                              std::int64_t element_bytes) {
  const std::int64_t factor = element_bytes == 2 ? 2 : 1;
  return factor * std::clamp<std::int64_t>(256 / sizes.repeat, 32, seen.begins ? 64 : 128);
}

std::vector<Part> parts_of(const Sizes& sizes, std::int64_t keys, const SeenKeys& seen,
                           std::int64_t element_bytes) {
  std::vector<Part> parts;
  for (const SeenBlock& block : seen_blocks({sizes.rows, sizes.positions, keys, sizes.first,
                                             queries_of_block(sizes, seen, element_bytes)},
                                            seen)) {
    const std::int64_t of_entry =
        block.queries.size() * sizes.repeat * block.keys.size() * element_bytes;
    const std::int64_t most = std::max<std::int64_t>(1, kScoresBytes / of_entry);
    const std::int64_t groups = std::min(most, sizes.groups);
    const std::int64_t rows = groups < sizes.groups ? 1 : most / sizes.groups;
    for (std::int64_t row = block.rows.begin; row < block.rows.end; row += rows) {
      for (std::int64_t group = 0; group < sizes.groups; group += groups) {
        parts.push_back({block,
                         {row, std::min(block.rows.end, row + rows)},
                         {group, std::min(sizes.groups, group + groups)}});
      }
    }
  }
  return parts;
}

/// One attention: views of its tensors for each part, and memory that all parts share.
class Parts {
 public:
  enum Memory : std::size_t { kWeights, kScores, kProduct, kMemories };

  /// keys and values [B*G, N, .].
  Parts(const Sizes& sizes, const at::Tensor& keys, const at::Tensor& values, const SeenKeys& seen,
        double scale)
      : sizes_(sizes),
        keys_(keys.size(1)),
        most_columns_(std::max(keys.size(2), values.size(2))),
        seen_(seen),
        scale_(scale),
        like_(keys),
        parts_(parts_of(sizes, keys_, seen, keys.element_size())) {}

  /// Returns all parts; in a dry run only the one with most scores, since all take the same memory.
  std::span<const Part> computed() const {
    if (!base::shapes_only() || parts_.empty()) return parts_;
    const auto most = std::ranges::max_element(parts_, {}, [](const Part& part) {
      return part.entries() * part.block.queries.size() * part.block.keys.size();
    });
    return {most, most + 1};
  }
  /// Whether each row's queries meet all their keys in one part.
  bool at_once() const {
    return std::ranges::all_of(parts_, [this](const Part& part) {
      return part.block.queries.size() == sizes_.positions && part.block.keys.size() == keys_;
    });
  }

  // Memory that the parts use in turn. [entries, rows, keys]:
  at::Tensor scores(Memory memory, const Part& part) {
    return taken(memory, {part.entries(), rows_of(part), part.block.keys.size()});
  }
  /// [entries, rows, columns].
  at::Tensor by_query(const Part& part, std::int64_t columns) {
    return taken(kProduct, {part.entries(), rows_of(part), columns});
  }
  /// [entries, keys, columns].
  at::Tensor by_key(const Part& part, std::int64_t columns) {
    return taken(kProduct, {part.entries(), part.block.keys.size(), columns});
  }

  /// Returns the part's queries of x [B*G, T*R, ...].
  at::Tensor queries_of(const at::Tensor& x, const Part& part) const {
    return entries_of(x, part).narrow(1, part.block.queries.begin * sizes_.repeat,
                                      part.block.queries.size() * sizes_.repeat);
  }
  /// Returns the part's keys of x [B*G, N, ...].
  at::Tensor keys_of(const at::Tensor& x, const Part& part) const {
    return entries_of(x, part).narrow(1, part.block.keys.begin, part.block.keys.size());
  }
  at::Tensor entries_of(const at::Tensor& x, const Part& part) const {
    return x.narrow(0, part.rows.begin * sizes_.groups + part.groups.begin, part.entries());
  }

  /// Computes the softmax of the rows of `scores` in place; `sums` [entries, rows, 2] or undefined.
  void softmax(const at::Tensor& scores, const at::Tensor& sums, const Part& part) const {
    run(scores, {}, sums, part);
  }
  /// Turns the gradient of weights into that of scores, in place; `scores` become the weights.
  void softmax_backward(const at::Tensor& grad, const at::Tensor& scores, const at::Tensor& sums,
                        const Part& part) const {
    run(grad, scores, sums, part);
  }

 private:
  std::int64_t rows_of(const Part& part) const { return part.block.queries.size() * sizes_.repeat; }

  at::Tensor taken(Memory memory, at::IntArrayRef sizes) {
    at::Tensor& block = memory_.at(memory);
    if (!block.defined()) {
      std::int64_t most = 0;
      for (const Part& part : parts_) {
        const std::int64_t keys = part.block.keys.size(), rows = rows_of(part);
        const std::int64_t columns = memory == kProduct ? most_columns_ : keys;
        const std::int64_t longest = memory == kProduct ? std::max(keys, rows) : rows;
        most = std::max(most, part.entries() * longest * columns);
      }
      block = at::empty({most}, like_.options());
    }
    return block.narrow(0, 0, sizes[0] * sizes[1] * sizes[2]).view(sizes);
  }

  SeenByRows seen_by(const Part& part) const {
    const layout::Range& queries = part.block.queries;
    const auto of_part = [&](const std::optional<at::Tensor>& all) {
      return all ? data<long>(*all) + part.rows.begin * sizes_.positions + queries.begin : nullptr;
    };
    return {.begins = of_part(seen_.begins),
            .ends = of_part(seen_.ends),
            .from = part.block.keys.begin,
            .keys = part.block.keys.size(),
            .first = sizes_.first + queries.begin - part.block.keys.begin,
            .window = seen_.window,
            .groups = part.entries(),  // of one row, where rows differ in what they see
            .repeat = sizes_.repeat,
            .period = queries.size() * sizes_.repeat};
  }

  void run(const at::Tensor& scores, const at::Tensor& weights, const at::Tensor& sums,
           const Part& part) const {
    with_kernels(scores.scalar_type(), [&](auto types, const auto& kernels) {
      using T = typename decltype(types)::T;
      const CausalRows<T> job{.scores = mutable_data<T>(scores),
                              .weights = mutable_data<T>(weights),
                              .sums = mutable_data<float>(sums),
                              .seen = seen_by(part),
                              .scale = static_cast<float>(scale_)};
      const auto kernel =
          weights.defined() ? kernels.causal_softmax_backward : kernels.causal_softmax;
      base::for_ranges(scores.size(0) * scores.size(1), rows_a_thread(scores.size(2)),
                       [&](std::int64_t begin, std::int64_t end) { kernel(job, begin, end); });
    });
  }

  Sizes sizes_;
  std::int64_t keys_, most_columns_;
  SeenKeys seen_;
  double scale_;
  at::Tensor like_;
  std::vector<Part> parts_;
  std::array<at::Tensor, kMemories> memory_;
};

/// Computes attention: queries [B*G, T*R, D], keys and values [B*G, N, .] -> [B, T, G*R*D']. Writes the rows' sums to `sums` [parts' rows, 2], part after part, if it
/// is defined.
at::Tensor attend(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                  const Sizes& sizes, const SeenKeys& seen, double scale, const at::Tensor& sums) {
  const std::int64_t head_dim = values.size(2);
  const at::Tensor result = kernels::result(
      {sizes.rows, sizes.positions, sizes.groups * sizes.repeat * head_dim}, queries.options());
  const at::Tensor by_group =
      result.view({sizes.rows, sizes.positions, sizes.groups, sizes.repeat * head_dim})
          .transpose(1, 2);
  Parts parts(sizes, keys, values, seen, scale);
  std::int64_t done = 0;
  for (const Part& part : parts.computed()) {
    at::Tensor scores = parts.scores(Parts::kWeights, part);
    base::bmm_out(scores, parts.queries_of(queries, part),
                  parts.keys_of(keys, part).transpose(1, 2));
    const std::int64_t rows = scores.size(0) * scores.size(1);
    parts.softmax(scores, sums.defined() ? sums.narrow(0, done, rows) : sums, part);
    done += rows;
    at::Tensor mixed = parts.by_query(part, head_dim);
    base::bmm_out(mixed, scores, parts.keys_of(values, part));
    by_group.narrow(0, part.rows.begin, part.rows.size())
        .narrow(1, part.groups.begin, part.groups.size())
        .narrow(2, part.block.queries.begin, part.block.queries.size())
        .copy_(mixed.view({part.rows.size(), part.groups.size(), part.block.queries.size(),
                           sizes.repeat * head_dim}));
  }
  return result;
}

/// Sums a gradient of keys or values [B*G, N, D] over parts: in fp32, in the order of the parts,
/// rounded once. Where a row has one part, which is the whole, its product is written in place.
class KeySum {
 public:
  KeySum(const at::Tensor& result, bool at_once) : result_(result) {
    if (at_once) return;
    sum_ =
        result.scalar_type() == at::kFloat ? result.zero_() : at::zeros(result.sizes(), at::kFloat);
  }
  /// Adds the product of the transposed rows [entries, rows, keys] with values [entries, rows, D].
  void add(Parts& parts, const Part& part, const at::Tensor& rows, const at::Tensor& values) {
    if (!sum_.defined()) {
      at::Tensor whole = parts.entries_of(result_, part);
      base::bmm_out(whole, rows.transpose(1, 2), values);
      return;
    }
    at::Tensor addend = parts.by_key(part, values.size(2));
    base::bmm_out(addend, rows.transpose(1, 2), values);
    const at::Tensor sum = parts.keys_of(sum_, part);
    if (sum.scalar_type() == addend.scalar_type()) {
      sum.add_(addend);
      return;
    }
    for (std::int64_t i = 0; i < sum.size(0); ++i) cpu::add_into(sum[i], addend[i]);
  }
  void finish() const {
    if (sum_.defined() && !sum_.is_same(result_)) result_.copy_(sum_);
  }

 private:
  at::Tensor result_, sum_;
};

/// The tensors of attention by heads, as backward reads them: queries and grad [B*G, T*R, .], keys
/// and values [B*G, N, .], and the sums of attend().
struct Attended {
  at::Tensor queries, keys, values, sums, grad;
};

/// Writes the gradient of queries to grad_q [B*G, T*R, D], and adds the parts' products to the
/// sums of keys and values.
void attend_backward(const Attended& of, Parts& parts, const at::Tensor& grad_q, KeySum& grad_keys,
                     KeySum& grad_values) {
  const bool at_once = parts.at_once();
  std::int64_t done = 0;
  for (const Part& part : parts.computed()) {
    const at::Tensor of_queries = parts.queries_of(of.queries, part);
    const at::Tensor of_grad = parts.queries_of(of.grad, part);
    const at::Tensor of_keys = parts.keys_of(of.keys, part);
    at::Tensor weights = parts.scores(Parts::kWeights, part);
    base::bmm_out(weights, of_queries, of_keys.transpose(1, 2));
    at::Tensor scores = parts.scores(Parts::kScores, part);
    base::bmm_out(scores, of_grad, parts.keys_of(of.values, part).transpose(1, 2));
    const std::int64_t rows = scores.size(0) * scores.size(1);
    parts.softmax_backward(scores, weights, of.sums.narrow(0, done, rows), part);
    done += rows;
    at::Tensor to_queries =
        at_once ? parts.entries_of(grad_q, part) : parts.by_query(part, grad_q.size(2));
    base::bmm_out(to_queries, scores, of_keys);
    if (!at_once) parts.queries_of(grad_q, part).copy_(to_queries);
    grad_keys.add(parts, part, scores, of_queries);
    grad_values.add(parts, part, weights, of_grad);
  }
  grad_keys.finish();
  grad_values.finish();
}

/// Makes them contiguous: tables read them by rows (Parts::seen_by).
SeenKeys seen_keys_of(const std::optional<at::Tensor>& begins,
                      const std::optional<at::Tensor>& ends, std::int64_t window) {
  const auto read = [](const std::optional<at::Tensor>& tensor) {
    return tensor ? std::optional(tensor->contiguous()) : std::nullopt;
  };
  return {read(begins), read(ends), window};
}

}  // namespace

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::optional<at::Tensor>& begins,
                            const std::optional<at::Tensor>& ends, std::int64_t window,
                            double scale) {
  const Sizes sizes(q);
  return attend(flat(q.contiguous()), flat(k.contiguous()),
                by_group(v.contiguous(), sizes, 1, Role::kTemporary), sizes,
                seen_keys_of(begins, ends, window), scale, {});
}

std::tuple<at::Tensor, std::vector<at::Tensor>> causal_attention_forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& begins, const std::optional<at::Tensor>& ends,
    std::int64_t window, double scale) {
  const Sizes sizes(q);
  const at::Tensor queries = flat(q.contiguous());
  const at::Tensor keys = flat(k.contiguous());
  const at::Tensor values = by_group(v.contiguous(), sizes, 1, Role::kResult);
  const at::Tensor sums =
      result({queries.size(0) * queries.size(1), 2}, queries.options().dtype(at::kFloat));
  const at::Tensor mixed =
      attend(queries, keys, values, sizes, seen_keys_of(begins, ends, window), scale, sums);
  return {mixed, {queries, keys, values, sums}};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> causal_attention_backward(
    const at::Tensor& grad_input, at::TensorList kept, const std::optional<at::Tensor>& begins,
    const std::optional<at::Tensor>& ends, std::int64_t window, std::int64_t groups,
    std::int64_t repeat, double scale) {
  const at::Tensor &queries = kept[0], &keys = kept[1], &values = kept[2];
  const std::int64_t head_dim = queries.size(2);
  const at::Tensor grad_q =
      result({queries.size(0) / groups, groups, queries.size(1) / repeat, repeat, head_dim},
             queries.options());
  const Sizes sizes(grad_q);
  const at::Tensor grad_k = result(keys.sizes(), keys.options());
  const at::Tensor grad_v = at::empty(values.sizes(), values.options());
  const at::Tensor grad = by_group(grad_input.contiguous(), sizes, repeat, Role::kTemporary);
  Parts parts(sizes, keys, values, seen_keys_of(begins, ends, window), scale);
  KeySum grad_keys(grad_k, parts.at_once()), grad_values(grad_v, parts.at_once());
  attend_backward({queries, keys, values, kept[3], grad}, parts, flat(grad_q), grad_keys,
                  grad_values);
  return {grad_q, grad_k.view({sizes.rows, groups, sizes.positions, 1, head_dim}),
          by_position(grad_v, sizes, 1)};
}

std::tuple<at::Tensor, std::vector<at::Tensor>> part_attention_forward(
    const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
    const std::optional<at::Tensor>& begins, const std::optional<at::Tensor>& ends,
    std::int64_t first, std::int64_t window, double scale) {
  const at::Tensor queries = by_head(q.flatten(2, 3));
  const at::Tensor sums =
      result({queries.size(0) * queries.size(1), 2}, queries.options().dtype(at::kFloat));
  const at::Tensor mixed = attend(queries, by_head(keys), by_head(values), Sizes(q, first),
                                  seen_keys_of(begins, ends, window), scale, sums);
  return {mixed, {sums}};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> part_attention_backward(
    const at::Tensor& grad_input, const at::Tensor& /*result*/, const at::Tensor& q,
    const at::Tensor& keys, const at::Tensor& values, at::TensorList kept,
    const std::optional<at::Tensor>& begins, const std::optional<at::Tensor>& ends,
    std::int64_t first, std::int64_t window, double scale) {
  const Sizes sizes(q, first);
  const auto wide = [](const at::Tensor& x) {
    return result(x.sizes(), x.options().dtype(at::kFloat));
  };
  const at::Tensor grad_q = result(q.sizes(), q.options());
  const at::Tensor grad_k = wide(keys), grad_v = wide(values);
  const Attended of{by_head(q.flatten(2, 3)), by_head(keys), by_head(values), kept[0],
                    by_group(grad_input, sizes, sizes.repeat, Role::kTemporary)};
  Parts parts(sizes, of.keys, of.values, seen_keys_of(begins, ends, window), scale);
  // Never a product written in place: it would have other signs of zeros than a sum.
  KeySum grad_keys(by_head(grad_k), /*at_once=*/false);
  KeySum grad_values(by_head(grad_v), /*at_once=*/false);
  attend_backward(of, parts, flat(grad_q), grad_keys, grad_values);
  return {grad_q, grad_k, grad_v};
}

at::Tensor cached_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                            double scale) {
  const Sizes sizes(q, keys.size(2) - q.size(2));
  return attend(flat(q.contiguous()), by_head(keys), by_head(values), sizes, {}, scale, {});
}

namespace {

SeenByRows seen_in_window(const at::Tensor& scores, const std::optional<at::Tensor>& begins,
                          const std::optional<at::Tensor>& ends, std::int64_t first,
                          std::int64_t window, std::int64_t groups, std::int64_t repeat) {
  return {.begins = begins ? data<long>(*begins) : nullptr,
          .ends = ends ? data<long>(*ends) : nullptr,
          .from = 0,
          .keys = scores.size(2),
          .first = first,
          .window = window,
          .groups = groups,
          .repeat = repeat,
          .period = scores.size(1)};
}

}  // namespace

void window_softmax(const at::Tensor& scores, const std::optional<at::Tensor>& sinks,
                    const std::optional<at::Tensor>& shares,
                    const std::optional<at::Tensor>& begins, const std::optional<at::Tensor>& ends,
                    std::int64_t first, std::int64_t window, std::int64_t groups,
                    std::int64_t repeat, double scale) {
  const WindowRows job{.scores = mutable_data<float>(scores),
                       .weights = nullptr,
                       .sinks = sinks ? data<float>(*sinks) : nullptr,
                       .shares = shares ? mutable_data<float>(*shares) : nullptr,
                       .seen = seen_in_window(scores, begins, ends, first, window, groups, repeat),
                       .scale = static_cast<float>(scale)};
  const auto kernel = best_isa().window_softmax;
  base::for_ranges(scores.size(0) * scores.size(1), rows_a_thread(scores.size(2)),
                   [&](std::int64_t begin, std::int64_t end) { kernel(job, begin, end); });
}

void window_softmax_backward(const at::Tensor& grad, const at::Tensor& weights,
                             const std::optional<at::Tensor>& shares,
                             const std::optional<at::Tensor>& begins,
                             const std::optional<at::Tensor>& ends, std::int64_t first,
                             std::int64_t window, std::int64_t groups, std::int64_t repeat,
                             double scale) {
  const WindowRows job{.scores = mutable_data<float>(grad),
                       .weights = data<float>(weights),
                       .sinks = nullptr,
                       .shares = shares ? mutable_data<float>(*shares) : nullptr,
                       .seen = seen_in_window(grad, begins, ends, first, window, groups, repeat),
                       .scale = static_cast<float>(scale)};
  const auto kernel = best_isa().window_softmax_backward;
  base::for_ranges(grad.size(0) * grad.size(1), rows_a_thread(grad.size(2)),
                   [&](std::int64_t begin, std::int64_t end) { kernel(job, begin, end); });
}

void add_sink_gradients(const at::Tensor& rows, const at::Tensor& sum, std::int64_t repeat) {
  const std::int64_t groups = sum.numel() / repeat;
  const at::Tensor wide = rows.to(at::kDouble);
  const auto* terms = data<double>(wide);
  auto* sums = mutable_data<double>(sum);
  for (std::int64_t group = 0; group < wide.size(0) && !base::shapes_only(); ++group) {
    double* of_group = sums + group % groups * repeat;
    for (std::int64_t i = 0; i < wide.size(1); ++i) of_group[i % repeat] += *terms++;
  }
}

}  // namespace tessera::kernels::cpu
