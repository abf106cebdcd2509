// The comparison of tests: two tensors are the same where their bits are.
#include "support/ranks.h"

#include <limits>

#include "support/test.h"

namespace tessera::test::ranks_test {
namespace {

constexpr at::ScalarType kFloating[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};

// Naive: at::equal compares values, in which these two are the other way round.
TEST(SameBits, ANanIsItselfAndMinusZeroIsNotZero) {
  for (const auto dtype : kFloating) {
    const auto nan = at::full({3}, std::numeric_limits<double>::quiet_NaN(), dtype);
    EXPECT_TRUE(same_bits(nan, nan.clone())) << dtype;
    EXPECT_FALSE(same_bits(nan, at::zeros({3}, dtype))) << dtype;
    const auto zero = at::zeros({3}, dtype);
    const auto minus = zero.clone();
    minus[2].fill_(-0.0);
    ASSERT_TRUE(at::equal(zero, minus));
    EXPECT_FALSE(same_bits(zero, minus)) << dtype;
    EXPECT_THAT(same_bits(minus, zero).message(), Says("element 2 of 3: -0 against 0"));
  }
}

TEST(SameBits, TheLastBitCounts) {
  for (const auto dtype : kFloating) {
    const auto one = at::ones({2, 2}, dtype);
    auto more = one.clone();
    more[1][1] = at::nextafter(at::ones({}), at::full({}, 2.0F)).to(at::kDouble);
    EXPECT_EQ(static_cast<bool>(same_bits(one, more)), dtype != at::kFloat && dtype != at::kDouble);
  }
}

TEST(SameBits, StridesDoNotCountAndEveryKindOfElementDoes) {
  const auto wide = at::arange(12, at::kFloat).view({3, 4});
  EXPECT_TRUE(same_bits(wide.t(), wide.t().contiguous()));
  EXPECT_TRUE(same_bits(at::ones({1}).expand({5}), at::ones({5})));
  EXPECT_FALSE(same_bits(wide.t(), wide.t().flip(0)));
  for (const auto dtype : {at::kBool, at::kByte, at::kInt, at::kLong}) {
    EXPECT_TRUE(same_bits(at::ones({4}, dtype), at::ones({4}, dtype))) << dtype;
    EXPECT_FALSE(same_bits(at::ones({4}, dtype), at::zeros({4}, dtype))) << dtype;
  }
  EXPECT_TRUE(same_bits(at::zeros({}), at::zeros({})));
  EXPECT_FALSE(same_bits(at::zeros({}), at::ones({})));
  EXPECT_TRUE(same_bits(at::zeros({0, 3}), at::zeros({0, 3})));
  EXPECT_FALSE(same_bits(at::zeros({0, 3}), at::zeros({3, 0})));
  EXPECT_FALSE(same_bits(at::ones({2}), at::ones({2}, at::kDouble)));
  const auto leaf = at::ones({2}).requires_grad_();
  EXPECT_TRUE(same_bits(leaf, at::ones({2})));
}

}  // namespace
}  // namespace tessera::test::ranks_test
