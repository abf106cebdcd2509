#include "base/interrupt.h"

#include <cxxabi.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <thread>
#include <typeinfo>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace tessera {
namespace {

/// Holds the check. It belongs to the process, as a signal handler does.
struct Check {
  std::atomic<bool> is_set{false};
  base::Mutex mutex;
  std::shared_ptr<const std::function<void()>> check TESSERA_GUARDED_BY(mutex);
};

Check& the_check() {
  static Check& check = *new Check;  // destructors at the program's end may still wait
  return check;
}

/// Identifies an exception that is handled, without keeping it alive.
struct Thrown {
  const void* object = nullptr;
  const std::type_info* type = nullptr;
  bool operator==(const Thrown&) const = default;

  static Thrown now() {
    const std::exception_ptr handled = std::current_exception();
    Thrown thrown;
    static_assert(sizeof handled == sizeof thrown.object);
    // An exception_ptr is one pointer, to the exception, in libstdc++ and in libc++.
    // NOLINTNEXTLINE(bugprone-undefined-memory-manipulation)
    std::memcpy(static_cast<void*>(&thrown.object), static_cast<const void*>(&handled),
                sizeof thrown.object);
    thrown.type = abi::__cxa_current_exception_type();
    return thrown;
  }
};

thread_local Thrown interrupt_of_thread;

}  // namespace

void set_interrupt_check(std::function<void()> check) {
  Check& the = the_check();
  const bool is_set = static_cast<bool>(check);
  std::shared_ptr<const std::function<void()>> now;
  if (is_set) now = std::make_shared<const std::function<void()>>(std::move(check));
  {
    const base::Lock lock(the.mutex);
    the.check.swap(now);
  }
  the.is_set.store(is_set, std::memory_order_release);
}

namespace base {

bool may_ask_interrupt() {
  return the_check().is_set.load(std::memory_order_acquire) && !NoInterrupts::in_this_thread();
}

void ask_interrupt() {
  std::shared_ptr<const std::function<void()>> check;
  {
    const Lock lock(the_check().mutex);
    check = the_check().check;
  }
  if (!check) return;
  try {
    (*check)();
  } catch (...) {
    interrupt_of_thread = Thrown::now();
    throw;
  }
}

bool handles_interrupt() {
  return interrupt_of_thread.object != nullptr && interrupt_of_thread == Thrown::now();
}

/// The thread that wakes waits: made when a wait first registers, and again in a child of fork().
class Waker {
 public:
  static Waker& the() {
    static std::atomic<Waker*> now{nullptr};
    static Mutex making;
    const int process = forks();
    Waker* found = now.load(std::memory_order_acquire);
    if (found != nullptr && found->process_ == process) return *found;
    const Lock lock(making);
    found = now.load(std::memory_order_acquire);
    if (found == nullptr || found->process_ != process) {
      found = new Waker(process);  // lives as long as the process
      now.store(found, std::memory_order_release);
    }
    return *found;
  }

  void add(WakesWait& wait) {
    const Lock lock(mutex_);
    waits_.push_back({&wait, std::chrono::steady_clock::now()});
  }
  /// Removes the wait, which is not woken after that.
  void remove(WakesWait& wait) {
    const Lock lock(mutex_);
    std::erase_if(waits_, [&](const Item& item) { return item.wait == &wait; });
  }

 private:
  struct Item {
    WakesWait* wait;
    std::chrono::steady_clock::time_point since;
  };

  explicit Waker(int process) : process_(process) {
    std::thread([this] { run(); }).detach();
  }

  /// Checks in intervals and is not told that a wait begins: most waits end before it checks.
  void run() {
    for (;;) {
      std::this_thread::sleep_for(kAsksEvery / 2);
      const Lock lock(mutex_);
      const auto now = std::chrono::steady_clock::now();
      for (const Item& item : waits_) {
        if (now - item.since >= kAsksEvery) item.wait->wake();
      }
    }
  }

  const int process_;
  Mutex mutex_;
  std::vector<Item> waits_ TESSERA_GUARDED_BY(mutex_);
};

void WakesWait::begin() {
  if (!may_ask_interrupt()) return;
  Waker::the().add(*this);
  is_registered_ = true;
}

void WakesWait::end() {
  if (is_registered_) Waker::the().remove(*this);
}

int forks() {
  static std::atomic<int> count{0};
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] { ++count; });
  static_cast<void>(registered);
  return count.load(std::memory_order_relaxed);
}

}  // namespace base
}  // namespace tessera
