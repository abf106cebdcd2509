// Attention part by part: queries in the middle of the keys, each part a call, against one call for
// the whole row and against fp64 written down at once.
#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

#include "base/threads/shapes_only.h"
#include "kernels/implementations.h"
#include "kernels/seen_blocks.h"
#include "support/tensors.h"
#include "support/test.h"
#include "unit/nn/compare.h"

namespace tessera::kernels::part_attention_test {
namespace {

using Tensors = std::vector<at::Tensor>;
using Places = std::vector<std::int64_t>;
using test::same_bits;
using test::seeded;

constexpr double kScale = 0.3;

/// Every block of queries divides it where R is a power of two.
constexpr std::int64_t kWholeBlocks = 256;

/// One kind of rows: sizes, and what a query sees.
struct Rows {
  std::string name;
  std::int64_t rows = 1, groups = 2, repeat = 2, positions = 2 * kWholeBlocks, head_dim = 16,
               value_dim = 16;
  SeenKeys seen = {};
  bool in_bf16 = false;  ///< tested in bf16, too
};

std::vector<at::ScalarType> dtypes_of(const Rows& r) {
  if (r.in_bf16) return {at::kFloat, at::kBFloat16};
  return {at::kFloat};
}

struct Inputs {
  at::Tensor q, keys, values, grad, sinks;
};

Inputs inputs_of(const Rows& r, at::ScalarType dtype) {
  return {seeded(1, {r.rows, r.groups, r.positions, r.repeat, r.head_dim}, dtype),
          seeded(2, {r.rows, r.groups, r.positions, r.head_dim}, dtype),
          seeded(3, {r.rows, r.groups, r.positions, r.value_dim}, dtype),
          seeded(4, {r.rows, r.positions, r.groups * r.repeat * r.value_dim}, dtype),
          seeded(5, {r.groups * r.repeat}, dtype)};
}

/// The result, and the gradients of q, keys and values (and sinks).
struct Outputs {
  at::Tensor mixed, q, keys, values, sinks;
};

std::vector<std::pair<const char*, at::Tensor>> named(const Outputs& all) {
  std::vector<std::pair<const char*, at::Tensor>> each{
      {"result", all.mixed}, {"of q", all.q}, {"of keys", all.keys}, {"of values", all.values}};
  if (all.sinks.defined()) each.emplace_back("of sinks", all.sinks);
  return each;
}

// --------------------------------------------------------------------------------- the truth

/// [B, 1, 1, T, N], from the definition of SeenKeys.
at::Tensor hidden_of(const Rows& r) {
  const at::Tensor key = at::arange(r.positions), own = at::arange(r.positions).unsqueeze(1);
  const auto of_rows = [](const at::Tensor& x) { return x.unsqueeze(2); };
  at::Tensor hidden = r.seen.ends ? key >= of_rows(*r.seen.ends) : (key > own).unsqueeze(0);
  if (r.seen.begins) hidden = hidden.logical_or(key < of_rows(*r.seen.begins));
  if (r.seen.window != kNoWindow) hidden = hidden.logical_or(key <= own - r.seen.window);
  return hidden.unsqueeze(1).unsqueeze(1);
}

/// All scores at once, in fp64; sinks are one more column.
Outputs truth(const Inputs& in, const Rows& r, bool with_sinks = false) {
  const auto leaf = [](const at::Tensor& x) {
    return x.to(at::kDouble, false, /*copy=*/true).requires_grad_(true);
  };
  const at::AutoGradMode graph(true);
  const at::Tensor q = leaf(in.q), keys = leaf(in.keys), values = leaf(in.values);
  const at::Tensor sinks = leaf(in.sinks);
  at::Tensor scores = (at::einsum("bgtrd,bgnd->bgrtn", {q, keys}) * kScale)
                          .masked_fill(hidden_of(r), -std::numeric_limits<double>::infinity());
  if (with_sinks) {
    const at::Tensor column = sinks.view({1, r.groups, r.repeat, 1, 1})
                                  .expand({r.rows, r.groups, r.repeat, r.positions, 1});
    scores = at::cat({scores, column}, 4);
  }
  const at::Tensor weights = at::softmax(scores, 4).narrow(4, 0, r.positions);
  const at::Tensor mixed =
      at::einsum("bgrtn,bgnd->btgrd", {weights, values}).reshape(in.grad.sizes());
  mixed.backward(in.grad.to(at::kDouble));
  return {mixed.detach(), q.grad(), keys.grad(), values.grad(),
          with_sinks ? sinks.grad() : at::Tensor()};
}

// ------------------------------------------------------------------------ whole rows and parts

/// One call of causal_attention for the rows; gradients as the rows' own dtype has them.
Outputs whole(const Inputs& in, const Rows& r) {
  const at::Tensor v = in.values.transpose(1, 2).reshape({r.rows, r.positions, -1});
  const auto& [begins, ends, window] = r.seen;
  const auto [mixed, kept] =
      causal_attention_forward(in.q, in.keys.unsqueeze(3), v, begins, ends, window, kScale);
  const auto [grad_q, grad_k, grad_v] =
      causal_attention_backward(in.grad, kept, begins, ends, window, r.groups, r.repeat, kScale);
  return {mixed,
          grad_q,
          grad_k.squeeze(3),
          grad_v.view({r.rows, r.positions, r.groups, r.value_dim}).transpose(1, 2),
          {}};
}

std::optional<at::Tensor> moved(const std::optional<at::Tensor>& all, const layout::Range& queries,
                                std::int64_t by) {
  if (!all) return std::nullopt;
  return all->narrow(1, queries.begin, queries.size()) - by;
}

/// One part of the rows, of all their keys or of a range of these.
struct Part {
  layout::Range queries, keys;
  decltype(&part_attention_forward) forward = &part_attention_forward;
  decltype(&part_attention_backward) backward = &part_attention_backward;

