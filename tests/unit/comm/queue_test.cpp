#include "comm/queue.h"

#include <ATen/ATen.h>

#include <atomic>
#include <latch>
#include <thread>

#include "base/test_hooks.h"
#include "launch/abort_flag.h"
#include "rank_pools.h"
#include "support/test.h"

namespace tessera::comm::queue_test {
namespace {

/// Writes down what is issued; two ranks, so that the queue uses its thread.
class RecordingGroup : public Group {
 public:
  int rank() const override { return 0; }
  int size() const override { return 2; }
  const std::string& name() const override { return name_; }
  std::unique_ptr<Work> start(Batch batch) override {
    struct Done : Work {
      void wait() override {}
    };
    if (abort_flag) abort_flag->check();
    if (fail_at == batch.label.unit_id) throw Error(ErrorKind::kComm, "broken wire");
    threads.push_back(std::this_thread::get_id());
    issued.push_back(batch.label.unit_id);
    return std::make_unique<Done>();
  }
  std::shared_ptr<AbortFlag> abort_flag;
  std::uint32_t fail_at = ~0U;
  std::vector<std::uint32_t> issued;
  std::vector<std::thread::id> threads;

 private:
  std::string name_ = "recording";
};

Batch labelled(std::uint32_t id) {
  Batch batch;
  batch.label.unit_id = id;
  return batch;
}

TEST(IssueQueue, IssuesInOrderOfSubmissionOnOneThread) {
  RecordingGroup group;
  IssueQueue queue;
  for (std::uint32_t i = 0; i < 200; ++i) queue.submit(group, labelled(i));
  queue.drain();
  ASSERT_EQ(group.issued.size(), 200U);
  for (std::uint32_t i = 0; i < 200; ++i) EXPECT_EQ(group.issued[i], i);
  for (const auto& thread : group.threads) {
    EXPECT_EQ(thread, group.threads.front());
    EXPECT_NE(thread, std::this_thread::get_id());
  }
}

TEST(IssueQueue, ConcurrentSubmittersKeepTheirOwnOrder) {
  RecordingGroup group;
  IssueQueue queue;
  constexpr std::uint32_t kEach = 300;
  std::vector<std::thread> submitters;
  for (std::uint32_t who = 0; who < 4; ++who) {
    submitters.emplace_back([&, who] {
      for (std::uint32_t i = 0; i < kEach; ++i)
        queue.submit(group, labelled(who * kEach + i)).wait();
    });
  }
  for (auto& thread : submitters) thread.join();
  queue.drain();
  ASSERT_EQ(group.issued.size(), 4 * kEach);
  std::vector<std::uint32_t> last(4, 0);
  for (const auto id : group.issued) {
    EXPECT_GE(id % kEach + 1, last[id / kEach] + 1);
    last[id / kEach] = id % kEach;
  }
}

TEST(IssueQueue, ReadyRunsRightBeforeItsBatch) {
  RecordingGroup group;
  IssueQueue queue;
  std::vector<std::size_t> issued_before;
  for (std::uint32_t i = 0; i < 5; ++i) {
    queue.submit(group, labelled(i), [&] { issued_before.push_back(group.issued.size()); });
  }
  queue.drain();
  EXPECT_EQ(issued_before, (std::vector<std::size_t>{0, 1, 2, 3, 4}));
}

TEST(IssueQueue, FailureReachesItsWaiterAndEndsTheQueue) {
  RecordingGroup group;
  group.fail_at = 1;
  IssueQueue queue;
  std::latch hold(1);
  auto first = queue.submit(group, labelled(0), [&] { hold.wait(); });
  auto failing = queue.submit(group, labelled(1));
  auto after = queue.submit(group, labelled(2));
  hold.count_down();
  const auto message_of = [](auto&& act) -> std::string {
    try {
      act();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_THAT(message_of([&] { failing.wait(); }), Says("broken wire"));
  EXPECT_THAT(message_of([&] { failing.wait(); }), Says("broken wire"));
  EXPECT_THAT(message_of([&] { after.wait(); }), Says("broken wire"));
  EXPECT_THAT(message_of([&] { queue.submit(group, labelled(3)); }), Says("broken wire"));
  EXPECT_EQ(group.issued, std::vector<std::uint32_t>{0});
  group.fail_at = ~0U;
  queue.recover();
  queue.submit(group, labelled(4)).wait();
  EXPECT_EQ(group.issued, (std::vector<std::uint32_t>{0, 4}));
}

TEST(IssueQueue, AbortDropsWhatWasNotIssued) {
  RecordingGroup group;
  IssueQueue queue;
  std::latch started(1);
  std::latch hold(1);
  queue.submit(group, labelled(0), [&] {
    started.count_down();
    hold.wait();
  });
  auto dropped = queue.submit(group, labelled(1));
  started.wait();
  queue.abort("enough");
  EXPECT_THROW(dropped.wait(), Error);
  hold.count_down();
  queue.recover();
  EXPECT_THAT(group.issued, Not(Contains(1U)));
}

// Naive: finished work wins, whose data may be those of another collective.
TEST(IssueQueue, AnAbortEndsTheWaitForFinishedWorkToo) {
  RecordingGroup group;
  IssueQueue queue;
  auto waited = queue.submit(group, labelled(0));
  auto finished = queue.submit(group, labelled(1));
  waited.wait();
  queue.drain();
  ASSERT_EQ(group.issued, (std::vector<std::uint32_t>{0, 1}));
  queue.abort("enough");
  EXPECT_THROW(finished.wait(), LostRank);
  EXPECT_NO_THROW(waited.wait()) << "its wait has ended already";
}

// [Note: disagreements]. Naive: the queue's thread has thrown the error, so the program knows.
TEST(IssueQueue, AnAbortThatItsThreadMeetsIsAcknowledgedOnceTheProgramGetsTheError) {
  RecordingGroup group;
  group.abort_flag = std::make_shared<AbortFlag>();
  const AbortFlag& flag = *group.abort_flag;
  IssueQueue queue(group.abort_flag);
  group.abort_flag->mark("enough");
  auto pending = queue.submit(group, labelled(0));
  queue.drain();
  EXPECT_FALSE(flag.acknowledged());
  EXPECT_THROW(pending.wait(), LostRank);
  EXPECT_TRUE(flag.acknowledged());
  group.abort_flag->clear();
  queue.recover();
  group.abort_flag->mark("enough again");
  queue.abort("enough again");
  EXPECT_FALSE(flag.acknowledged());
  EXPECT_THROW(queue.submit(group, labelled(1)), LostRank);
  EXPECT_TRUE(flag.acknowledged());
}

TEST(IssueQueue, HeldBackBatchGoesOutAfterTheNext) {
  RecordingGroup group;
  IssueQueue queue;
  const test_hooks::Set held(test_hooks::hold_back,
                             [](const Group&, const Label& label) { return label.unit_id == 1; });
  for (std::uint32_t i = 0; i < 4; ++i) queue.submit(group, labelled(i));
  queue.drain();
  EXPECT_EQ(group.issued, (std::vector<std::uint32_t>{0, 2, 1, 3}));
}

TEST(IssueQueue, GroupOfOneRankIsDoneAtOnceOnTheCallersThread) {
  launch_threads(1, ThreadBackend::kInProcess, [](World& world) {
    const auto group = world.group({0}, "gather");
    auto output = at::zeros({4}, at::kFloat);
    std::thread::id ready_on;
    auto pending = world.queue().submit(
        *group, batch_of(ReduceScatter{at::full({4}, 2.0, at::kBFloat16), output, Into::kAdd}),
        [&] { ready_on = std::this_thread::get_id(); });
    EXPECT_EQ(ready_on, std::this_thread::get_id());
    EXPECT_EQ(output.sum().item<float>(), 8.0F);
    pending.wait();
    Pending().wait();
  });
}

}  // namespace
}  // namespace tessera::comm::queue_test
