#include "launch/failure_watch.h"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <future>
#include <limits>
#include <system_error>
#include <thread>

#include "comm/backends/gloo/transport.h"
#include "comm/batch.h"
#include "comm/thread_ranks.h"
#include "support/test.h"
#include "unit/comm/rank_pools.h"

namespace tessera::comm::failure_watch_test {
namespace {

using std::chrono::milliseconds;

/// A watch of rank 0 over a store in memory; what it does first is what the test waits for.
class Watched : public ::testing::Test {
 protected:
  struct Blocked0 : Blocked {
    void abort() override {}
  };

  void start(milliseconds blocked_after = milliseconds(4),
             milliseconds silent_after = milliseconds(30)) {
    const auto act = [this](const char* what) {
      return [this, what](const std::string& why) {
        if (!acted_.exchange(true)) action_.set_value(concat(what, ": ", why));
      };
    };
    FailureWatch::Actions actions;
    actions.failed = act("failed");
    actions.lost = act("lost");
    actions.disagree = [act](const std::string& why, int) { act("disagree")(why); };
    actions.aborted = [act](const Abort& abort, int epoch) {
      if (!abort.is_disagreement) act("aborted")(concat(abort.why, " in epoch ", epoch));
    };
    actions.acknowledged = [this] { return acknowledged_.load(); };
    actions.unacknowledged = [act](const std::string& why, int epoch) {
      act("unacknowledged")(concat(why, " in epoch ", epoch));
    };
    watch_ = std::make_unique<FailureWatch>(
        store_, board_,
        WatchOptions{0, milliseconds(2), blocked_after, silent_after, acknowledged_within_},
        actions);
  }
  std::string first_action() { return action_.get_future().get(); }
  /// Returns once the watch has looked at its peers `looks` times from now on, or has acted. The
  /// look that is under way began earlier.
  void let_it_look(std::uint64_t looks) {
    const std::uint64_t begin = watch_->looks() + 1;
    while (!acted_ && watch_->looks() < begin + looks) std::this_thread::yield();
  }

  std::shared_ptr<Store> store_ = Store::in_memory();
  std::shared_ptr<WaitBoard> board_ = std::make_shared<WaitBoard>();
  std::promise<std::string> action_;
  std::atomic<bool> acted_{false};
  std::atomic<bool> acknowledged_{false};
  milliseconds acknowledged_within_{0};
  Blocked0 blocked_;
  std::unique_ptr<FailureWatch> watch_;
};

/// While this lives the store gives no answer, as if its host had stopped.
class StoppedStore {
 public:
  explicit StoppedStore(WaitBoard& board, std::function<void()> when_known)
      : look_(std::async(std::launch::async, [this, &board, act = std::move(when_known)] {
          const WaitBoard::Look looking(board);
          looks_.set_value();
          std::this_thread::sleep_for(milliseconds(500));  // the store's timeout
          act();
        })) {
    looks_.get_future().wait();
  }

 private:
  std::promise<void> looks_;
  std::future<void> look_;
};

constexpr int kRefused = 7;

/// Runs `start` in a process that has room for the stacks of so many more threads.
[[noreturn]] void start_with_room_for(rlim_t threads, const std::function<void()>& start) {
  constexpr rlim_t kStack = rlim_t{1} << 30;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStack);
  pthread_setattr_default_np(&attributes);
  rlim_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlim_t used = pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE));
  const rlim_t room = used + threads * kStack + kStack / 2;
  const rlimit limit{room, room};
  ::setrlimit(RLIMIT_AS, &limit);
  try {
    start();
  } catch (const std::system_error&) {
    ::_exit(kRefused);
  }
  ::_exit(0);
}

