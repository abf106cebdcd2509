// Mutex, Lock, Condition: those of the standard library with clang's thread-safety attributes.
//
// libstdc++'s have none, so that clang cannot tell whether a member is accessed without its mutex.
// With these it can, at no cost at run time: members say TESSERA_GUARDED_BY(mutex_), a function
// that expects the caller to hold it TESSERA_REQUIRES(mutex_), and scripts/lint runs clang's check.
// For other compilers the attributes are empty. Pure.
#pragma once

#include <condition_variable>
#include <mutex>
#include <utility>

#if defined(__clang__)
#define TESSERA_THREAD_SAFETY(attribute) __attribute__((attribute))
#else
#define TESSERA_THREAD_SAFETY(attribute)
#endif

#define TESSERA_GUARDED_BY(mutex) TESSERA_THREAD_SAFETY(guarded_by(mutex))
#define TESSERA_REQUIRES(mutex) TESSERA_THREAD_SAFETY(requires_capability(mutex))

namespace tessera::base {

class TESSERA_THREAD_SAFETY(capability("mutex")) Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

 private:
  friend class Lock;
  std::mutex mutex_;
};

/// Holds a mutex while it lives, except between unlock() and lock().
class TESSERA_THREAD_SAFETY(scoped_lockable) Lock {
 public:
  explicit Lock(Mutex& mutex) TESSERA_THREAD_SAFETY(acquire_capability(mutex))
      : held_(mutex.mutex_) {}
  ~Lock() TESSERA_THREAD_SAFETY(release_capability()) {}
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  void unlock() TESSERA_THREAD_SAFETY(release_capability()) { held_.unlock(); }
  void lock() TESSERA_THREAD_SAFETY(acquire_capability()) { held_.lock(); }

 private:
  friend class Condition;
  std::unique_lock<std::mutex> held_;
};

/// A condition for threads that hold a Lock. `ready` runs while it is held, which clang must be
/// told: condition.wait(lock, [&]() TESSERA_REQUIRES(mutex_) { return ready_; }).
class Condition {
 public:
  template <class Ready>
  void wait(Lock& lock, Ready ready) {
    condition_.wait(lock.held_, std::move(ready));
  }
  /// Returns whether it was ready in time.
  template <class Time, class Ready>
  bool wait_for(Lock& lock, const Time& time, Ready ready) {
    return condition_.wait_for(lock.held_, time, std::move(ready));
  }
  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace tessera::base
