// The CPU kernels with their derivatives against the composite forms in fp64.
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include "grad/leaf.h"
#include "nn/attention/attention.h"
#include "nn/embedding.h"
#include "nn/mlp.h"
#include "nn/rms_norm.h"
#include "nn/rope.h"
#include "unit/nn/compare.h"
#include "unit/nn/composites.h"

namespace tessera::nn::fused_test {
namespace {

using Tensors = std::vector<at::Tensor>;

class Fused : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(7); }
};

struct Dtypes {
  at::ScalarType activation;
  at::ScalarType weight;
};

constexpr Dtypes kDtypes[] = {
    {at::kFloat, at::kFloat}, {at::kBFloat16, at::kBFloat16}, {at::kBFloat16, at::kFloat}};

Bound bound_of(at::ScalarType dtype) {
  return dtype == at::kFloat ? kFloat32 : kOneBFloat16Rounding;
}

std::string name_of(const Dtypes& dtypes, std::int64_t size) {
  return std::string(c10::toString(dtypes.activation)) + ", weight " +
         c10::toString(dtypes.weight) + ", size " + std::to_string(size);
}

at::Tensor draw(at::IntArrayRef sizes, at::ScalarType dtype) { return at::randn(sizes).to(dtype); }

TEST_F(Fused, RmsNormEqualsComposite) {
  constexpr double kEps = 1e-5;
  const auto fused = [](const Tensors& in) { return nn::rms_norm(in[0], in[1], kEps); };
  const auto composite = [](const Tensors& in) { return rms_norm_composite(in[0], in[1], kEps); };
  for (const Dtypes& dtypes : kDtypes) {
    for (const std::int64_t size : {3, 8, 17, 64, 390}) {
      for (const std::int64_t rows : {0, 1, 75}) {  // 75: more than a block of rows
        expect_equals_composite(
            fused, composite,
            {draw({rows, 2, size}, dtypes.activation), draw({size}, dtypes.weight)},
            bound_of(dtypes.activation), name_of(dtypes, size));
      }
    }
  }
}

TEST_F(Fused, AddRmsNormEqualsAddThenNorm) {
  constexpr double kEps = 1e-5;
  // The sum is used twice, as in a layer: by the norm and by what is added later.
  const auto fused = [](const Tensors& in) {
    const auto [sum, normed] = add_rms_norm(in[0], in[1], in[2], kEps);
    return at::cat({sum, normed}, 0);
  };
  const auto composite = [](const Tensors& in) {
    const at::Tensor sum = in[0] + in[1];
    return at::cat({sum, rms_norm_composite(sum, in[2], kEps)}, 0);
  };
  for (const std::int64_t size : {17, 384}) {
    expect_equals_composite(
        fused, composite,
        {draw({3, 5, size}, at::kFloat), draw({3, 5, size}, at::kFloat), draw({size}, at::kFloat)},
        kFloat32, "float");
    // In bf16 the norm starts from the rounded sum: sums that bf16 holds exactly leave one
    // rounding.
    const at::Tensor whole = at::randint(-8, 9, {3, 5, size}).to(at::kBFloat16);
    for (const at::ScalarType weight : {at::kBFloat16, at::kFloat}) {
      expect_equals_composite(fused, composite, {whole, whole.flip(0), draw({size}, weight)},
                              kOneBFloat16Rounding, "bfloat16");
    }
  }
}

