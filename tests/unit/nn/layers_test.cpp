// The promises of layers about dtypes, frozen weights and empty batches.
#include <ATen/ATen.h>

#include <optional>

#include "base/test_hooks.h"
#include "dist/held_bytes.h"
#include "kernels/operations.h"
#include "nn/attention/attention.h"
#include "nn/attention/masked_attention.h"
#include "nn/embedding.h"
#include "nn/linear.h"
#include "nn/loss.h"
#include "nn/mlp.h"
#include "nn/parameter.h"
#include "nn/rms_norm.h"
#include "nn/rope.h"
#include "support/test.h"
#include "unit/nn/compare.h"
#include "unit/nn/composites.h"

namespace tessera::nn::layers_test {
namespace {

using Tensors = std::vector<at::Tensor>;

class Layers : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(11); }
};

TEST_F(Layers, LinearEqualsProductInFloat64) {
  const auto ours = [](const Tensors& in) { return nn::linear(in[0], in[1], in[2]); };
  const auto plain = [](const Tensors& in) { return at::linear(in[0], in[1], in[2]); };
  for (const std::int64_t rows : {0, 3}) {
    expect_equals_composite(ours, plain,
                            {at::randn({rows, 5, 7}), at::randn({9, 7}), at::randn({9})}, kFloat32,
                            "float");
    // All inputs are bf16: products are summed in fp32 and rounded once.
    expect_equals_composite(ours, plain,
                            {at::randn({rows, 5, 7}).to(at::kBFloat16),
                             at::randn({9, 7}).to(at::kBFloat16), at::randn({9}).to(at::kBFloat16)},
                            kOneBFloat16Rounding, "bfloat16");
  }
}

TEST_F(Layers, AnotherWeightDtypeComputesThereAndReturnsTheInputs) {
  const at::Tensor x = at::randn({2, 3, 8}).to(at::kBFloat16).requires_grad_(true);
  const at::Tensor weight = at::randn({4, 8}).requires_grad_(true);
  const at::Tensor y = nn::linear(x, weight);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(y.equal(at::linear(x.to(at::kFloat), weight).to(at::kBFloat16)));
  y.sum().backward();
  EXPECT_EQ(x.grad().scalar_type(), at::kBFloat16);
  EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);

  EXPECT_EQ(nn::rms_norm(x, at::ones({8}), 1e-6).scalar_type(), at::kBFloat16);
  EXPECT_EQ(nn::rms_norm(x.to(at::kFloat), at::ones({8}).to(at::kBFloat16), 1e-6).scalar_type(),
            at::kFloat);
  EXPECT_EQ(nn::rms_norm(x.to(at::kHalf), at::ones({8}), 1e-6).scalar_type(), at::kHalf);
}

// The gradient of a bf16 norm weight is summed in fp32 and reaches a leaf that asks for raw values
// so.
TEST_F(Layers, NormWeightGradientsAreFloat32WhereTheLeafTakesThem) {
  const at::Tensor x = at::randn({40, 8}).to(at::kBFloat16);
  const at::Tensor plain = at::ones({8}).to(at::kBFloat16).requires_grad_(true);
  nn::rms_norm(x, plain, 1e-6).sum().backward();
  EXPECT_EQ(plain.grad().scalar_type(), at::kBFloat16);
  const at::Tensor raw = at::ones({8}).to(at::kBFloat16).requires_grad_(true);
  raw.set_grad_dtype(std::nullopt);
  nn::rms_norm(x, raw, 1e-6).sum().backward();
  EXPECT_EQ(raw.grad().scalar_type(), at::kFloat);
}

TEST_F(Layers, FrozenWeightsGetNoGradientAndInputsStillDo) {
  const at::Tensor x = at::randn({2, 8}).requires_grad_(true);
  const at::Tensor weight = at::randn({8, 8});
  const at::Tensor norm = at::ones({8});
  nn::linear(nn::rms_norm(x, norm, 1e-6), weight).sum().backward();
  EXPECT_TRUE(x.grad().defined());
  EXPECT_FALSE(weight.grad().defined());
  EXPECT_FALSE(norm.grad().defined());
}