  Outputs operator()(const Inputs& in, const Rows& r) const {
    const at::Tensor q = in.q.narrow(2, queries.begin, queries.size());
    const at::Tensor of_keys = in.keys.narrow(2, keys.begin, keys.size());
    const at::Tensor of_values = in.values.narrow(2, keys.begin, keys.size());
    const auto begins = moved(r.seen.begins, queries, keys.begin);
    const auto ends = moved(r.seen.ends, queries, keys.begin);
    const std::int64_t first = queries.begin - keys.begin;
    const auto [mixed, kept] =
        forward(q, of_keys, of_values, begins, ends, first, r.seen.window, kScale);
    const auto [grad_q, grad_k, grad_v] =
        backward(in.grad.narrow(1, queries.begin, queries.size()), mixed, q, of_keys, of_values,
                 kept, begins, ends, first, r.seen.window, kScale);
    return {mixed, grad_q, grad_k, grad_v, {}};
  }
};

/// The same of windowed_attention with sinks.
struct WindowedPart {
  layout::Range queries, keys;

  Outputs operator()(const Inputs& in, const Rows& r) const {
    const at::Tensor q = in.q.narrow(2, queries.begin, queries.size());
    const at::Tensor of_keys = in.keys.narrow(2, keys.begin, keys.size());
    const at::Tensor of_values = in.values.narrow(2, keys.begin, keys.size());
    const auto begins = moved(r.seen.begins, queries, keys.begin);
    const auto ends = moved(r.seen.ends, queries, keys.begin);
    const std::int64_t first = queries.begin - keys.begin;
    const at::Tensor mixed = windowed_attention(q, of_keys, of_values, in.sinks, begins, ends,
                                                first, r.seen.window, kScale);
    const auto [grad_q, grad_k, grad_v, grad_sinks] = windowed_attention_backward(
        in.grad.narrow(1, queries.begin, queries.size()), q, of_keys, of_values, in.sinks, begins,
        ends, first, r.seen.window, kScale, /*of_sinks=*/true);
    return {mixed, grad_q, grad_k, grad_v, grad_sinks};
  }
};

/// The parts between `places`, one call each: results side by side, the others' sums in order of
/// the parts.
template <class Each = Part>
Outputs in_parts(const Inputs& in, const Rows& r, const Places& places, const Each& like = {}) {
  Tensors mixed, q;
  Outputs all;
  for (std::size_t i = 0; i + 1 < places.size(); ++i) {
    Each part = like;
    part.queries = {places[i], places[i + 1]};
    part.keys = {0, r.positions};
    const Outputs found = part(in, r);
    mixed.push_back(found.mixed);
    q.push_back(found.q);
    const auto add = [](at::Tensor& sum, const at::Tensor& addend) {
      sum = sum.defined() && addend.defined() ? sum + addend : addend;
    };
    add(all.keys, found.keys);
    add(all.values, found.values);
    add(all.sinks, found.sinks);
  }
  all.mixed = at::cat(mixed, 1);
  all.q = at::cat(q, 2);
  return all;
}

// ------------------------------------------------------------------------------------- layouts

/// Documents that begin where a place in `starts` is.
at::Tensor begins_of(const std::vector<Places>& starts, std::int64_t positions) {
  const at::Tensor all = at::zeros({std::ssize(starts), positions}, at::kLong);
  for (std::int64_t row = 0; row < all.size(0); ++row) {
    for (const std::int64_t start : starts[static_cast<std::size_t>(row)])
      all[row].narrow(0, start, positions - start).fill_(start);
  }
  return all;
}

/// Images of one row, read both ways; other positions see up to themselves.
at::Tensor ends_of(const std::vector<layout::Range>& images, std::int64_t positions) {
  const at::Tensor all = at::arange(1, positions + 1).unsqueeze(0).clone();
  for (const auto& image : images) all[0].narrow(0, image.begin, image.size()).fill_(image.end);
  return all;
}

/// Causal rows of several kinds of heads; windows of a block, of less, and of no multiple of one;
/// two rows of other documents, some longer and some shorter than a part; images that cross parts
/// and end the row.
std::vector<Rows> all_rows() {
  const std::int64_t last = Rows().positions;
  const at::Tensor begins = begins_of({{100, 250, 300, 500}, {256, 511}}, last);
  const at::Tensor ends = ends_of({{240, 280}, {333, 350}, {last - 70, last}}, last);
  return {{.name = "grouped", .in_bf16 = true},
          {.name = "single heads", .rows = 2, .groups = 4, .repeat = 1},
          {.name = "one key head", .groups = 1, .repeat = 8, .head_dim = 8, .value_dim = 8},
          {.name = "values of other heads", .repeat = 1, .head_dim = 24},
          {.name = "window 64", .seen = {.window = 64}},
          {.name = "window 128", .seen = {.window = 128}},
          {.name = "window 200", .seen = {.window = 200}, .in_bf16 = true},
          {.name = "documents", .rows = 2, .seen = {.begins = begins}, .in_bf16 = true},
          {.name = "documents in a window", .rows = 2, .seen = {.begins = begins, .window = 128}},
          {.name = "images", .seen = {.ends = ends}, .in_bf16 = true},
          {.name = "images of documents in a window",
           .seen = {.begins = begins_of({{250, 400}}, last), .ends = ends, .window = 200}}};
}

/// The sums of parts have the terms and the number of roundings of one call, so errors to the truth
/// are as large; these are means of thousands of elements, so a quarter more is not chance.
void expect_error_of_one_call(const Outputs& parts, const Outputs& one_call, const Outputs& exact,
                              at::ScalarType dtype) {
  const auto check = [&](const at::Tensor& found, const at::Tensor& of_one, const at::Tensor& right,
                         const char* what) {
    const double allowed = 1.25 * test::relative_error(of_one, right);
    EXPECT_LT(allowed, dtype == at::kFloat ? 3e-6 : 1e-2) << what;
    EXPECT_LE(test::relative_error(found.to(of_one.scalar_type()), right), allowed) << what;
  };
  check(parts.keys, one_call.keys, exact.keys, "of keys");
  check(parts.values, one_call.values, exact.values, "of values");
  // The gradient of a sink is one number, with no mean of errors.
  if (exact.sinks.defined()) nn::expect_close(parts.sinks, exact.sinks, nn::kFloat32, "of sinks");
}

void expect_equals_whole(const Outputs& parts, const Outputs& one_call) {
  EXPECT_TRUE(same_bits(parts.mixed, one_call.mixed));
  EXPECT_TRUE(same_bits(parts.q, one_call.q));
}

// --------------------------------------------------------------------------------------- tests

// Property: in parts of whole blocks each query's result and gradient are those of one call, bit
// for bit; the sums of keys' and values' gradients are as near to the truth. Naive: an own position
// counted from the end of the keys; keys cut at a part's end inside an image; a part that writes its
// product where a sum is due; partial sums rounded to bf16.
TEST(PartAttention, PartsOfWholeBlocksAreTheWholeRow) {
  for (const Rows& r : all_rows()) {
    for (const auto dtype : dtypes_of(r)) {
      SCOPED_TRACE(r.name + ", " + at::toString(dtype));
      const Inputs in = inputs_of(r, dtype);
      const Outputs one_call = whole(in, r), exact = truth(in, r);
      const Outputs parts = in_parts(in, r, {0, 256, 512});
      expect_equals_whole(parts, one_call);
      EXPECT_EQ(parts.keys.scalar_type(), at::kFloat);
      expect_error_of_one_call(parts, one_call, exact, dtype);
    }
  }
}

// Property: parts of any length, one of a single query, are as right as fp32 is.
TEST(PartAttention, PartsOfAnyLengthAreTheTruth) {
  for (const Rows& r : all_rows()) {
    SCOPED_TRACE(r.name);
    const Inputs in = inputs_of(r, at::kFloat);
    const auto exact = named(truth(in, r));
    const auto found = named(in_parts(in, r, {0, 1, 100, 333, 512}));
    for (std::size_t i = 0; i < exact.size(); ++i)
      nn::expect_close(found[i].second, exact[i].second, nn::kFloat32, exact[i].first);
  }
}

/// Returns the keys that a part reaches, the first of them at a multiple of 32.
layout::Range reach_of(const Rows& r, const layout::Range& queries) {
  std::int64_t first = 0, end = queries.end;
  const auto of_part = [&](const at::Tensor& x) {
    return x.narrow(1, queries.begin, queries.size());
  };
  if (r.seen.begins) first = of_part(*r.seen.begins).min().item<std::int64_t>();
  if (r.seen.window < queries.begin + 1) first = std::max(first, queries.begin + 1 - r.seen.window);
  if (r.seen.ends) end = of_part(*r.seen.ends).max().item<std::int64_t>();
  return {first / 32 * 32, end};
}

template <class Each>
void expect_equals_all_keys(const Inputs& in, const Rows& r, const layout::Range& queries) {
  const layout::Range keys = reach_of(r, queries);
  const Outputs all = Each{queries, {0, r.positions}}(in, r), some = Each{queries, keys}(in, r);
  expect_equals_whole(some, all);
  EXPECT_TRUE(same_bits(some.keys, all.keys.narrow(2, keys.begin, keys.size())));
  EXPECT_TRUE(same_bits(some.values, all.values.narrow(2, keys.begin, keys.size())));
  for (const at::Tensor& each : {all.keys, all.values}) {
    EXPECT_EQ(each.narrow(2, 0, keys.begin).count_nonzero().item<std::int64_t>(), 0);
    EXPECT_EQ(each.narrow(2, keys.end, r.positions - keys.end).count_nonzero().item<std::int64_t>(),
              0);
  }
}

// Property: a part given only the keys that it reaches (strided views of them) has the bits that it
// has with all; what lies outside gets zeros.
TEST(PartAttention, KeysOutsideOfWhatAPartReachesChangeNoBit) {
  for (const Rows& r : all_rows()) {
    for (const auto dtype : dtypes_of(r)) {
      SCOPED_TRACE(r.name + ", " + at::toString(dtype));
      const Inputs in = inputs_of(r, dtype);
      for (const layout::Range queries : {layout::Range{0, 256}, {256, 512}, {300, 341}})
        expect_equals_all_keys<Part>(in, r, queries);
    }
  }
}

/// Draws sizes, documents, images and a window, each or none.
Rows drawn_rows(std::mt19937_64& engine) {
  const auto up_to = [&](std::int64_t most) {
    return static_cast<std::int64_t>(engine() % static_cast<std::uint64_t>(most)) + 1;
  };
  Rows r{.name = "drawn",
         .rows = up_to(2),
         .groups = up_to(2),
         .repeat = std::int64_t{1} << (up_to(3) - 1),
         .positions = kWholeBlocks * up_to(3),
         .head_dim = 4 * up_to(4),
         .value_dim = 4 * up_to(4)};
  const at::Tensor own = at::arange(r.positions).expand({r.rows, r.positions});
  const auto runs = [&] {  // the first position of each position's run
    std::vector<Places> starts(static_cast<std::size_t>(r.rows));
    for (Places& row : starts) {
      for (std::int64_t at = up_to(400); at < r.positions; at += up_to(400)) row.push_back(at);
    }
    return begins_of(starts, r.positions);
  };
  if (up_to(2) == 1) r.seen.begins = runs();
  if (up_to(3) == 1) {
    // A run is an image where its first position is odd: it ends where the reversed one begins.
    const at::Tensor first = runs().remainder(400);
    const at::Tensor image_end = (own.div(97, "floor") + 1).mul(97).clamp_max(r.positions);
    r.seen.ends = at::where(first.remainder(2) == 1, image_end, own + 1);
  }
  if (up_to(2) == 1) r.seen.window = up_to(300);
  return r;
}

// Property: the two above, for rows and cuts that a generator draws.
TEST(PartAttention, DrawnRowsInDrawnParts) {
  std::mt19937_64 engine(77);
  for (int round = 0; round < 8; ++round) {
    const Rows r = drawn_rows(engine);
    SCOPED_TRACE("round " + std::to_string(round));
    const Inputs in = inputs_of(r, at::kFloat);
    Places places{0};
    for (std::int64_t at = kWholeBlocks; at < r.positions; at += kWholeBlocks) {
      if (engine() % 3 != 0) places.push_back(at);
    }
    places.push_back(r.positions);
    const Outputs one_call = whole(in, r), parts = in_parts(in, r, places);
    expect_equals_whole(parts, one_call);
    expect_error_of_one_call(parts, one_call, truth(in, r), at::kFloat);
    for (std::size_t i = 0; i + 1 < places.size(); ++i)
      expect_equals_all_keys<Part>(in, r, {places[i], places[i + 1]});
  }
}

// Property: the same of attention with sinks whose keys' gradients are wide.
TEST(PartAttention, WindowedPartsAreTheWholeRow) {
  for (const Rows& r : all_rows()) {
    for (const auto dtype : dtypes_of(r)) {
      SCOPED_TRACE(r.name + ", " + at::toString(dtype));
      const Inputs in = inputs_of(r, dtype);
      const Outputs one_call = in_parts<WindowedPart>(in, r, {0, r.positions});
      const Outputs parts = in_parts<WindowedPart>(in, r, {0, 256, 512});
      expect_equals_whole(parts, one_call);
      EXPECT_EQ(parts.keys.scalar_type(), at::kFloat);
      // Nothing is rounded to bf16 before the sum.
      expect_error_of_one_call(parts, one_call, truth(in, r, /*with_sinks=*/true), at::kFloat);
      expect_equals_all_keys<WindowedPart>(in, r, {256, 512});
    }
  }
}

// Property: aten/ is cpu/ within roundings, and exact in fp64. Bounds: implementations_test.cpp.
TEST(PartAttention, ImplementationsAgree) {
  const Part aten{{}, {}, &aten::part_attention_forward, &aten::part_attention_backward};
  const Places places{0, 100, 300, 512};
  for (const Rows& r : all_rows()) {
    for (const auto dtype : dtypes_of(r)) {
      SCOPED_TRACE(r.name + ", " + at::toString(dtype));
      const Inputs in = inputs_of(r, dtype);
      const auto found = named(in_parts(in, r, places, aten));
      const auto expected = named(in_parts(in, r, places));
      const nn::Bound bound = dtype == at::kFloat ? nn::kFloat32 : nn::Bound{4.0 / 256, 4.0 / 256};
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_EQ(found[i].second.scalar_type(), expected[i].second.scalar_type());
        nn::expect_close(found[i].second, expected[i].second, bound, expected[i].first);
      }
    }
    SCOPED_TRACE(r.name + ", fp64");
    const Inputs in = inputs_of(r, at::kDouble);
    const auto found = named(in_parts(in, r, places)), exact = named(truth(in, r));
    for (std::size_t i = 0; i < exact.size(); ++i) {
      EXPECT_EQ(found[i].second.scalar_type(), at::kDouble);
      nn::expect_close(found[i].second, exact[i].second, {1e-13, 1e-13}, exact[i].first);
    }
  }
}

// Property: a dry run has the sizes and dtypes.
TEST(PartAttention, ADryRunHasTheSizes) {
  const Rows r = all_rows()[7];
  const Inputs in = inputs_of(r, at::kBFloat16);
  const Part part{{100, 300}, {0, 400}};
  const auto real = named(part(in, r));
  const base::ShapesOnly dry;
  const auto found = named(part(in, r));
  for (std::size_t i = 0; i < real.size(); ++i) {
    EXPECT_EQ(found[i].second.sizes(), real[i].second.sizes()) << real[i].first;
    EXPECT_EQ(found[i].second.scalar_type(), real[i].second.scalar_type()) << real[i].first;
  }
}

}  // namespace
}  // namespace tessera::kernels::part_attention_test
