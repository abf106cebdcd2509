// Rows that are packed of documents against the documents alone: kernels, rope, whole attention
// layers.
#include <ATen/ATen.h>

#include <random>

#include "dist/held_bytes.h"
#include "nn/attention/attention.h"
#include "nn/attention/masked_attention.h"
#include "nn/attention/mla.h"
#include "nn/documents.h"
#include "nn/parameter.h"
#include "support/test.h"
#include "unit/nn/compare.h"
#include "unit/nn/composites.h"
#include "unit/nn/drawn_documents.h"

namespace tessera::nn::packed_rows_test {
namespace {

using packed::documents_of;
using packed::drawn_rows;
using packed::Lengths;
using packed::one_by_one;
using Tensors = std::vector<at::Tensor>;

std::vector<Lengths> rows_of_seed(std::uint64_t seed, std::int64_t rows, std::int64_t positions) {
  std::mt19937_64 random(seed);
  return drawn_rows(random, rows, positions);
}

/// Output, then gradients of x and of the layer's parameters.
Tensors run(torch::nn::Module& layer, const at::Tensor& input, const at::Tensor& grad,
            const Function& forward) {
  layer.zero_grad();
  const at::Tensor x = input.detach().clone().requires_grad_(true);
  const at::Tensor y = forward({x});
  y.backward(grad.to(y.scalar_type()));
  Tensors all{y.detach(), x.grad()};
  for (const auto& parameter : layer.parameters()) all.push_back(parameter.grad().clone());
  return all;
}

template <class Layer>
void expect_packed_equals_alone(Layer& layer, at::ScalarType dtype, const Bound& bound,
                                const std::string& what) {
  materialize(layer);
  at::manual_seed(7);
  for (at::Tensor& parameter : layer.parameters()) {
    const at::NoGradGuard no_grad;
    parameter.normal_(0.0, 0.3);
    parameter.set_data(parameter.to(dtype));
  }
  for (const std::int64_t positions : {1, 23, 150, 300}) {
    const auto rows = rows_of_seed(static_cast<std::uint64_t>(positions), 2, positions);
    const Documents documents = documents_of(rows);
    const at::Tensor x = at::randn({2, positions, 12}).to(dtype);
    const at::Tensor grad = at::randn({2, positions, 12});
    const Tensors packed =
        run(layer, x, grad, [&](const Tensors& in) { return layer.forward(in[0], documents); });
    const Tensors alone = run(layer, x, grad, [&](const Tensors& in) {
      return one_by_one(in, rows, [&](const Tensors& one) { return layer.forward(one[0]); });
    });
    ASSERT_EQ(packed.size(), alone.size());
    for (std::size_t i = 0; i < packed.size(); ++i) {
      expect_close(
          packed[i], alone[i], bound,
          what + ", " + std::to_string(positions) + " positions, result " + std::to_string(i));
    }
  }
}

/// fp64: what differs by more than its rounding is another formula. fp32: sums in other orders.
struct Kind {
  at::ScalarType dtype;
  Bound bound;
};
const Kind kKinds[] = {{at::kDouble, {1e-11, 1e-11}}, {at::kFloat, {2e-5, 2e-5}}};

AttentionOptions small(std::optional<std::int64_t> window, AttentionOptions::Sinks sinks) {
  return {.hidden_size = 12,
          .heads = 4,
          .kv_heads = 2,
          .head_dim = 6,
          .qk_norm = AttentionOptions::QkNorm::kYes,
          .norm_eps = 1e-6,
          .sinks = sinks,
          .window = window};
}

TEST(PackedRows, AttentionIsThatOfEachDocumentAlone) {
  using Sinks = AttentionOptions::Sinks;
  for (const Kind& kind : kKinds) {
    for (const auto sinks : {Sinks::kNo, Sinks::kYes}) {
      for (const auto window : {std::optional<std::int64_t>(), {3}, {70}}) {
        Attention layer(small(window, sinks), std::make_shared<Rope>(RopeOptions{}, 6));
        expect_packed_equals_alone(layer, kind.dtype, kind.bound,
                                   std::string(c10::toString(kind.dtype)) + ", window " +
                                       std::to_string(window.value_or(0)));
      }
    }
  }
}

// Naive: the row's length chooses for all of its documents.
TEST(PackedRows, DocumentsTurnByTheirOwnLengths) {
  const RopeOptions options{.type = RopeType::kLongRope,
                            .factor = 4.0,
                            .original_max_position_embeddings = 12,
                            .long_rope = LongRopeOptions{{1.0, 1.5, 2.0}, {3.0, 9.0, 30.0}}};
  for (const Kind& kind : kKinds) {
    Attention layer(small(std::nullopt, AttentionOptions::Sinks::kNo),
                    std::make_shared<Rope>(options, 6));
    expect_packed_equals_alone(layer, kind.dtype, kind.bound, "longrope");
  }
}

TEST(PackedRows, LatentAttentionIsThatOfEachDocumentAlone) {
  for (const Kind& kind : kKinds) {
    Mla layer({.hidden_size = 12,
               .heads = 3,
               .q_lora_rank = 7,
               .kv_lora_rank = 5,
               .qk_nope_head_dim = 6,
               .qk_rope_head_dim = 4,
               .v_head_dim = 5,
               .scale = 0.3},
              std::make_shared<Rope>(RopeOptions{}, 4));
    expect_packed_equals_alone(layer, kind.dtype, kind.bound, "latent");
  }
}

// Another document has no influence, not by a bit.
TEST(PackedRows, DocumentsDoNotSeeEachOther) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const auto rows = rows_of_seed(5, 1, 300);
    const at::Tensor starts = documents_of(rows).starts;
    const at::Tensor q = at::randn({1, 2, 300, 2, 8}).to(dtype);
    const at::Tensor k = at::randn({1, 2, 300, 1, 8}).to(dtype);
    const at::Tensor v = at::randn({1, 300, 16}).to(dtype);
    const at::Tensor before = causal_attention(q, k, v, 0.3, {.begins = starts});
    const std::int64_t border = starts[0][299].item<std::int64_t>();
    ASSERT_GT(border, 0);
    k.narrow(2, 0, border).fill_(50);
    v.narrow(1, 0, border).fill_(-50);
    const at::Tensor after = causal_attention(q, k, v, 0.3, {.begins = starts});
    EXPECT_TRUE(
        before.narrow(1, border, 300 - border).equal(after.narrow(1, border, 300 - border)));
    EXPECT_FALSE(before.equal(after));
  }
}