/// While it lives: of how many norms and sinks this thread's backwards were asked the gradient.
class AskedWeights final : public kernels::Watcher {
 public:
  AskedWeights() : Watcher(kernels::SeesKernels::kYes), here_(*this) {}
  int asked() const { return asked_; }

  void run(const c10::OperatorHandle& operation, c10::DispatchKeySet below,
           c10::Stack* stack) override {
    const auto& name = operation.operator_name().name;
    if (name == "tessera::rms_norm_backward" || name == "tessera::rope_heads_backward" ||
        name == "tessera::windowed_attention_backward") {
      asked_ += stack->back().toBool() ? 1 : 0;  // of_weight, of_sinks
    }
    const c10::impl::ExcludeDispatchKeyGuard once(kernels::kWatchKey);
    operation.redispatchBoxed(below, stack);
  }

 private:
  int asked_ = 0;
  kernels::WatchScope here_;
};

// Naive: with adapters every norm sums a gradient that is not used.
TEST_F(Layers, FrozenNormsAreNotAskedForTheirWeightsGradients) {
  Rope rope({}, 8);
  const RopeTable table = rope.table(5, at::kFloat, at::kCPU);
  for (const bool trains : {true, false}) {
    const at::Tensor x = at::randn({2, 5, 32}).requires_grad_(true);
    const at::Tensor weight = at::randn({32}).requires_grad_(trains);
    const at::Tensor of_head = at::randn({8}).requires_grad_(trains);
    const AskedWeights asked;
    const auto [sum, normed] = add_rms_norm(x, nn::rms_norm(x, weight, 1e-6), weight, 1e-6);
    const at::Tensor heads = rope_heads(normed, {.heads = 4, .repeat = 2}, {of_head, 1e-6}, table);
    (heads.sum() + plain_rms_norm(sum, 1e-6).sum()).backward();
    EXPECT_EQ(asked.asked(), trains ? 3 : 0);
    EXPECT_EQ(weight.grad().defined(), trains);
    EXPECT_EQ(of_head.grad().defined(), trains);
    EXPECT_TRUE(x.grad().defined());
  }
}

// Naive: with adapters the sinks' shares of all rows are written, and summed without use.
TEST_F(Layers, FrozenSinksFormNoGradientAndTheOthersHaveTheSameBits) {
  std::vector<at::Tensor> expected;
  for (const bool trains : {true, false}) {
    at::manual_seed(32);
    const at::Tensor q = at::randn({2, 2, 300, 3, 8}).requires_grad_(true);
    const at::Tensor keys = at::randn({2, 2, 300, 8}).requires_grad_(true);
    const at::Tensor values = at::randn({2, 2, 300, 8}).requires_grad_(true);
    const at::Tensor sinks = at::randn({6}).requires_grad_(trains);
    const AskedWeights asked;
    const at::Tensor y = windowed_attention(q, keys, values, {7, sinks}, 0.4);
    y.square().sum().backward();
    EXPECT_EQ(asked.asked(), trains ? 1 : 0);
    EXPECT_EQ(sinks.grad().defined(), trains);
    const std::vector<at::Tensor> found{y, q.grad(), keys.grad(), values.grad()};
    if (trains) expected = found;
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(found[i].equal(expected[i])) << i;
  }
}

/// Bytes of what a call gives and of what its backward will read.
std::int64_t bytes_held_after(const std::function<Tensors()>& call) {
  const test::HeldBytes counter;
  const Tensors results = call();
  return counter.bytes();
}

