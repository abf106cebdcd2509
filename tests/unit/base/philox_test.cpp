#include <cmath>
#include <cstring>
#include <numeric>

#include "base/random.h"
#include "support/test.h"

namespace tessera::philox_test {
namespace {

TEST(Philox, GivesTheKnownAnswersOfRandom123) {
  constexpr std::uint32_t kFull = 0xFFFFFFFF;
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}),
            (PhiloxCounter{0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}));
  EXPECT_EQ(philox({kFull, kFull, kFull, kFull}, {kFull, kFull}),
            (PhiloxCounter{0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}));
  EXPECT_EQ(philox({0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344}, {0xA4093822, 0x299F31D0}),
            (PhiloxCounter{0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1}));
}

TEST(Philox, StreamsDifferBySeedAndByName) {
  EXPECT_EQ(stream_of(1, "a"), stream_of(1, "a"));
  EXPECT_NE(stream_of(1, "a"), stream_of(2, "a"));
  EXPECT_NE(stream_of(1, "a"), stream_of(1, "b"));
}

using Fill = void (*)(float*, std::int64_t, std::int64_t, std::uint64_t, std::string_view, float,
                      float);

std::vector<float> drawn(Fill fill, std::int64_t begin, std::int64_t end, std::uint64_t seed = 7,
                         std::string_view name = "w") {
  std::vector<float> values(static_cast<std::size_t>(end - begin));
  fill(values.data(), begin, end, seed, name, -1.0F, 3.0F);
  return values;
}

TEST(Philox, AnyRangeGivesTheSameElementsBitForBit) {
  for (const Fill fill : {&fill_normal, &fill_uniform}) {
    const std::vector<float> whole = drawn(fill, 0, 101);
    for (std::int64_t begin = 0; begin <= 101; ++begin) {
      for (std::int64_t end = begin + 1; end <= 101; ++end) {
        const std::vector<float> part = drawn(fill, begin, end);
        ASSERT_EQ(std::memcmp(part.data(), whole.data() + begin, part.size() * sizeof(float)), 0)
            << begin << " " << end;
      }
    }
  }
}

TEST(Philox, ElementsBeyond32BitsAreTheirOwn) {
  const std::int64_t far = std::int64_t{1} << 34;
  EXPECT_NE(drawn(fill_normal, far, far + 8), drawn(fill_normal, 0, 8));
  EXPECT_NE(drawn(fill_normal, far * 2, far * 2 + 8), drawn(fill_normal, far, far + 8));
}

TEST(Philox, FirstValuesNeverChange) {
  // A changed draw would silently change every initialization and every order of rows. The normal
  // values were computed apart from this code, from the paper's rounds and Box-Muller's formula.
  EXPECT_EQ(stream_of(42, "model.norm.weight"), 0x35F6617F0661A5C0ULL);
  float values[6];
  fill_normal(values, 0, 6, 42, "model.norm.weight", 0.0F, 1.0F);
  const double expected[6] = {-1.1470675359324705, 0.361879342457008,   -0.5529490205722276,
                              -0.4052091619805016, -0.5861588842546518, 0.4163864638791024};
  for (int i = 0; i < 6; ++i) EXPECT_FLOAT_EQ(values[i], static_cast<float>(expected[i])) << i;
  const Permutation permutation(42, 0, 10);
  const std::int64_t rows[10] = {9, 5, 4, 8, 0, 3, 1, 7, 6, 2};
  for (int i = 0; i < 10; ++i) EXPECT_EQ(permutation(i), rows[i]);
}

TEST(Philox, NormalHasItsMoments) {
  constexpr std::int64_t kCount = 1 << 18;
  std::vector<float> values(kCount);
  fill_normal(values.data(), 0, kCount, 3, "w", 0.5F, 2.0F);
  double sum = 0;
  double square = 0;
  double fourth = 0;
  double neighbours = 0;
  double before = 0;
  for (const float value : values) {
    const double z = (double{value} - 0.5) / 2.0;
    sum += z;
    square += z * z;
    fourth += z * z * z * z;
    neighbours += z * before;
    before = z;
  }
  // Five standard errors: 1/sqrt(n), sqrt(2/n), sqrt(96/n), 1/sqrt(n) with n = 2^18, 1/sqrt(n) =
  // 1/512.
  EXPECT_NEAR(sum / kCount, 0, 5.0 / 512);
  EXPECT_NEAR(square / kCount, 1, 5 * std::sqrt(2.0) / 512);
  EXPECT_NEAR(fourth / kCount, 3, 5 * std::sqrt(96.0) / 512);
  EXPECT_NEAR(neighbours / kCount, 0, 5.0 / 512);
}