// On a host whose threads are used up. A running thread that is not joined would end the process.
TEST(TwoThreads, OfWhichOneCannotStartAreAnError) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's own memory is beyond any limit";
#endif
  const auto watch = [] {
    const FailureWatch made(Store::in_memory(), std::make_shared<WaitBoard>(), WatchOptions{}, {});
  };
  const auto ranks = [] { const ThreadRanks made(2, ThreadBackend::kInProcess); };
  for (const auto& start : {std::function<void()>(watch), std::function<void()>(ranks)}) {
    EXPECT_EXIT(start_with_room_for(1, start), ::testing::ExitedWithCode(kRefused), "");
    EXPECT_EXIT(start_with_room_for(2, start), ::testing::ExitedWithCode(0), "");
  }
}

// Words take 20 ms here. A rank that blamed its peer then would blame one that waits, as it does
// itself, for the store's host.
TEST(HearingOthers, WaitsForALookThatTheStoreDoesNotAnswer) {
  WaitBoard board;
  AbortFlag abort_flag;
  abort_flag.patience.expect_words_within(milliseconds(20));
  const StoppedStore store(board, [&] { abort_flag.mark("the store is gone"); });
  EXPECT_THAT([&] { hear_others(abort_flag, board, 1); },
              ::testing::ThrowsMessage<LostRank>(Says("the store is gone")));
}

TEST(HearingOthers, EndsWithTheLookThatFoundNothing) {
  WaitBoard board;
  AbortFlag abort_flag;
  abort_flag.patience.expect_words_within(milliseconds(20));
  bool known = false;
  const StoppedStore store(board, [&] { known = true; });
  EXPECT_FALSE(hear_others(abort_flag, board, 1));
  EXPECT_TRUE(known);
}

// Its own timeout is what there is to say of the rank that serves the store.
TEST(HearingOthers, DoesNotWaitForTheStoreOfTheRankThatIsBlamed) {
  WaitBoard board;
  board.set_store_rank(0);
  AbortFlag abort_flag;
  abort_flag.patience.expect_words_within(milliseconds(20));
  const StoppedStore store(board, [&] { abort_flag.mark("the store is gone"); });
  hear_others(abort_flag, board, 0);
  EXPECT_FALSE(abort_flag.is_set());
}

/// Rank 1 as the failure watch hears it: it beats in a thread of the test, `beats` times or for as
/// long as this lives.
class Beating {
 public:
  explicit Beating(WaitBoard& board, int beats = std::numeric_limits<int>::max())
      : thread_([this, &board, beats] {
          for (int beat = 0; beat < beats && !stops_; ++beat) {
            board.heard(1, std::chrono::steady_clock::now());
            std::this_thread::sleep_for(milliseconds(5));
          }
        }) {}
  ~Beating() {
    stops_ = true;
    thread_.join();
  }
  Beating(const Beating&) = delete;
  Beating& operator=(const Beating&) = delete;

 private:
  std::atomic<bool> stops_{false};
  std::thread thread_;
};
constexpr auto kFar = std::chrono::hours(1);

// Naive: no deadline counts as one that is over, and every peer that lives as late.
TEST(HearingOthers, CallsNoOneLateWithoutADeadline) {
  WaitBoard board;
  AbortFlag abort_flag;
  abort_flag.patience.expect_words_within(milliseconds(500));
  const Beating peer(board);
  EXPECT_FALSE(hear_others(abort_flag, board, 1));
}

// Naive: a rank that has closed its connections counts as lost, though it still hears others
// itself.
TEST(HearingOthers, WaitsForTheWordsOfAPeerThatBeats) {
  WaitBoard board;
  AbortFlag abort_flag;
  abort_flag.patience.expect_words_within(milliseconds(500));
  const Beating peer(board);
  const auto words = std::async(std::launch::async, [&] {
    std::this_thread::sleep_for(milliseconds(1000));
    abort_flag.mark("rank 1: waited for rank 2");
  });
  EXPECT_THAT([&] { hear_others(abort_flag, board, 1, std::chrono::steady_clock::now() + kFar); },
              ::testing::ThrowsMessage<LostRank>(Says("waited for rank 2")));
}