TEST_F(Fused, RopeHeadsEqualsComposite) {
  for (const std::int64_t head_dim : {2, 8, 34, 64}) {
    for (const Dtypes& dtypes : kDtypes) {
      const RopeTable table = Rope({}, head_dim).table(37, dtypes.activation, at::kCPU);
      const RopeTable wide{table.cos.to(at::kDouble), table.sin.to(at::kDouble)};
      const HeadLayout layout{.heads = 6, .repeat = 3};
      const at::Tensor x = draw({2, 37, 6 * head_dim}, dtypes.activation);
      expect_equals_composite(
          [&](const Tensors& in) { return rope_heads(in[0], layout, {in[1], 1e-6}, table); },
          [&](const Tensors& in) {
            return rope_heads_composite(in[0], layout, {in[1], 1e-6}, wide);
          },
          {x, draw({head_dim}, dtypes.weight)}, bound_of(dtypes.activation),
          "with norm, " + name_of(dtypes, head_dim));
      expect_equals_composite(
          [&](const Tensors& in) { return rope_heads(in[0], layout, {}, table); },
          [&](const Tensors& in) { return rope_heads_composite(in[0], layout, {}, wide); }, {x},
          bound_of(dtypes.activation), "without norm, " + name_of(dtypes, head_dim));
    }
  }
}

TEST_F(Fused, SwigluEqualsComposite) {
  const auto fused = [](const Tensors& in) { return swiglu(in[0], in[1]); };
  const auto composite = [](const Tensors& in) { return swiglu_composite(in[0], in[1]); };
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t size : {0, 1, 15, 16, 1000}) {
      // Wide enough to reach both tails of the sigmoid.
      expect_equals_composite(fused, composite,
                              {draw({3, size}, dtype) * 30, draw({3, size}, dtype)},
                              bound_of(dtype), name_of({dtype, dtype}, size));
    }
  }
}

TEST_F(Fused, ReluSquaredEqualsComposite) {
  const auto fused = [](const Tensors& in) { return relu_squared(in[0]); };
  const auto composite = [](const Tensors& in) { return at::relu(in[0]) * at::relu(in[0]); };
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t size : {0, 1, 1000}) {
      expect_equals_composite(fused, composite, {draw({3, size}, dtype)}, bound_of(dtype),
                              name_of({dtype, dtype}, size));
    }
  }
}

TEST_F(Fused, CausalAttentionEqualsComposite) {
  // fp32: sums of up to 70 products. bf16: scores, weights and their gradients are rounded on the
  // way, each 2^-8 at most, and the errors add up.
  const Bound float_bound{4e-6, 4e-6};
  const Bound bfloat_bound{4.0 / 256, 4.0 / 256};
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t positions : {1, 5, 70}) {
      const std::int64_t head_dim = 16;
      const double scale = 0.25;
      expect_equals_composite(
          [&](const Tensors& in) { return causal_attention(in[0], in[1], in[2], scale); },
          [&](const Tensors& in) { return causal_attention_composite(in[0], in[1], in[2], scale); },
          {draw({2, 2, positions, 3, head_dim}, dtype), draw({2, 2, positions, 1, head_dim}, dtype),
           draw({2, positions, 2 * head_dim}, dtype)},
          dtype == at::kFloat ? float_bound : bfloat_bound, name_of({dtype, dtype}, positions));
    }
  }
}

TEST_F(Fused, LongSequencesRunInBlocksAndEqualComposite) {
  const auto fused = [](const Tensors& in) { return causal_attention(in[0], in[1], in[2], 0.5); };
  const auto composite = [](const Tensors& in) {
    return causal_attention_composite(in[0], in[1], in[2], 0.5);
  };
  const auto inputs = [](at::ScalarType dtype) {
    return Tensors{draw({2, 2, 520, 2, 4}, dtype), draw({2, 2, 520, 1, 4}, dtype),
                   draw({2, 520, 8}, dtype)};
  };
  expect_equals_composite(fused, composite, inputs(at::kFloat), {1e-5, 1e-5}, "float");
  expect_equals_composite(fused, composite, inputs(at::kBFloat16), {4.0 / 256, 4.0 / 256},
                          "bfloat16");
}

