// What ranks tell each other when a backward begins survives the way, and is joined.
#include "fsdp/agreement.h"

#include <gtest/gtest.h>

namespace tessera::fsdp::agreement_test {
namespace {

BackwardView view() { return {3, {4, 7}, {{4, {true, false}}, {7, {}}}}; }

KnownToAll known() { return {5, {{3, 1}, {4, 2}, {5, 1}, {7, 0}, {9, 3}}}; }

/// As ranks combine them.
BackwardView joined(const std::vector<BackwardView>& views) {
  std::vector<bool> any(to_bits(views.front(), known()).size());
  for (const auto& one : views) {
    const auto bits = to_bits(one, known());
    EXPECT_EQ(bits.size(), any.size());
    for (std::size_t i = 0; i < any.size(); ++i) any[i] = any[i] || bits[i];
  }
  return from_bits(any, known());
}

TEST(BackwardView, ComesBackAsItWas) {
  EXPECT_EQ(from_bits(to_bits(view(), known()), known()), view());
  EXPECT_EQ(from_bits(to_bits({}, known()), known()), BackwardView{});
  EXPECT_TRUE(to_bits({}, {}).empty());
  const BackwardView all{5, {3, 4, 5, 7, 9}, {{3, {true}}, {9, {false, false, false}}}};
  EXPECT_EQ(from_bits(to_bits(all, known()), known()), all);
}

// Ranks compare hashes of these before they send bits.
TEST(BackwardView, OthersReadDifferently) {
  auto other = view();
  other.reached[4][1] = true;
  EXPECT_NE(encode(other), encode(view()));
  other = view();
  other.reached.erase(7);
  EXPECT_NE(encode(other), encode(view()));
  other = view();
  other.alive.insert(9);
  EXPECT_NE(encode(other), encode(view()));
}

TEST(BackwardView, AllDoWhatAnyNeeds) {
  const BackwardView other{2, {5, 7}, {{4, {false, true}}, {5, {true}}}};
  const BackwardView both{3, {4, 5, 7}, {{4, {true, true}}, {5, {true}}, {7, {}}}};
  EXPECT_EQ(joined({view(), other}), both);
  EXPECT_EQ(joined({other, view()}), both);
  EXPECT_EQ(joined({view()}), view());
}

}  // namespace
}  // namespace tessera::fsdp::agreement_test
