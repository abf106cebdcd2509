// Traces, and how a difference between those of two ranks is told.
#include "fsdp/agreed/order.h"

#include "support/test.h"
#include "unit/fsdp/flat_trace.h"

namespace tessera::fsdp::order_test {
namespace {

TEST(TraceHash, TellsOrdersApart) {
  std::set<std::uint64_t> hashes;
  const std::vector<Trace> traces = {flat({}),
                                     flat({0}),
                                     flat({1}),
                                     flat({0, 1}),
                                     flat({1, 0}),
                                     flat({0, 1, 1}),
                                     flat({0, 0}),
                                     flat({256}),
                                     flat({0, 256}),
                                     {{0, 1, 2}, {2, 1, 0}, {0, 0, 0}},
                                     {{0, 1, 2}, {2, 1, 0}, {0, 1, 1}},
                                     {{0, 1, 2}, {2, 1, 0}, {0, 1, 2}},
                                     {{0, 1, 2}, {1, 2, 0}, {0, 0, 0}}};
  for (const auto& trace : traces) hashes.insert(trace.hash());
  EXPECT_EQ(hashes.size(), traces.size());
  EXPECT_EQ(flat({0, 1}).hash(), flat({0, 1}).hash());
  EXPECT_EQ(hashes.count(0), 0U);
}

TEST(FirstDifference, NamesBothRanksEntries) {
  EXPECT_EQ(first_difference({"a", "b"}, 1, {"a", "b"}), "");
  EXPECT_EQ(first_difference({"a", "b"}, 2, {"a", "c"}),
            "entry 2: rank 0 entered b, rank 2 entered c");
}

TEST(FirstDifference, AShorterTraceHasNothingMore) {
  EXPECT_THAT(first_difference({"a"}, 1, {"a", "b"}),
              Says("rank 0 entered nothing more, rank 1 entered b"));
  EXPECT_THAT(first_difference({"a", "b"}, 1, {}),
              Says("rank 0 entered a, rank 1 entered nothing more"));
  EXPECT_EQ(first_difference({}, 1, {}), "");
}

}  // namespace
}  // namespace tessera::fsdp::order_test