// Its beats end at 0.1 s, and so does the wait at 1.1 s. Naive: a rank that has beaten lives, and
// is late at 2 s.
TEST(HearingOthers, EndsWithTheBeatsOfAPeerThatHasDied) {
  WaitBoard board;
  AbortFlag abort_flag;
  abort_flag.patience.expect_words_within(milliseconds(1000));
  const Beating peer(board, 20);
  EXPECT_FALSE(hear_others(abort_flag, board, 1, std::chrono::steady_clock::now()));
}

// The connection between two ranks that live has broken. Naive: they wait until the deadline.
TEST(HearingOthers, EndsLongBeforeTheDeadlineThoughThePeerLives) {
  WaitBoard board;
  AbortFlag abort_flag;
  abort_flag.patience.expect_words_within(milliseconds(100));
  const Beating peer(board);
  EXPECT_FALSE(hear_others(abort_flag, board, 1, std::chrono::steady_clock::now() + kFar));
}

// A beat that the watch has found as it listens first may be from before the connection was closed.
TEST(HearingOthers, TakesOneBeatForNoSignOfLife) {
  const auto begin = std::chrono::steady_clock::now();
  const auto later = begin + kFar;
  WaitBoard board;
  const WaitBoard::Doubt doubt(board, 1);
  board.heard(1, begin);
  board.heard(1, begin);
  EXPECT_EQ(doubt.last_beat(), std::nullopt);
  board.heard(2, later);
  EXPECT_EQ(doubt.last_beat(), std::nullopt);
  board.heard(1, later);
  EXPECT_EQ(doubt.last_beat(), later);
  board.heard(1, std::nullopt);  // it has listened again since
  EXPECT_EQ(doubt.last_beat(), later);
}

TEST(HearingOthers, EndsByTheDeadlineThoughThePeerLives) {
  WaitBoard board;
  AbortFlag abort_flag;
  abort_flag.patience.expect_words_within(milliseconds(500));
  const Beating peer(board);
  EXPECT_TRUE(hear_others(abort_flag, board, 1, std::chrono::steady_clock::now()));
}

// A rank that is neither a neighbour nor waited for.
TEST_F(Watched, ListensToARankThatIsAboutToBeBlamed) {
  start();
  const WaitBoard::Doubt doubt(*board_, 5);
  for (int beat = 0; !doubt.last_beat(); ++beat) {
    store_->set(store_key::pulse(5), std::to_string(beat));
    let_it_look(1);
  }
  EXPECT_FALSE(acted_) << first_action();
}

// The next look tells what is said after it.
TEST(HearingOthers, DoesNotWaitForALookThatBeginsLater) {
  WaitBoard board;
  const auto before = std::chrono::steady_clock::now();
  const WaitBoard::Look looking(board);
  EXPECT_FALSE(board.looks_since_before(before));
  EXPECT_TRUE(board.looks_since_before(before + std::chrono::hours(1)));
}

TEST_F(Watched, FailureKeyIsSeen) {
  start();
  EXPECT_EQ(store_->set_if_absent(store_key::kFailure, "rank 3: no memory"), "rank 3: no memory");
  EXPECT_EQ(store_->set_if_absent(store_key::kFailure, "rank 0: too late"), "rank 3: no memory");
  EXPECT_EQ(first_action(), "failed: rank 3: no memory");
}

TEST_F(Watched, AbortOfItsEpochIsSeen) {
  store_->set(store_key::abort(0), "old");
  start();
  EXPECT_EQ(first_action(), "aborted: old in epoch 0");
}

/// Says that ranks disagree, as the watch of another rank does.
void disagree(Store& store, int epoch) {
  store.set(store_key::abort(epoch), encode({"ranks disagree", true}));
}

// [Note: disagreements]: the program may catch it.
TEST_F(Watched, ADisagreementOfWhichTheProgramKnowsEndsNothing) {
  disagree(*store_, 0);
  acknowledged_ = true;
  start(milliseconds(0), milliseconds(0));
  let_it_look(10);
  EXPECT_FALSE(acted_) << first_action();
}

