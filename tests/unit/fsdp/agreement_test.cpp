// What ranks tell each other when a backward begins survives the way, and is joined.
#include "fsdp/agreement.h"

#include <gtest/gtest.h>

namespace tessera::fsdp::agreement_test {
namespace {

BackwardView view() { return {3, {4, 7}, {{4, {true, false}}, {7, {}}}}; }

TEST(BackwardView, ComesBackAsItWas) {
  EXPECT_EQ(decode_backward_view(encode(view())), view());
  EXPECT_EQ(decode_backward_view(encode({})), BackwardView{});
}

// Naive: a rank that reads past the end of another one's message.
TEST(BackwardView, WhatIsCutOrChangedIsNone) {
  const auto bytes = encode(view());
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_EQ(decode_backward_view(bytes.substr(0, i)), std::nullopt) << i;
    auto changed = bytes;
    changed[i] = 'x';
    EXPECT_EQ(decode_backward_view(changed), std::nullopt) << i;
  }
  EXPECT_EQ(decode_backward_view("0 99999999999 0\n"), std::nullopt);
  EXPECT_EQ(decode_backward_view(bytes + "1"), std::nullopt);
}

TEST(BackwardView, AllDoWhatAnyNeeds) {
  const BackwardView other{2, {5, 7}, {{4, {false, true}}, {5, {true}}}};
  const BackwardView both{3, {4, 5, 7}, {{4, {true, true}}, {5, {true}}, {7, {}}}};
  EXPECT_EQ(unite({view(), other}), both);
  EXPECT_EQ(unite({other, view()}), both);
  EXPECT_EQ(unite({view()}), view());
}

}  // namespace
}  // namespace tessera::fsdp::agreement_test