TEST_F(Fused, ValuesNarrowerOrWiderThanKeysEqualComposite) {
  const auto fused = [](const Tensors& in) { return causal_attention(in[0], in[1], in[2], 0.5); };
  const auto composite = [](const Tensors& in) {
    return causal_attention_composite(in[0], in[1], in[2], 0.5);
  };
  for (const std::int64_t positions : {7, 300}) {
    for (const std::int64_t head_dim : {4, 20}) {
      expect_equals_composite(
          fused, composite,
          {draw({2, 2, positions, 3, 12}, at::kFloat), draw({2, 2, positions, 1, 12}, at::kFloat),
           draw({2, positions, 2 * head_dim}, at::kFloat)},
          {1e-5, 1e-5}, "values of " + std::to_string(head_dim));
    }
  }
  const at::Tensor q = draw({1, 3, 9, 2, 6}, at::kFloat);
  const at::Tensor keys = draw({1, 3, 9, 6}, at::kFloat);
  const at::Tensor values = draw({1, 3, 9, 10}, at::kFloat);
  const at::Tensor last = q.narrow(2, 7, 2);
  const at::Tensor plain = cached_attention_composite(last, keys, values, 0.5);
  EXPECT_TRUE(at::allclose(cached_attention(last, keys, values, 0.5), plain, 1e-5, 1e-5));
}

TEST_F(Fused, LongSoftmaxRowsEqualComposite) {
  // More keys than the kernel keeps exponentials of.
  expect_equals_composite(
      [](const Tensors& in) { return causal_attention(in[0], in[1], in[2], 1.0); },
      [](const Tensors& in) { return causal_attention_composite(in[0], in[1], in[2], 1.0); },
      {draw({1, 1, 1100, 1, 2}, at::kFloat), draw({1, 1, 1100, 1, 2}, at::kFloat),
       draw({1, 1100, 2}, at::kFloat)},
      {1e-5, 1e-5}, "1100 positions");
}

TEST_F(Fused, EarlierPositionsDoNotSeeLaterOnes) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor q = draw({1, 2, 40, 2, 8}, dtype);
    const at::Tensor k = draw({1, 2, 40, 1, 8}, dtype);
    const at::Tensor v = draw({1, 40, 16}, dtype);
    const at::Tensor before = causal_attention(q, k, v, 0.3);
    k.narrow(2, 30, 10).fill_(50);
    v.narrow(1, 30, 10).fill_(-50);
    const at::Tensor after = causal_attention(q, k, v, 0.3);
    EXPECT_TRUE(before.narrow(1, 0, 30).equal(after.narrow(1, 0, 30)));
    EXPECT_FALSE(before.narrow(1, 30, 10).equal(after.narrow(1, 30, 10)));
  }
}

TEST_F(Fused, EmbeddingEqualsComposite) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t rows : {0, 4}) {
      const at::Tensor ids = at::randint(0, 11, {rows, 9}, at::kLong);
      for (const std::optional<std::int64_t> padding : {std::optional<std::int64_t>(), {3}}) {
        expect_equals_composite(
            [&](const Tensors& in) { return nn::embedding(ids, in[0], padding); },
            [&](const Tensors& in) { return embedding_composite(ids, in[0], padding); },
            {draw({11, 20}, dtype)}, bound_of(dtype), name_of({dtype, dtype}, rows));
      }
    }
  }
}

// 256 + 1 is not a bf16: a gradient that is summed in bf16 gives 0.
TEST_F(Fused, EmbeddingSumsRepeatedTokensBeforeRounding) {
  const at::Tensor weight = at::zeros({4, 3}, at::kBFloat16).requires_grad_(true);
  const at::Tensor out = nn::embedding(at::tensor({2, 2, 2}, at::kLong), weight);
  const at::Tensor grad = at::tensor({256.0, 1.0, -256.0}).to(at::kBFloat16);
  out.backward(grad.unsqueeze(1).expand({3, 3}));
  EXPECT_EQ(weight.grad()[2].sum().item<double>(), 3.0);
}

