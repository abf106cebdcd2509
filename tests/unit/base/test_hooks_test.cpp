#include "base/test_hooks.h"

#include <thread>

#include "support/test.h"

namespace tessera::test::test_hooks_test {
namespace {

TEST(TestHooks, APlaceIsEmptyBeforeAndAfterItsSet) {
  test_hooks::Hook<int(int)> place;
  EXPECT_EQ(place.get(), nullptr);
  {
    const test_hooks::Set held(place, [](int x) { return 2 * x; });
    ASSERT_NE(place.get(), nullptr);
    EXPECT_EQ((*place.get())(21), 42);
  }
  EXPECT_EQ(place.get(), nullptr);
}

TEST(TestHooks, OtherThreadsComeToAPlaceOfTheProcess) {
  test_hooks::Hook<int()> place;
  const test_hooks::Set held(place, [] { return 7; });
  int found = 0;
  std::thread([&] { found = (*place.get())(); }).join();
  EXPECT_EQ(found, 7);
}

TEST(TestHooks, WhoIsInsideWhenTheSetGoesFinishes) {
  test_hooks::Hook<int()> place;
  std::shared_ptr<const std::function<int()>> inside;
  {
    const test_hooks::Set held(place, [value = std::make_shared<int>(3)] { return *value; });
    inside = place.get();
  }
  EXPECT_EQ((*inside)(), 3);
}

constinit thread_local test_hooks::ThreadHook<int()> of_thread;

TEST(TestHooks, AThreadsPlaceIsItsOwn) {
  const test_hooks::Set held(of_thread, [] { return 1; });
  const bool others = [] {
    bool set = true;
    std::thread([&] { set = of_thread.get() != nullptr; }).join();
    return set;
  }();
  EXPECT_FALSE(others);
  ASSERT_NE(of_thread.get(), nullptr);
  EXPECT_EQ((*of_thread.get())(), 1);
}

}  // namespace
}  // namespace tessera::test::test_hooks_test