// One row alone has the bits that it has among others, for any documents of these.
TEST(PackedRows, RowsDoNotDependOnEachOther) {
  const auto rows = rows_of_seed(9, 3, 200);
  const at::Tensor starts = documents_of(rows).starts;
  const at::Tensor q = at::randn({3, 2, 200, 2, 8}), k = at::randn({3, 2, 200, 1, 8});
  const at::Tensor v = at::randn({3, 200, 16});
  const at::Tensor all = causal_attention(q, k, v, 0.3, {.begins = starts});
  for (std::int64_t row = 0; row < 3; ++row) {
    const auto of = [&](const at::Tensor& x) { return x.narrow(0, row, 1); };
    EXPECT_TRUE(causal_attention(of(q), of(k), of(v), 0.3, {.begins = of(starts)}).equal(of(all)));
  }
}

// Memory is linear in T: twice the positions hold twice the bytes, of causal attention and of
// documents, and no weights.
TEST(PackedRows, HeldBytesAreLinearInTheLength) {
  const auto held = [](std::int64_t positions, const AttentionMask& mask, at::ScalarType dtype) {
    Tensors in{at::randn({2, 2, positions, 3, 8}).to(dtype),
               at::randn({2, 2, positions, 1, 8}).to(dtype),
               at::randn({2, positions, 16}).to(dtype)};
    for (at::Tensor& tensor : in) tensor.requires_grad_(true);
    const test::HeldBytes counter;
    const at::Tensor out = causal_attention(in[0], in[1], in[2], 0.3, mask);
    EXPECT_TRUE(out.requires_grad());
    return counter.bytes();
  };
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const bool packed : {false, true}) {
      const auto mask = [&](std::int64_t positions) {
        return packed ? AttentionMask{.begins = documents_of(rows_of_seed(3, 2, positions)).starts}
                      : AttentionMask{};
      };
      const std::int64_t once = held(512, mask(512), dtype);
      EXPECT_EQ(held(1024, mask(1024), dtype), 2 * once) << dtype;
      // Result, values by group, two numbers a row of scores.
      EXPECT_LE(once, 512 * 2 * (6 * 8 * 4 + 16 * 4 + 6 * 8)) << dtype;
    }
  }
}

std::string refusal(const at::Tensor& starts, const at::Tensor& ids) {
  return refusal_of(ErrorKind::kFormat, [&] { check_documents(starts, ids); });
}

// Naive: a row's ends are read behind those of the row before, where other values stand.
TEST(PackedRows, EndsMayBeAnExpandedColumn) {
  const at::Tensor column = at::ones({200}, at::kLong);
  column.narrow(0, 0, 3).copy_(at::tensor({20, 30, 24}, at::kLong));
  const at::Tensor ends = column.narrow(0, 0, 3).view({3, 1}).expand({3, 30});
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    at::manual_seed(3);
    const auto drawn = [&](at::IntArrayRef sizes) { return at::randn(sizes, dtype); };
    const at::Tensor q = drawn({3, 2, 30, 2, 8}), k = drawn({3, 2, 30, 1, 8});
    const at::Tensor v = drawn({3, 30, 16});
    const at::Tensor found = causal_attention(q, k, v, 0.3, {.ends = ends});
    EXPECT_TRUE(found.equal(causal_attention(q, k, v, 0.3, {.ends = ends.contiguous()})));
  }
}

TEST(PackedRows, StartsThatAreNoneAreRefused) {
  const at::Tensor ids = at::zeros({2, 4}, at::kLong);
  const auto row = [](std::vector<std::int64_t> second) {
    return at::stack({at::tensor({0, 0, 2, 2}, at::kLong), at::tensor(second, at::kLong)});
  };
  EXPECT_EQ(refusal(row({0, 1, 1, 3}), ids), "");
  EXPECT_EQ(refusal(at::zeros({0, 4}, at::kLong), at::zeros({0, 4}, at::kLong)), "");
  EXPECT_NE(refusal(row({0, 0, 1, 1}), ids).find("the start 1 at row 1, position 2"),
            std::string::npos);
  EXPECT_NE(refusal(row({-1, 0, 0, 0}), ids), "");
  EXPECT_NE(refusal(row({0, 2, 2, 2}), ids), "");
  EXPECT_NE(refusal(at::zeros({2, 3}, at::kLong), ids).find("[2, 3]"), std::string::npos);
  EXPECT_NE(refusal(at::zeros({2, 4}, at::kInt), ids), "");
}

}  // namespace
}  // namespace tessera::nn::packed_rows_test
