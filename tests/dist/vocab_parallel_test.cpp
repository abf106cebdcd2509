// The embedding and the loss of a vocabulary cut over ranks, against those of the whole.

#include <mutex>
#include <optional>

#include "base/test_hooks.h"
#include "nn/embedding.h"
#include "nn/loss.h"
#include "support/ranks.h"
#include "support/test.h"
#include "unit/nn/left_out.h"

namespace tessera::nn::vocab_parallel_test {
namespace {

using test::here;
using test::ranks;
using test::same_bits;
using test::seeded;

parallel::Axis axis_over(World& world) {
  return parallel::axis_of(world.mesh(MeshShape::dense(1, 1, 1, 1, world.size())), axis::kTensor);
}

/// Tokens that every rank owns some of.
at::Tensor tokens_below(std::int64_t vocabulary) {
  return at::arange(14, at::kLong).mul(5).remainder(vocabulary).view({2, 7});
}

TEST(VocabParallel, EmbeddingsSumToTheWholeAndGradientsAreItsRows) {
  constexpr std::int64_t kVocabulary = 24;
  constexpr std::int64_t kPadding = 20;
  const at::Tensor ids = tokens_below(kVocabulary);
  const at::Tensor weight = seeded(1, {kVocabulary, 6}).requires_grad_(true);
  const at::Tensor grad = seeded(2, {2, 7, 6});
  const at::Tensor expected = nn::embedding(ids, weight, kPadding);
  expected.backward(grad);
  for (const int size : {1, 2, 3, 4}) {
    at::Tensor sum = at::zeros_like(expected);
    std::mutex mutex;
    ranks(size).run([&](World& world) {
      const parallel::Axis axis = axis_over(world);
      const std::int64_t rows = kVocabulary / size;
      const at::Tensor own =
          here(weight.detach().narrow(0, axis.rank * rows, rows).clone()).requires_grad_(true);
      const at::Tensor y = vocab_parallel_embedding(here(ids), own, axis, kPadding);
      y.backward(here(grad));
      EXPECT_TRUE(same_bits(own.grad(), weight.grad().narrow(0, axis.rank * rows, rows)));
      const std::lock_guard lock(mutex);
      sum += y.detach().cpu();  // one addend that is not zero
    });
    EXPECT_TRUE(same_bits(sum, expected.detach()));
  }
}

struct Bound {
  at::ScalarType dtype;
  double relative;
};

class VocabParallelLoss : public ::testing::TestWithParam<std::int64_t> {};
INSTANTIATE_TEST_SUITE_P(ElementsAtATime, VocabParallelLoss, ::testing::Values(0, 45));

// All rows at once; and in blocks of 1 to 5 of 14 rows, the last one shorter.
TEST_P(VocabParallelLoss, AndGradientAreThoseOfTheWholeVocabulary) {
  constexpr std::int64_t kVocabulary = 36;
  std::optional<test_hooks::Set<decltype(test_hooks::elements_at_a_time)>> in_blocks;
  if (GetParam() > 0) {
    in_blocks.emplace(test_hooks::elements_at_a_time, [] { return GetParam(); });
  }
  const at::Tensor targets = tokens_below(kVocabulary).clone();
  targets[0][3] = kIgnoredLabel;
  targets[1][6] = kIgnoredLabel;
  // fp32: some tens of terms of 2^-24 each. bf16: the gradient is rounded once, to 2^-8.
  for (const Bound& bound :
       {Bound{at::kDouble, 1e-13}, Bound{at::kFloat, 2e-6}, Bound{at::kBFloat16, 1.0 / 256}}) {
    const at::Tensor values = (seeded(3, {2, 7, kVocabulary}) * 8).to(bound.dtype);
    const at::Tensor whole = values.to(at::kDouble).clone().requires_grad_(true);
    const at::Tensor expected = cross_entropy_sum(whole, targets);
    (expected * 0.5).backward();
    for (const int size : {1, 2, 3, 4}) {
      for (const Logits use : {Logits::kKeep, Logits::kConsume}) {
        std::vector<at::Tensor> losses(static_cast<std::size_t>(size));
        ranks(size).run([&](World& world) {
          const parallel::Axis axis = axis_over(world);
          const std::int64_t columns = kVocabulary / size;
          const at::Tensor leaf =
              here(values.narrow(2, axis.rank * columns, columns).clone()).requires_grad_(true);
          const at::Tensor logits = leaf * 1;
          const at::Tensor loss =
              vocab_parallel_cross_entropy_sum(logits, here(targets), {axis, "loss", use});
          (loss * 0.5).backward();
          losses[static_cast<std::size_t>(axis.rank)] = loss.detach().cpu();
          EXPECT_NEAR(loss.item<double>(), expected.item<double>(),
                      std::min(bound.relative, 2e-6) * expected.item<double>());
          const at::Tensor own = whole.grad().narrow(2, axis.rank * columns, columns);
          EXPECT_TRUE(at::allclose(leaf.grad().to(at::kDouble).cpu(), own, bound.relative,
                                   std::min(bound.relative, 1e-6)))
              << bound.dtype << " over " << size;
        });
        for (const at::Tensor& loss : losses) EXPECT_TRUE(same_bits(loss, losses[0]));
      }
    }
  }
}

// [Note: left-out results] No rank communicates in this backward.
TEST_ON_RANKS(VocabParallel, ALossThatIsLeftOutGivesNoGradient, 2) {
  const parallel::Axis axis = axis_over(world);
  expect_left_out(
      [&](const std::vector<at::Tensor>& in) {
        return vocab_parallel_cross_entropy_sum(in[0], here(tokens_below(12)), {axis});
      },
      {seeded(5, {2, 7, 6})}, concat("rank ", world.rank()));
}

TEST_ON_RANKS(VocabParallel, NothingKeptIsZero, 2) {
  const parallel::Axis axis = axis_over(world);
  const at::Tensor logits = seeded(4, {1, 3, 5}).requires_grad_(true);
  const at::Tensor loss = vocab_parallel_cross_entropy_sum(
      logits, here(at::full({1, 3}, kIgnoredLabel, at::kLong)), {axis});
  loss.backward();
  EXPECT_EQ(loss.item<double>(), 0.0);
  EXPECT_EQ(logits.grad().abs().max().item<double>(), 0.0);
}

// On a device they are not checked: batches are checked before they go there.
TEST_ON_RANKS(VocabParallel, TokensOutsideAreRefusedOnTheHost, 2) {
  const parallel::Axis axis = axis_over(world);
  const at::Tensor logits = seeded(4, {1, 3, 5}).requires_grad_(true);
  const auto refusal = [](const std::function<void()>& body) -> std::string {
    return refusal_of(ErrorKind::kFormat, [&] { body(); });
  };
  EXPECT_THAT(refusal([&] {
                vocab_parallel_cross_entropy_sum(logits, at::full({1, 3}, 10, at::kLong), {axis});
              }),
              Says("loss: found the label 10, expected 0 to 9 or -100"));
  EXPECT_THAT(refusal([&] {
                vocab_parallel_embedding(at::full({3}, -1, at::kLong), at::zeros({5, 2}), axis);
              }),
              Says("embedding: found the token -1, expected 0 to 9"));
}

}  // namespace
}  // namespace tessera::nn::vocab_parallel_test
