// A replayed product is on as many threads as the eager one, on which its last bit may depend.

#include "base/threads/product.h"
#include "counted_calls.h"
#include "dist/replayed.h"

namespace tessera::test::replay_threads_test {
namespace {

// Layers compute small products on one thread, a module's own at::mm is left alone. Naive: a replay
// that goes by sizes, or by neither.
TEST_ON_RANKS(ReplayThreads, ProductsAreOnAsManyAsTheyWereRecordedOn, 1) {
  Twins twins(data_mesh(world), around([](Part& part, const Several& in) {
                return Several{part.layer(in[0]) + at::mm(in[0], part.weight)};
              }));
  for (std::uint64_t step = 0; step < 5; ++step) twins.step({{rows(step, 7)}});
  using Counts = std::pair<std::int64_t, std::int64_t>;  // of all products, on one thread
  std::vector<Counts> counts;
  const auto replayed_before = twins.calls().replayed;
  twins.both([&](Sharded<Model>& handle) {
    const CountedCalls counted({"aten::mm", "aten::addmm"}, base::OneThread::in_this_thread);
    auto left = run_one(handle, {rows(9, 7)});
    counts.emplace_back(counted.count(), counted.count_when());
    return left;
  });
  twins.update();
  EXPECT_EQ(twins.calls().replayed, replayed_before + 1);
  EXPECT_GT(counts[0].second, 0);
  EXPECT_GT(counts[0].first, counts[0].second);
  EXPECT_EQ(counts[1], counts[0]);
}

}  // namespace
}  // namespace tessera::test::replay_threads_test
