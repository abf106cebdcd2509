// The bytes that a rank sends, against numbers computed by hand. Every exchange checks by itself
// that a transport sends as many (comm/backends/gloo/exchange.cpp).
#include <ATen/ATen.h>

#include "comm/batch.h"
#include "support/test.h"

namespace tessera::comm::sent_bytes_test {
namespace {

constexpr std::int64_t kKiB = 1024;

at::Tensor floats(std::int64_t numel) { return at::empty({numel}, at::kFloat); }

TEST(SentBytes, AGatherSendsTheOwnSliceToEveryOtherRank) {
  for (const int rank : {0, 2}) EXPECT_EQ(sent_bytes(AllGather{floats(12)}, 3, rank), 2 * 16);
}

TEST(SentBytes, AReductionSendsEveryOtherRankItsSliceInTheWireDtype) {
  const ReduceScatter op{at::empty({12}, at::kBFloat16), floats(4)};
  EXPECT_EQ(sent_bytes(op, 3, 1), 2 * 4 * 2);
}

TEST(SentBytes, UpTo256KiBInAllASumIsOneRound) {
  const AllReduce op{floats(64 * kKiB / 4)};
  EXPECT_FALSE(in_two_rounds(op, 4));
  EXPECT_EQ(sent_bytes(op, 4, 0), 3 * 64 * kKiB);
  const AllReduce larger{floats(64 * kKiB / 4 + 1)};
  EXPECT_TRUE(in_two_rounds(larger, 4));
  EXPECT_FALSE(in_two_rounds(AllReduce{floats(kKiB * kKiB)}, 2)) << "two ranks, any size";
}

TEST(SentBytes, InTwoRoundsAPartGoesOutAndItsSumComesBackInTheResultsDtype) {
  // 100003 elements over 3: 33335, 33334, 33334.
  const AllReduce op{at::empty({100003}, at::kBFloat16), floats(100003)};
  EXPECT_EQ(sent_bytes(op, 3, 0), 66668 * 2 + 2 * 33335 * 4);
  EXPECT_EQ(sent_bytes(op, 3, 2), 66669 * 2 + 2 * 33334 * 4);
  EXPECT_EQ(summed_by(op, 3, 1).begin, 33335);
  EXPECT_EQ(summed_by(op, 3, 2).end, 100003);
}

TEST(SentBytes, AnAllToAllSendsAllButTheOwnRange) {
  const AllToAll op{floats(9), {2, 3, 4}, floats(6), {1, 3, 2}};
  EXPECT_EQ(sent_bytes(op, 3, 0), 7 * 4);
  EXPECT_EQ(sent_bytes(op, 3, 2), 5 * 4);
}

TEST(SentBytes, ABroadcastIsSentByItsSourceToEveryOtherRank) {
  const Broadcast op{floats(9), 1};
  EXPECT_EQ(sent_bytes(op, 3, 1), 2 * 36);
  EXPECT_EQ(sent_bytes(op, 3, 0), 0);
}

TEST(SentBytes, WhatIsRelayedComesToTheSameBytesInFewerMessages) {
  const auto bytes = at::empty({60}, at::kByte);
  EXPECT_EQ(sent_bytes(RelayedGather{bytes, {12, 12, 12, 12, 12}}, 5, 3), 4 * 12);
  // Rank 3 sends its own part, then rank 2's with it, then its own once more.
  EXPECT_EQ(sent_bytes(RelayedGather{bytes, {10, 20, 30, 0, 0}}, 5, 3), 0 + 30 + 0);
  EXPECT_EQ(sent_bytes(Combine{bytes}, 5, 0), 3 * 60);
  EXPECT_EQ(sent_bytes(Combine{bytes}, 1024, 0), 10 * 60);
  const AllReduce sum{floats(4), {}, Route::kRelayed};
  EXPECT_TRUE(is_relayed(sum, 5));
  EXPECT_EQ(sent_bytes(sum, 5, 1), 4 * 16);
  EXPECT_FALSE(is_relayed(AllReduce{floats(kKiB * kKiB), {}, Route::kRelayed}, 5)) << "too large";
}

TEST(SentBytes, ABatchSendsWhatItsOpsSend) {
  Batch batch;
  batch.ops = {AllGather{floats(12)}, AllReduce{floats(5)}};
  EXPECT_EQ(sent_bytes(batch, 3, 0), 2 * 16 + 2 * 20);
}

}  // namespace
}  // namespace tessera::comm::sent_bytes_test