// Naive: further results of a device's kernels are kept, such as copies in fp32.
TEST_F(Layers, DevicesKeepForBackwardWhatTheCpuKeeps) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto drawn = [&](at::IntArrayRef sizes) {
      return at::randn(sizes).to(dtype).requires_grad_(true);
    };
    Rope rope({}, 64);
    const RopeTable table = rope.table(40, dtype, at::kCPU);
    const at::Tensor x = drawn({2, 40, 256}), other = drawn({2, 40, 256}), weight = drawn({256});
    const at::Tensor of_head = drawn({64}), logits = drawn({2, 40, 500});
    const at::Tensor targets = at::randint(0, 500, {2, 40}, at::kLong);
    const std::map<std::string, std::function<Tensors()>> calls{
        {"norm", [&] { return Tensors{nn::rms_norm(x, weight, 1e-6)}; }},
        {"sum and norm",
         [&] {
           const auto [sum, normed] = add_rms_norm(x, other, weight, 1e-6);
           return Tensors{sum, normed};
         }},
        {"rope", [&] { return Tensors{rope_heads(x, {.heads = 4, .repeat = 2}, {}, table)}; }},
        {"rope behind a norm",
         [&] { return Tensors{rope_heads(x, {.heads = 4, .repeat = 2}, {of_head, 1e-6}, table)}; }},
        {"gate", [&] { return Tensors{swiglu(x, other)}; }},
        {"gate of halves", [&] { return Tensors{swiglu_halves(x)}; }},
        {"loss", [&] { return Tensors{cross_entropy_sum(logits, targets)}; }}};
    for (const auto& [name, call] : calls) {
      const std::int64_t expected = bytes_held_after(call);
      const test_hooks::Set as_there(test_hooks::kernels_of_devices, [] { return true; });
      EXPECT_EQ(bytes_held_after(call), expected) << name << ", " << dtype;
    }
  }
}

TEST_F(Layers, Float64TakesTheCompositeForm) {
  const at::Tensor x = at::randn({2, 3, 8}, at::kDouble);
  EXPECT_EQ(nn::rms_norm(x, at::ones({8}, at::kDouble), 1e-6).scalar_type(), at::kDouble);
  EXPECT_EQ(swiglu(x, x).scalar_type(), at::kDouble);
}

TEST_F(Layers, RopeTablesAreRoundedOnlyAtTheEnd) {
  Rope rope({.theta = 1e6}, 8);
  const RopeTable exact = rope.table(5000, at::kFloat, at::kCPU);
  const RopeTable rounded = rope.table(4999, at::kBFloat16, at::kCPU);
  EXPECT_TRUE(rounded.cos.equal(exact.cos.narrow(0, 0, 4999).to(at::kBFloat16)));
  // The last frequency turns by 1e6^-0.75 a position: cos is that of the exact angle.
  EXPECT_NEAR(exact.cos[4999][3].item<double>(), std::cos(4999 * std::pow(1e6, -0.75)), 1e-5);
}

TEST_F(Layers, Llama3ScalingKeepsShortWavesAndLengthensLongOnes) {
  const at::Tensor plain = inverse_frequencies({.theta = 500000.0}, 64);
  const at::Tensor scaled = inverse_frequencies({.theta = 500000.0,
                                                 .type = RopeType::kLlama3,
                                                 .factor = 32.0,
                                                 .low_freq_factor = 1.0,
                                                 .high_freq_factor = 4.0,
                                                 .original_max_position_embeddings = 8192},
                                                64);
  EXPECT_EQ(scaled[0].item<float>(), plain[0].item<float>());
  EXPECT_FLOAT_EQ(scaled[31].item<float>(), plain[31].item<float>() / 32);
  // In between: wavelength 2*pi/f with 8192/4 < wavelength < 8192.
  const at::Tensor wavelength = 2 * 3.14159265358979 / plain;
  const at::Tensor middle = wavelength.gt(8192.0 / 4).logical_and(wavelength.lt(8192.0));
  ASSERT_TRUE(middle.any().item<bool>());
  const at::Tensor ratio = (scaled / plain).masked_select(middle);
  EXPECT_TRUE(ratio.gt(1.0 / 32).logical_and(ratio.lt(1.0)).all().item<bool>());
}

