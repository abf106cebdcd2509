#include "launch/bounded_calls.h"

#include <gtest/gtest.h>

#include <future>
#include <stdexcept>
#include <thread>

namespace tessera::comm::bounded_calls_test {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;

TEST(BoundedCalls, ReturnWhatTheCallReturnsAndThrowWhatItThrows) {
  BoundedCalls calls;
  EXPECT_EQ(calls.run([] { return 7; }, hours(1)), 7);
  EXPECT_THROW(calls.run([]() -> int { throw std::runtime_error("no"); }, hours(1)),
               std::runtime_error);
  EXPECT_EQ(calls.run([] { return 8; }, hours(1)), 8) << "an error is no reason to stop";
}

TEST(BoundedCalls, RunInTurnOnOneOtherThread) {
  BoundedCalls calls;
  const auto first = calls.run([] { return std::this_thread::get_id(); }, hours(1));
  EXPECT_NE(first, std::this_thread::get_id());
  EXPECT_EQ(calls.run([] { return std::this_thread::get_id(); }, hours(1)), first);
}

TEST(BoundedCalls, OneThatHangsIsLeftBehindAndNoneFollowsIt) {
  std::promise<void> never_answered;
  const auto answer = std::make_shared<std::shared_future<void>>(never_answered.get_future());
  {
    BoundedCalls calls;
    const auto hang = [answer] {
      answer->wait();
      return 1;
    };
    EXPECT_FALSE(calls.run(hang, milliseconds(1)).has_value());
    EXPECT_FALSE(calls.run([] { return 2; }, hours(1)).has_value());
  }  // nobody waits for it
  never_answered.set_value();
}

TEST(BoundedCalls, OneThatIsInVainIsLeftBehind) {
  std::promise<void> never_answered;
  const auto answer = std::make_shared<std::shared_future<void>>(never_answered.get_future());
  int looks = 0;
  const auto in_vain = [&looks] { return ++looks == 3; };
  const auto hang = [answer] {
    answer->wait();
    return 1;
  };
  EXPECT_FALSE(BoundedCalls().run(hang, hours(1), in_vain).has_value());
  EXPECT_EQ(looks, 3);
  EXPECT_EQ(BoundedCalls().run([] { return 2; }, hours(1), [] { return false; }), 2);
  never_answered.set_value();
}

}  // namespace
}  // namespace tessera::comm::bounded_calls_test
