#include "nn/loss.h"

#include "tessera/error.h"
#include "unit/nn/compare.h"
#include "unit/nn/composites.h"

namespace tessera::nn::loss_test {
namespace {

using Tensors = std::vector<at::Tensor>;

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
    try {
      cross_entropy_sum(x, at::tensor({std::int64_t{0}, bad}).unsqueeze(0));
      FAIL() << bad;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kFormat);
    }
  }
}

}  // namespace
}  // namespace tessera::nn::loss_test