TEST_F(Layers, AttentionWithoutRowsRunsForwardAndBackward) {
  const AttentionOptions options{.hidden_size = 8,
                                 .heads = 4,
                                 .kv_heads = 2,
                                 .head_dim = 4,
                                 .bias = Bias::kYes,
                                 .qk_norm = AttentionOptions::QkNorm::kYes,
                                 .norm_eps = 1e-6};
  Attention attention(options, std::make_shared<Rope>(RopeOptions{}, 4));
  materialize(attention);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    attention.to(dtype);
    attention.zero_grad();
    const at::Tensor x = at::zeros({0, 5, 8}, dtype).requires_grad_(true);
    const at::Tensor y = attention.forward(x);
    EXPECT_EQ(y.sizes(), x.sizes());
    y.sum().backward();
    EXPECT_EQ(x.grad().sizes(), x.sizes());
    for (const auto& item : attention.named_parameters()) {
      ASSERT_TRUE(item.value().grad().defined()) << item.key();
      EXPECT_EQ(item.value().grad().abs().sum().item<double>(), 0.0) << item.key();
    }
  }
}

template <class Use>
std::string message_of(const Use& use) {
  try {
    use();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(Parameter, EmptyHasSizesButNoBytes) {
  const at::Tensor parameter = empty_parameter({3, 4});
  EXPECT_EQ(parameter.sizes(), (at::IntArrayRef{3, 4}));
  EXPECT_TRUE(parameter.is_leaf() && parameter.requires_grad());
  EXPECT_EQ(parameter.storage().nbytes(), 0u);
  EXPECT_FALSE(has_data(parameter));
}

TEST(Parameter, EveryLayerSaysThatItHasNoData) {
  const at::Tensor x = at::ones({2, 4});
  Linear linear(4, 3);
  RmsNorm norm(4, 1e-6);
  Embedding embedding(5, 4);
  const char* expected = "parameter has no data yet";
  EXPECT_NE(message_of([&] { linear.forward(x); }).find(expected), std::string::npos);
  EXPECT_NE(message_of([&] { norm.forward(x); }).find(expected), std::string::npos);
  EXPECT_NE(message_of([&] { embedding.forward(at::zeros({1}, at::kLong)); }).find(expected),
            std::string::npos);
}

TEST(Parameter, MaterializeGivesZerosAndKeepsTheTensors) {
  Linear linear(4, 3, Bias::kYes);
  const at::Tensor before = linear.weight;
  materialize(linear);
  EXPECT_TRUE(before.is_same(linear.weight));
  EXPECT_EQ(linear.weight.abs().sum().item<double>(), 0.0);
  {
    at::NoGradGuard guard;
    linear.weight.fill_(2);
  }
  materialize(linear);  // what has data keeps it
  EXPECT_EQ(linear.weight.sum().item<double>(), 24.0);
}

TEST(Parameter, TiedLeavesShareMemoryAndHaveTheirOwnGradients) {
  const at::Tensor owner = empty_parameter({2, 2});
  const at::Tensor alias = empty_parameter({2, 2});
  tie(alias, owner);
  EXPECT_TRUE(alias.is_alias_of(owner));
  EXPECT_FALSE(alias.is_same(owner));
  torch::nn::Module holder;
  holder.register_parameter("owner", owner);
  materialize(holder);
  EXPECT_TRUE(has_data(alias));
  (alias * 2 + owner * 3).sum().backward();
  EXPECT_EQ(alias.grad()[0][0].item<double>(), 2.0);
  EXPECT_EQ(owner.grad()[0][0].item<double>(), 3.0);
}

TEST(Parameter, TyingDifferentShapesIsRefused) {
  EXPECT_THROW(tie(empty_parameter({2, 3}), empty_parameter({3, 2})), Error);
}

at::Tensor some_targets() {
  at::Tensor targets = at::randint(0, 37, {3, 6}, at::kLong);
  targets[1].fill_(kIgnoredLabel);
  targets[2][5] = kIgnoredLabel;
  return targets;
}

TEST(Loss, TargetsAreTheNextLabels) {
  const at::Tensor labels = at::tensor({9, 1, -100, 3}).unsqueeze(0);
  EXPECT_TRUE(next_token_targets(labels).equal(at::tensor({1, -100, 3, -100}).unsqueeze(0)));
  EXPECT_EQ(count_kept(next_token_targets(labels)), 2);
  EXPECT_EQ(count_kept(next_token_targets(at::zeros({0, 4}, at::kLong))), 0);
}

TEST(Loss, EqualsComposite) {
  at::manual_seed(3);
  const at::Tensor targets = some_targets();
  const auto fused = [&](const Tensors& in) { return cross_entropy_sum(in[0], targets); };
  const auto composite = [&](const Tensors& in) {
    return cross_entropy_sum_composite(in[0], targets);
  };
  // The loss itself is fp32 for both; only the gradient is rounded to the logits' dtype.
  const at::Tensor grad = at::tensor(0.37, at::kDouble);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor logits = (at::randn({3, 6, 37}) * 8).to(dtype);
    const Tensors found = run(fused, {logits}, grad);
    const Tensors expected = run(composite, {logits.to(at::kDouble)}, grad);
    EXPECT_EQ(found[0].scalar_type(), at::kFloat);
    expect_close(found[0], expected[0], kFloat32, "loss");
    expect_close(found[1], expected[1], dtype == at::kFloat ? kFloat32 : kOneBFloat16Rounding,
                 "gradient");
  }
}

TEST(Loss, ConsumedLogitsGiveTheSameGradient) {
  at::manual_seed(4);
  const at::Tensor targets = some_targets();
  const at::Tensor leaf = at::randn({3, 6, 37});
  const auto gradient = [&](Logits use) {
    const at::Tensor x = leaf.detach().clone().requires_grad_(true);
    cross_entropy_sum(x * 2, targets, use).backward();
    return x.grad();
  };
  EXPECT_TRUE(gradient(Logits::kKeep).equal(gradient(Logits::kConsume)));
}

TEST(Loss, ConsumedLogitsRefuseASecondBackward) {
  const at::Tensor x = at::randn({1, 2, 5}).requires_grad_(true);
  const at::Tensor loss = cross_entropy_sum(x * 2, at::zeros({1, 2}, at::kLong), Logits::kConsume);
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_THROW(loss.backward(), std::exception);
}

TEST(Loss, NoKeptTargetIsZeroAndHasZeroGradients) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    const at::Tensor x = at::randn({2, 3, 5}).to(dtype).requires_grad_(true);
    const at::Tensor loss = cross_entropy_sum(x, at::full({2, 3}, kIgnoredLabel, at::kLong));
    EXPECT_EQ(loss.item<double>(), 0.0);
    loss.backward();
    EXPECT_EQ(x.grad().abs().sum().item<double>(), 0.0);
  }
}

TEST(Loss, HugeLogitsStayFinite) {
  const at::Tensor x = at::tensor({3e4, -3e4, 0.0, 3e4}, at::kFloat).view({1, 1, 4});
  const double loss = cross_entropy_sum(x, at::zeros({1, 1}, at::kLong)).item<double>();
  EXPECT_NEAR(loss, std::log(2.0), 1e-2);  // fp32 near 3e4 has steps of 2e-3
}

TEST(Loss, NotANumberIsNotHidden) {
  const at::Tensor x = at::zeros({1, 1, 40});
  x[0][0][17] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(cross_entropy_sum(x, at::zeros({1, 1}, at::kLong)).isnan().item<bool>());
}

TEST(Loss, TargetsOutsideTheVocabularyAreRefused) {
  const at::Tensor x = at::zeros({1, 2, 5});
  for (const std::int64_t bad : {5, -1, -99}) {
    EXPECT_REFUSED(kFormat, cross_entropy_sum(x, at::tensor({std::int64_t{0}, bad}).unsqueeze(0)))
        << bad;
  }
}

}  // namespace
}  // namespace tessera::nn::layers_test
