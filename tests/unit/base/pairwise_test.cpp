#include "pairwise.h"

#include <array>

#include "proof.h"
#include "support/test.h"

namespace tessera::pairwise_test {
namespace {

using test::Choice;
using test::IsValid;
using test::pairwise;
using test::product;
using Sizes = std::vector<std::size_t>;

bool all_valid(const Choice&) { return true; }
bool none_valid(const Choice&) { return false; }

/// Rules of the kind that layouts have: what one value forbids another dimension.
bool some_valid(const Choice& choice) {
  if (choice[0] == 2 && choice[1] >= 4) return false;
  if (choice[1] % 3 == 1 && choice[2] != 0) return false;
  return choice[0] + choice[3] != 3;
}
const Sizes kSizes{5, 12, 3, 2, 3, 2};

/// {dimension, value, dimension, value}: every two of every choice.
std::set<std::array<std::size_t, 4>> pairs_of(const std::vector<Choice>& choices) {
  std::set<std::array<std::size_t, 4>> pairs;
  for (const Choice& choice : choices) {
    for (std::size_t a = 0; a < choice.size(); ++a) {
      for (std::size_t b = a + 1; b < choice.size(); ++b) {
        pairs.insert({a, choice[a], b, choice[b]});
      }
    }
  }
  return pairs;
}

TEST(Pairwise, HasEveryPairThatAValidChoiceHas) {
  for (const IsValid& is_valid : {IsValid(all_valid), IsValid(some_valid)}) {
    const auto expected = pairs_of(product(kSizes, is_valid));
    for (std::uint32_t seed = 0; seed < 20; ++seed) {
      EXPECT_EQ(pairs_of(pairwise(kSizes, is_valid, seed)), expected) << "seed " << seed;
    }
  }
}

TEST(Pairwise, HasValidChoicesOnlyAndEachOnce) {
  const auto choices = pairwise(kSizes, some_valid, 7);
  EXPECT_TRUE(std::ranges::all_of(choices, some_valid));
  EXPECT_EQ(std::set(choices.begin(), choices.end()).size(), choices.size());
}

TEST(Pairwise, IsDrawnByTheSeedAlone) {
  EXPECT_EQ(pairwise(kSizes, some_valid, 7), pairwise(kSizes, some_valid, 7));
  EXPECT_NE(pairwise(kSizes, some_valid, 7), pairwise(kSizes, some_valid, 8));
  // Numbers of std::mt19937, which the standard fixes: the same list wherever it is drawn.
  const std::vector<Choice> expected{{1, 0}, {0, 2}, {1, 1}, {0, 0}, {1, 2}, {0, 1}};
  EXPECT_EQ(pairwise({2, 3}, all_valid, 1), expected);
}

// 60 pairs of the two longest dimensions need 60 choices; greedy takes few more.
TEST(Pairwise, IsNearTheShortestList) {
  EXPECT_EQ(product(kSizes, all_valid).size(), 2160U);
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    const auto choices = pairwise(kSizes, all_valid, seed);
    EXPECT_GE(choices.size(), 60U);
    EXPECT_LE(choices.size(), 72U) << "seed " << seed;
  }
}

TEST(Pairwise, IsDrawnFromTensOfThousandsOfChoicesAtOnce) {
  const Sizes sizes{25, 25, 4, 4, 4};
  EXPECT_EQ(product(sizes, all_valid).size(), 40000U);
  const auto choices = pairwise(sizes, all_valid, 3);
  EXPECT_GE(choices.size(), 625U);
  EXPECT_LE(choices.size(), 700U);
}

TEST(Pairwise, ADimensionOfOneValueIsInEveryChoice) {
  const auto choices = pairwise({1, 3, 1, 2}, all_valid, 7);
  EXPECT_EQ(choices.size(), 6U);
  for (const Choice& choice : choices) EXPECT_EQ(choice[0] + choice[2], 0U);
}

TEST(Pairwise, OneDimensionHasEachOfItsValidValues) {
  auto choices = pairwise({6}, [](const Choice& choice) { return choice[0] != 4; }, 7);
  std::ranges::sort(choices);
  EXPECT_EQ(choices, (std::vector<Choice>{{0}, {1}, {2}, {3}, {5}}));
}

TEST(Pairwise, OfNothingValidIsEmpty) {
  EXPECT_TRUE(pairwise(kSizes, none_valid, 7).empty());
  EXPECT_TRUE(pairwise({3, 0, 2}, all_valid, 7).empty());
}

TEST(Product, HasEveryValidChoiceInOrder) {
  const auto is_valid = [](const Choice& choice) { return choice[0] != 1 || choice[1] != 0; };
  EXPECT_EQ(product({2, 3}, is_valid),
            (std::vector<Choice>{{0, 0}, {0, 1}, {0, 2}, {1, 1}, {1, 2}}));
}

TEST(Cases, AreTheWholeProductOfAFullProofOnly) {
  const std::size_t found = test::cases(kSizes, all_valid, 7).size();
  EXPECT_EQ(found == 2160U, test::full_proof());
}

TEST(Cases, InTurnHaveAListTogetherAndNoneHasNothingOfIt) {
  if (test::full_proof()) GTEST_SKIP() << "each case has the whole list";
  const std::vector<int> all{0, 1, 2, 3}, numbers{7, 8, 9};
  EXPECT_EQ(test::in_turn(all, 3, numbers, 7), (std::vector<int>{0, 3}));
  EXPECT_EQ(test::in_turn(all, 3, numbers, 8), (std::vector<int>{1}));
  EXPECT_EQ(test::in_turn(all, 3, numbers, 9), (std::vector<int>{2}));
  EXPECT_THROW(test::in_turn(all, 3, numbers, 6), Error);
  EXPECT_THROW(test::in_turn(std::vector<int>{0, 1}, 3, numbers, 9), Error);
}

// Naive: a case at the end of no part, or the first one of each in all.
TEST(Parts, HaveEveryCaseOnce) {
  const auto whole = product({5, 7, 3}, all_valid);
  for (const std::size_t count : {1U, 2U, 11U, 105U, 200U}) {
    std::vector<Choice> found;
    for (std::size_t number = 1; number <= count; ++number) {
      const auto some = test::PartOfProof{number, count}.of(whole);
      found.insert(found.end(), some.begin(), some.end());
    }
    std::ranges::sort(found);
    EXPECT_EQ(found, whole) << count;
  }
}

TEST(Parts, AreReadAsTheyAreWrittenAndNothingElseIs) {
  const auto part = test::PartOfProof::parse("2/11");
  EXPECT_EQ(part.number, 2U);
  EXPECT_EQ(part.count, 11U);
  for (const char* text : {"", "2", "2/", "0/3", "4/3", "1/0", "1/3x", "-1/3", "1 of 3"}) {
    EXPECT_THROW(test::PartOfProof::parse(text), Error) << text;
  }
}

}  // namespace
}  // namespace tessera::pairwise_test
