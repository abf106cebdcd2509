#include "base/interrupt.h"

#include <atomic>
#include <memory>
#include <utility>

#include "base/mutex.h"

namespace tessera {
namespace {

/// The one that is set; the process's own, as its signal handlers are.
struct Check {
  std::atomic<bool> is_set{false};
  base::Mutex mutex;
  std::shared_ptr<const std::function<void()>> check TESSERA_GUARDED_BY(mutex);
};

Check& the_check() {
  static Check& check = *new Check;  // destructors at exit may still wait
  return check;
}

}  // namespace

void set_interrupt_check(std::function<void()> check) {
  Check& the = the_check();
  const bool is_set = static_cast<bool>(check);
  auto now = is_set ? std::make_shared<const std::function<void()>>(std::move(check)) : nullptr;
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
  if (check) (*check)();
}

}  // namespace base
}  // namespace tessera