TEST(Philox, UniformStaysInItsHalfOpenRange) {
  const std::vector<float> values = drawn(fill_uniform, 0, 1 << 16);
  EXPECT_GE(*std::min_element(values.begin(), values.end()), -1.0F);
  EXPECT_LT(*std::max_element(values.begin(), values.end()), 3.0F);
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / (1 << 16);
  EXPECT_NEAR(mean, 1.0, 5 * (4 / std::sqrt(12.0)) / 256);  // five standard errors
  float narrow[64];
  const float next = std::nextafter(1.0F, 2.0F);
  fill_uniform(narrow, 0, 64, 1, "w", 1.0F, next);  // one value only: rounding must not leave it
  EXPECT_TRUE(std::all_of(narrow, narrow + 64, [](float v) { return v == 1.0F; }));
}

TEST(Philox, ImpossibleRangesAreRefused) {
  float value = 0;
  EXPECT_THROW(fill_normal(&value, -1, 0, 1, "w", 0, 1), Error);
  EXPECT_THROW(fill_normal(&value, 2, 1, 1, "w", 0, 1), Error);
  fill_normal(nullptr, 5, 5, 1, "w", 0, 1);  // an empty shard has no memory and needs none
}

std::vector<std::int64_t> listed(const Permutation& permutation) {
  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < permutation.size(); ++i) rows.push_back(permutation(i));
  return rows;
}

TEST(Permutation, HoldsEveryRowOnce) {
  for (const std::int64_t size : {0, 1, 2, 3, 7, 64, 255, 256, 257, 1000, 4096, 5000}) {
    std::vector<std::int64_t> rows = listed(Permutation(5, 2, size));
    std::sort(rows.begin(), rows.end());
    for (std::int64_t i = 0; i < size; ++i) ASSERT_EQ(rows[static_cast<std::size_t>(i)], i);
  }
}

TEST(Permutation, DependsOnSeedAndEpoch) {
  const std::vector<std::int64_t> first = listed(Permutation(5, 0, 100));
  EXPECT_EQ(first, listed(Permutation(5, 0, 100)));
  EXPECT_NE(first, listed(Permutation(6, 0, 100)));
  EXPECT_NE(first, listed(Permutation(5, 1, 100)));
  EXPECT_NE(listed(Permutation(5, std::uint64_t{1} << 32, 100)), first);
}

TEST(Permutation, AllOrdersOfThreeAreEquallyLikely) {
  std::map<std::vector<std::int64_t>, int> counts;
  constexpr int kEpochs = 6000;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    ++counts[listed(Permutation(9, static_cast<std::uint64_t>(epoch), 3))];
  }
  ASSERT_EQ(counts.size(), 6U);
  double chi2 = 0;
  for (const auto& [rows, count] : counts) chi2 += std::pow(count - 1000.0, 2) / 1000.0;
  EXPECT_LT(chi2, 20.5);  // 5 degrees of freedom: exceeded with probability 0.001
}

TEST(Permutation, RowsOfAHugeSetStayInside) {
  const std::int64_t size = (std::int64_t{1} << 40) + 12345;
  const Permutation permutation(1, 0, size);
  for (std::int64_t i = 0; i < 100; ++i) {
    const std::int64_t row = permutation(size - 1 - i);
    ASSERT_TRUE(0 <= row && row < size);
  }
  EXPECT_THROW(permutation(size), Error);
  EXPECT_THROW(permutation(-1), Error);
  EXPECT_THROW(Permutation(1, 0, -1), Error);
}

}  // namespace
}  // namespace tessera::philox_test