/// A slot that holds -1 everywhere, and how often it was asked for.
class OneSlot : public grad::SlotOwner {
 public:
  explicit OneSlot(std::int64_t numel) : slot(at::full({numel}, -1.0F)) {}
  View open_slot(std::size_t) override {
    ++opened;
    return {slot, /*first=*/false};
  }
  at::Tensor share_slot(std::size_t) override { return {}; }
  void end_share(std::size_t, bool) override {}
  void tickets_changed(int) override {}

  at::Tensor slot;
  int opened = 0;
};

// The slot gets the bits that the whole gradient would have added, but for zeros: these are not
// formed, or they would make 0 of the -0 that stands in the slot.
TEST_F(Fused, EmbeddingOfAShardedParameterHandsItsSlotTheRowsOfTheTokens) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::optional<std::int64_t> padding : {std::optional<std::int64_t>(), {3}, {96}}) {
      const at::Tensor ids = at::randint(0, 9, {3, 7}, at::kLong);
      const at::Tensor grad = draw({3, 7, 20}, dtype).detach();
      const at::Tensor values = draw({97, 20}, dtype).detach();
      const at::Tensor whole = values.clone().requires_grad_();
      nn::embedding(ids, whole, padding).backward(grad);

      GradContract contract;
      contract.name = "embed_tokens.weight";
      contract.shape = {97, 20};
      contract.accumulate = DType::kFloat32;
      OneSlot owner(97 * 20);
      grad::GradSink sink;
      const auto leaf = std::make_shared<grad::Leaf>();
      leaf->tensor = values.clone();
      leaf->contract = &contract;
      leaf->sink = &sink;
      leaf->slot = sink.add(&contract, &owner, 0);
      grad::install(leaf, /*trainable=*/true);
      const at::Tensor slot = owner.slot.view({97, 20});
      slot[50].fill_(-0.0);
      nn::embedding(ids, leaf->tensor, padding).backward(grad);

      EXPECT_EQ(owner.opened, 1) << dtype;
      EXPECT_TRUE(slot[50].signbit().all().item<bool>()) << dtype;
      at::Tensor expected = at::full({97, 20}, -1.0F);
      expected[50].zero_();
      EXPECT_TRUE(at::equal(slot, expected.add_(whole.grad()))) << dtype;
    }
  }
}

TEST_F(Fused, ThreadsDoNotChangeResults) {
  const int threads = at::get_num_threads();
  const Tensors inputs{draw({4, 100, 390}, at::kBFloat16), draw({390}, at::kBFloat16)};
  const at::Tensor gate = draw({300, 1000}, at::kFloat);
  const at::Tensor ids = at::randint(0, 50, {4, 400}, at::kLong);
  const auto results = [&](int count) {
    at::set_num_threads(count);
    Tensors all = run([](const Tensors& in) { return nn::rms_norm(in[0], in[1], 1e-6); }, inputs,
                      at::ones({4, 100, 390}));
    const Tensors gated =
        run([](const Tensors& in) { return swiglu(in[0], in[0]); }, {gate}, at::ones({300, 1000}));
    const Tensors embedded = run([&](const Tensors& in) { return nn::embedding(ids, in[0]); },
                                 {draw({50, 200}, at::kFloat)}, at::ones({4, 400, 200}));
    all.insert(all.end(), gated.begin(), gated.end());
    all.push_back(embedded[1]);
    const Tensors clamped = run([](const Tensors& in) { return clamped_swiglu(in[0], {}); }, {gate},
                                at::ones({300, 500}));
    all.insert(all.end(), clamped.begin(), clamped.end());
    return all;
  };
  const Tensors one = results(1);
  const Tensors three = results(3);
  at::set_num_threads(threads);
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(one[i].equal(three[i])) << i;
}

TEST_F(Fused, SecondDerivativesAreRefused) {
  const at::Tensor x = at::ones({2, 8}).requires_grad_(true);
  const at::Tensor y = nn::rms_norm(x, at::ones({8}), 1e-6).sum();
  EXPECT_THROW(y.backward({}, /*retain_graph=*/true, /*create_graph=*/true), Error);
}

}  // namespace
}  // namespace tessera::nn::fused_test
