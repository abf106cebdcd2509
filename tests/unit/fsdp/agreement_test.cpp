// The views that ranks exchange when a backward begins: conversion to bits keeps them, and the OR
// of bits joins them.

#include "fsdp/agreed/order.h"
#include "support/test.h"

namespace tessera::fsdp::agreement_test {
namespace {

const ViewFrame kFrame{5, {{4, 2}, {5, 1}, {7, 0}, {9, 3}}};

BackwardView view() { return {3, {4, 7}, {{4, {true, false}}, {7, {}}}}; }

/// As any_of_ranks.
std::vector<bool> any(std::vector<bool> one, const std::vector<bool>& other) {
  EXPECT_EQ(one.size(), other.size()) << "all ranks send as many";
  for (std::size_t i = 0; i < one.size(); ++i) one[i] = one[i] || other[i];
  return one;
}

TEST(BackwardView, ComesBackAsItWas) {
  const BackwardView full{
      5, {4, 5, 7, 9}, {{4, {true, true}}, {5, {true}}, {7, {}}, {9, {true, true, true}}}};
  for (const auto& one : {view(), BackwardView{}, full}) {
    EXPECT_EQ(from_bits(to_bits(one, kFrame), kFrame), one);
  }
  EXPECT_EQ(from_bits(to_bits({}, {}), {}), BackwardView{});
}

// Naive: as text a view of a forward costs a byte a unit, and each goes to every rank.
TEST(BackwardView, IsABitForAllThatItMaySay) {
  EXPECT_EQ(to_bits(view(), kFrame).size(), 5U + 4U * 2U + 2U + 1U + 0U + 3U);
}

TEST(BackwardView, AllDoWhatAnyNeeds) {
  const BackwardView other{2, {5, 7}, {{4, {false, true}}, {5, {true}}}};
  const BackwardView both{3, {4, 5, 7}, {{4, {true, true}}, {5, {true}}, {7, {}}}};
  const auto mine = to_bits(view(), kFrame);
  const auto others = to_bits(other, kFrame);
  EXPECT_EQ(from_bits(any(mine, others), kFrame), both);
  EXPECT_EQ(from_bits(any(others, mine), kFrame), both);
  EXPECT_EQ(from_bits(any(mine, mine), kFrame), view());
}

}  // namespace
}  // namespace tessera::fsdp::agreement_test