TEST_F(Watched, ADisagreementThatCameToNoCallOfARankIsSaidByItsWatch) {
  disagree(*store_, 0);
  start();
  EXPECT_EQ(first_action(),
            "unacknowledged: ranks disagree; this rank made no call of the library, from which "
            "this could "
            "be thrown, within 0 s in epoch 0");
}

// Naive: that is a wait, too, which may have begun before the watch has looked.
TEST_F(Watched, ADisagreementOfWhichTheProgramKnowsDoesNotEndItsRecovery) {
  const OnBoard recovering(*board_, blocked_);
  acknowledged_ = true;
  disagree(*store_, 0);
  start(std::chrono::hours(1), std::chrono::hours(1));
  let_it_look(10);
  EXPECT_FALSE(acted_) << first_action();
}

// Naive: one thread of the rank throws it, while another one stays in its wait forever.
TEST_F(Watched, ADisagreementThatEndsNoWaitIsSaidThoughItWasThrown) {
  struct : Blocked {
    void abort() override {}
    std::optional<PeerWait> waits_for() const override { return PeerWait{1, 0, 1, "#0"}; }
  } wait;
  const OnBoard waiting(*board_, wait);
  acknowledged_within_ = milliseconds(4);
  acknowledged_ = true;
  disagree(*store_, 0);
  start(milliseconds(4), std::chrono::hours(1));
  EXPECT_EQ(first_action(),
            "unacknowledged: ranks disagree; this rank did not come out of its call of the library "
            "within "
            "0.004 s in epoch 0");
}

// Without patience every look decides: none while nothing waits, the first one after.
TEST_F(Watched, SilentPeerIsLostOnlyWhileSomethingWaits) {
  board_->watch({0, 2});
  start(milliseconds(0), milliseconds(0));
  let_it_look(10);
  ASSERT_FALSE(acted_) << first_action();
  const OnBoard waiting(*board_, blocked_);
  EXPECT_THAT(first_action(), Says("lost: rank 2 has given no sign of life"));
}

TEST_F(Watched, SilentPeerIsLostWithTheTimeThatItWasGiven) {
  board_->watch({0, 2});
  start();
  const OnBoard waiting(*board_, blocked_);
  EXPECT_THAT(first_action(), Says("lost: rank 2 has given no sign of life for 0.03 s"));
}

TEST_F(Watched, RanksWithoutAHeartbeatAreSilent) {
  start();
  EXPECT_EQ(silent_ranks(*store_, {0, 2}, std::chrono::seconds(1)), std::vector<int>{2});
}

TEST_F(Watched, DifferentEntriesOfAPeerAreNamed) {
  const auto mine = std::make_shared<FlightRecorder>("g");
  board_->add(mine);
  board_->watch({0, 1});
  const auto entry = mine->record(batch_of(AllGather{at::zeros({4})}, "mine", 1), 0);
  FlightRecorder theirs("g");
  const auto other = theirs.record(batch_of(AllGather{at::zeros({4})}, "theirs", 1), 0);
  const Pulse pulse{1, 0, 1, theirs.wait_for(*other, 0), -1, {theirs.issued()}};
  store_->set(store_key::pulse(1), encode(pulse));
  store_->set(store_key::issued(0, 1), theirs.lines());
  start(milliseconds(4), std::chrono::hours(1));
  struct : Blocked {
    void abort() override {}
    std::optional<PeerWait> waits_for() const override { return log->wait_for(*entry, 1); }
    const FlightRecorder* log = nullptr;
    std::shared_ptr<const Entry> entry;
  } wait;
  wait.log = mine.get();
  wait.entry = entry;
  const OnBoard waiting(*board_, wait);
  EXPECT_EQ(
      first_action(),
      "disagree: ranks disagree: rank 0 issues all_gather of mine (#0, unit 1, micro-batch 0: 16 "
      "B Float) but rank 1 issues all_gather of theirs (#0, unit 1, micro-batch 0: 16 B Float) "
      "(group g)");
  EXPECT_TRUE(store_->find(store_key::asked(0, 1)).has_value());
}

