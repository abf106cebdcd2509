// Masks of attention drawn from a seed: documents, windows, chunks and images that are read both
// ways, in every combination that a family has; and attention under them by all pairs, in the dtype
// of its inputs, with autograd's gradients.
//
// The pairs follow from the definition of each kind, not from the ranges of keys that kernels take.
// Short symbols: B rows, T positions, G key/value heads, R query heads of each, D head_dim.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "nn/attention/masked_attention.h"
#include "nn/documents.h"
#include "tessera/error.h"
#include "unit/nn/composites.h"
#include "unit/nn/drawn_documents.h"

namespace tessera::nn::drawn {

struct DrawnMask {
  std::int64_t rows = 0, positions = 0;
  std::optional<std::int64_t> window = {};
  std::optional<std::int64_t> chunk = {};  ///< of the positions of a document
  Documents documents = {};                ///< not packed: one a row
  at::Tensor images = {};                  ///< [B, T] bool, or undefined: there are none
  at::Tensor sinks = {};                   ///< [G*R] in fp64, or undefined

  /// Where each position's document begins, [B, T] i64.
  at::Tensor starts() const {
    return documents.are_packed() ? documents.starts : at::zeros({rows, positions}, at::kLong);
  }
  /// Whether query i (dim 1) sees key j (dim 2), [B, T, T] bool.
  at::Tensor visible() const {
    const at::Tensor flags = images.defined() ? images : at::zeros({rows, positions}, at::kBool);
    const at::Tensor seen = seen_by_each(window.value_or(positions + 1), flags, starts());
    if (!chunk) return seen;
    const at::Tensor number = (at::arange(positions) - starts()).div(*chunk, "floor");
    return seen.logical_and(number.unsqueeze(2) == number.unsqueeze(1));
  }
  /// The same as layers give it to kernels; sinks in `dtype`.
  AttentionMask mask(at::ScalarType dtype) const {
    AttentionMask of{.window = window};
    if (sinks.defined()) of.sinks = sinks.to(dtype);
    if (documents.are_packed()) of.begins = documents.starts;
    if (chunk) {
      const at::Tensor own = at::arange(positions) - starts();
      of.begins = starts() + own.div(*chunk, "floor") * *chunk;
    }
    if (images.defined()) of.ends = ends_of_runs(images, documents);
    return of;
  }
};

inline std::string text_of(const DrawnMask& mask) {
  const auto number = [](const char* what, const std::optional<std::int64_t>& of) {
    return of ? concat(", ", what, " ", *of) : std::string();
  };
  return concat("rows ", mask.rows, ", positions ", mask.positions, number("window", mask.window),
                number("chunk", mask.chunk), mask.documents.are_packed() ? ", packed" : "",
                mask.images.defined() ? ", images" : "", mask.sinks.defined() ? ", sinks" : "");
}

/// Draws numbers and tensors from one seed, with no process-wide generator.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}

  std::mt19937_64& engine() { return random_; }
  bool one_in(std::uint64_t n) { return random_() % n == 0; }
  std::int64_t between(std::int64_t least, std::int64_t most) {
    return least +
           static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(most - least + 1));
  }
  /// Normal values.
  at::Tensor tensor(at::IntArrayRef sizes, at::ScalarType dtype) {
    std::normal_distribution<double> normal;
    at::Tensor drawn = at::empty(sizes, at::kDouble);
    auto* values = drawn.mutable_data_ptr<double>();
    for (std::int64_t i = 0; i < drawn.numel(); ++i) values[i] = normal(random_);
    return drawn.to(dtype);
  }

 private:
  std::mt19937_64 random_;
};

/// `heads`: G*R, of the sinks.
inline DrawnMask drawn_mask(Draw& draw, std::int64_t rows, std::int64_t positions,
                            std::int64_t heads) {
  DrawnMask mask{.rows = rows, .positions = positions};
  const auto length = [&] { return draw.between(1, draw.one_in(2) ? 40 : positions + 10); };
  if (draw.one_in(2)) {
    mask.documents = packed::documents_of(packed::drawn_rows(draw.engine(), rows, positions));
  }
  if (draw.one_in(4)) {
    mask.chunk = length();
    return mask;
  }
  if (draw.one_in(2)) mask.window = length();
  if (draw.one_in(2)) {
    mask.images = at::zeros({rows, positions}, at::kBool);
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t begin = draw.between(0, 30); begin < positions;) {
        const std::int64_t size = std::min(positions - begin, draw.between(1, 70));
        mask.images[row].narrow(0, begin, size).fill_(true);
        begin += size + draw.between(1, 60);
      }
    }
  } else if (draw.one_in(3)) {
    mask.sinks = draw.tensor({heads}, at::kDouble);
  }
  return mask;
}

struct DrawnSizes {
  std::int64_t groups = 1, repeat = 1, head_dim = 1, value_dim = 1;
};
inline DrawnSizes drawn_sizes(Draw& draw) {
  return {draw.between(1, 2), draw.between(1, 3), draw.between(1, 5), draw.between(1, 5)};
}

/// q, k and v as causal_attention takes them, then the sinks where the mask has any.
inline std::vector<at::Tensor> drawn_inputs(Draw& draw, const DrawnMask& mask,
                                            const DrawnSizes& sizes, at::ScalarType dtype) {
  const auto [groups, repeat, head_dim, value_dim] = sizes;
  std::vector<at::Tensor> inputs{
      draw.tensor({mask.rows, groups, mask.positions, repeat, head_dim}, dtype),
      draw.tensor({mask.rows, groups, mask.positions, 1, head_dim}, dtype),
      draw.tensor({mask.rows, mask.positions, groups * value_dim}, dtype)};
  if (mask.sinks.defined()) inputs.push_back(mask.sinks.to(dtype));
  return inputs;
}

/// Values as windowed_attention takes them, [B, G, T, D].
inline at::Tensor values_by_group(const at::Tensor& v, std::int64_t groups) {
  return v.unflatten(2, {groups, v.size(2) / groups}).transpose(1, 2);
}

/// The attention of those inputs by all pairs -> [B, T, G*R*D].
inline at::Tensor attention_by_pairs(const std::vector<at::Tensor>& inputs, const DrawnMask& mask,
                                     double scale) {
  const at::Tensor hidden = mask.visible().logical_not().unsqueeze(1).unsqueeze(3);
  return attention_composite(inputs[0], inputs[1].squeeze(3),
                             values_by_group(inputs[2], inputs[0].size(1)),
                             {hidden, mask.sinks.defined() ? inputs[3] : at::Tensor()}, scale);
}

}  // namespace tessera::nn::drawn
