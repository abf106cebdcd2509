// checkpoint() by itself, without handles: autocast, several results, misuse.
#include <ATen/autocast_mode.h>

#include "dist/kept_product.h"
#include "support/plain.h"
#include "support/test.h"

namespace tessera::test::fsdp_recompute_calls_test {
namespace {

constexpr std::int64_t kWidth = 6;
constexpr RecomputeMode kModes[] = {RecomputeMode::kNone, RecomputeMode::kFull,
                                    RecomputeMode::kSelective};

/// Autocast to bf16 on CPUs, as a user's region has it.
class Autocast {
 public:
  Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
};

// Naive: backward runs outside of the region, so the second forward computes in fp32; or finds in
// autocast's cache a weight that the first one cast without grad, and the weight gets no gradient.
TEST(RecomputeAutocast, TheSecondForwardComputesInTheDtypesOfTheFirst) {
  for (const bool backward_inside : {false, true}) {
    const auto run = [backward_inside](RecomputeMode mode) {
      const auto weight = seeded(1, {kWidth, kWidth}).requires_grad_();
      const auto body = [&weight](const std::vector<at::Tensor>& in) {
        return at::relu(at::linear(in[0], weight));
      };
      const auto x = input_of(0, 0, kWidth).requires_grad_();
      at::Tensor loss;
      {
        const Autocast region;
        const auto y = checkpoint(body, {x}, mode);
        EXPECT_EQ(y.scalar_type(), at::kBFloat16);
        loss = squares(at::linear(checkpoint(body, {y}, mode), weight));
        if (backward_inside) backward(loss);
      }
      EXPECT_EQ(at::autocast::is_autocast_cache_enabled(), mode != RecomputeMode::kNone)
          << "as it was before";
      if (!backward_inside) backward(loss);
      EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
      return Tensors{{"weight", weight.grad()}, {"x", x.grad()}};
    };
    // Without autocast's cache every use casts by itself, as a checkpoint does: the same sums.
    at::autocast::set_autocast_cache_enabled(false);
    const auto expected = run(RecomputeMode::kNone);
    at::autocast::set_autocast_cache_enabled(true);
    expect_same(run(RecomputeMode::kFull), expected);
  }
}

// Several results.

TEST(RecomputeResults, SeveralResultsUsedOrNotGiveTheGradientsOfThePlainCall) {
  for (const auto mode : kModes) {
    for (const bool uses_second : {true, false}) {
      const auto run = [uses_second](RecomputeMode each) {
        const auto x = input_of(0, 0, kWidth).requires_grad_();
        const auto first = seeded(1, {kWidth}).requires_grad_();
        const auto second = seeded(2, {kWidth}).requires_grad_();
        const auto all = checkpoint(
            [&](const std::vector<at::Tensor>& in) {
              const auto bent = at::tanh(in[0]);
              return std::vector<at::Tensor>{bent * first, in[0], bent * second, bent.argmax(1)};
            },
            {x, at::Tensor()}, each);
        EXPECT_EQ(all.size(), 4U);
        EXPECT_FALSE(all[3].requires_grad());
        const auto loss = squares(all[0] + all[1]);
        backward(uses_second ? loss + squares(all[2]) : loss);
        EXPECT_EQ(second.grad().defined(), uses_second) << "unused is no gradient, not zeros";
        return Tensors{{"x", x.grad()},
                       {"first", first.grad()},
                       {"second", second.grad().defined() ? second.grad() : at::Tensor(x)}};
      };
      expect_same(run(mode), run(RecomputeMode::kNone));
    }
  }
}

TEST(RecomputeResults, InputsThatAreNotThereStayWhereTheyAre) {
  for (const bool wants_gradient : {true, false}) {
    const auto x = input_of(0, 0, kWidth).requires_grad_(wants_gradient);
    const auto mask = here(at::ones({kWidth}));
    const auto weight = seeded(1, {kWidth}).requires_grad_();
    int calls = 0;
    const auto y = checkpoint(
        [&](const std::vector<at::Tensor>& in) {
          ++calls;
          EXPECT_EQ(in.size(), 4U);
          EXPECT_TRUE(!in[0].defined() && !in[2].defined());
          return in[1] * in[3] * weight;
        },
        {at::Tensor(), x, at::Tensor(), mask});
    backward(y.sum());
    EXPECT_EQ(calls, 2);
    EXPECT_TRUE(same_bits(weight.grad(), x.detach().sum(0)));
  }
}

TEST(RecomputeResults, AnInputOrAWeightOrTheSameTensorTwiceMayComeBack) {
  const auto run = [](RecomputeMode mode) {
    const auto x = input_of(0, 0, kWidth).requires_grad_();
    const auto weight = seeded(1, {kWidth}).requires_grad_();
    const auto all = checkpoint(
        [&](const std::vector<at::Tensor>& in) {
          const auto y = in[0] * weight;
          return std::vector<at::Tensor>{y, y, weight, in[0]};
        },
        {x}, mode);
    backward(squares(all[0] * all[1] * all[2] * all[3]));
    return Tensors{{"x", x.grad()}, {"weight", weight.grad()}};
  };
  expect_same(run(RecomputeMode::kFull), run(RecomputeMode::kNone));
}

// Misuse.

TEST(RecomputeMisuse, KeepUnderGradModeIsRefused) {
  EXPECT_THAT(thrown_by([] { keep({1}, [] { return here(at::ones({1})); }); }),
              Says("keep: found grad mode"));
}

/// The error of backward through a selective checkpoint of products, one for each width of a run.
std::string error_of_runs(std::vector<std::vector<std::int64_t>> widths) {
  int calls = 0, computed = 0;
  const auto x = input_of(0, 0, kWidth).requires_grad_();
  const auto y = checkpoint(
      [&](const std::vector<at::Tensor>& in) {
        auto sum = in[0].sum();
        for (const auto width : widths.at(static_cast<std::size_t>(calls))) {
          sum = sum + KeptProduct::apply(in[0], seeded(1, {width, kWidth}), &computed).sum();
        }
        ++calls;
        return sum;
      },
      {x}, RecomputeMode::kSelective);
  return thrown_by([&] { backward(y); });
}

TEST(RecomputeMisuse, ASecondForwardThatKeepsOtherThingsIsRefused) {
  EXPECT_EQ(error_of_runs({{2, 3}, {2, 3}}), "");
  EXPECT_THAT(error_of_runs({{2}, {2, 3}}), Says("more calls of keep() than the 1"));
  EXPECT_THAT(error_of_runs({{2, 3}, {2}}), Says("1 calls of keep()"));
  EXPECT_THAT(error_of_runs({{2}, {3}}), Says("expected [3, 2]"));
}

TEST(RecomputeMisuse, AKeptResultThatIsChangedInPlaceIsRefused) {
  int computed = 0;
  const auto x = input_of(0, 0, kWidth).requires_grad_();
  const auto weight = seeded(1, {2, kWidth});
  EXPECT_THAT(thrown_by([&] {
                checkpoint(
                    [&](const std::vector<at::Tensor>& in) {
                      return KeptProduct::apply(in[0], weight, &computed).mul_(2);
                    },
                    {x}, RecomputeMode::kSelective);
              }),
              Says("changed in place"));
}

}  // namespace
}  // namespace tessera::test::fsdp_recompute_calls_test