// A recovery begins every sequence again: what delayed #0 before is not what delays #0 now.
TEST_F(Watched, WhoHeldUpAWaitIsForgottenByARecovery) {
  start(std::chrono::hours(1), std::chrono::hours(1));
  const PeerWait wait{1, 0, 2, "#0"};
  board_->set_cause(0, wait, 2);
  EXPECT_EQ(board_->cause_of(1, 0), 2);
  watch_->set_epoch(1);
  EXPECT_EQ(board_->cause_of(1, 0), std::nullopt);
  board_->set_cause(0, wait, 2);  // by a look that began before
  EXPECT_EQ(board_->cause_of(1, 0), std::nullopt);
  board_->set_cause(1, wait, 2);
  EXPECT_EQ(board_->cause_of(1, 0), 2);
}

TEST(Store, MeetingNamesWhoDidNotCome) {
  const auto store = Store::in_memory();
  const AbortFlag abort_flag;
  EXPECT_THAT([&] { store->meet("join", 1, {0, 1, 2}, milliseconds(10), abort_flag); },
              ::testing::ThrowsMessage<LostRank>(
                  ::testing::StrEq("join: rank 0, 2 of 3 did not come within 0.01 s")));
  store->meet("alone", 0, {0}, milliseconds(10), abort_flag);
}

TEST(Store, AMeetingWhoseLastOneCameAsPatienceEndedIsOver) {
  const auto store = Store::in_memory();
  const AbortFlag abort_flag;
  store->arrive("join", 0, 2);
  store->arrive("join", 1, 3);  // here, and has not said yet that all are
  EXPECT_NO_THROW(store->meet("join", 0, {0, 1}, milliseconds(10), abort_flag));
}

TEST(Store, RanksThatCountOthersThanTheFirstAreRefused) {
  const auto store = Store::in_memory();
  store->require_size(1, 2);
  store->require_size(0, 2);
  EXPECT_EQ(error_of(ErrorKind::kUsage, [&] { store->require_size(2, 20); }),
            "world: found rank 2 of 20 ranks, expected one of 2 as rank 1 is; start all with "
            "the same number (WORLD_SIZE, or what the launcher sets)");
}

TEST(Store, AMeetingIsOverWhenTheLastOneHasComeHoweverOftenTheOthersDid) {
  const auto store = Store::in_memory();
  const AbortFlag abort_flag;
  for (int attempt = 0; attempt < 3; ++attempt) {
    EXPECT_THROW(store->meet("leave", 0, {0, 1, 2}, milliseconds(1), abort_flag), LostRank);
  }
  store->arrive("leave", 1, 3);
  EXPECT_EQ(store->missing("leave", 3).members, std::vector<int>{2});
  store->meet("leave", 2, {0, 1, 2}, milliseconds(10), abort_flag);
  store->meet("leave", 0, {0, 1, 2}, milliseconds(10), abort_flag);
}

TEST(Store, ManyKeysAreFoundTogetherOrOneByOne) {
  const auto store = Store::in_memory();
  store->set("a", "1");
  store->set("c", "");
  using Values = std::vector<std::optional<std::string>>;
  EXPECT_EQ(store->find_all({"a", "b", "c"}), (Values{"1", std::nullopt, ""}));
  store->set("b", "22");
  EXPECT_EQ(store->find_all({"a", "b"}), (Values{"1", "22"}));
  EXPECT_EQ(store->find_all({}), Values{});
}

TEST(Store, AbortEndsAMeeting) {
  AbortFlag abort_flag;
  abort_flag.mark("enough");
  EXPECT_THROW(Store::in_memory()->meet("join", 0, {0, 1}, std::chrono::hours(1), abort_flag),
               LostRank);
}

}  // namespace
}  // namespace tessera::comm::failure_watch_test
