// Watcher: sees the operations of a thread, below autograd and above every backend.
//
// libtorch has a dispatch key for modes in C++; this library registers one boxed fallback on it,
// which hands each operation to the watcher of the thread. A recording watches what a region
// computes (capture/replay/tape.h); a dry run computes sizes instead of values
// (dry/fake_operations.h). Next: operations.h.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <optional>

namespace tessera::kernels {

/// libtorch has a mode for it, which 2.11 to 2.15 do not register in C++.
inline constexpr auto kWatchKey = c10::DispatchKey::Fake;

/// Whether functions of kernels.h are seen as operations, or as the operations of which they are
/// made.
enum class SeesKernels : std::uint8_t { kNo, kYes };

class Watcher {
 public:
  explicit Watcher(SeesKernels kernels) : sees_kernels_(kernels == SeesKernels::kYes) {}
  virtual ~Watcher() = default;
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  /// Runs the operation on its stack, with the keys `below` or in another way. Operations that it
  /// calls while kWatchKey is not excluded are watched as well.
  virtual void run(const c10::OperatorHandle& operation, c10::DispatchKeySet below,
                   c10::Stack* stack) = 0;
  bool sees_kernels() const { return sees_kernels_; }

 private:
  const bool sees_kernels_;
};

/// While alive, `watcher` sees the operations of this thread, and the watcher before it does not.
class WatchScope {
 public:
  explicit WatchScope(Watcher& watcher);
  ~WatchScope();
  WatchScope(const WatchScope&) = delete;
  WatchScope& operator=(const WatchScope&) = delete;

 private:
  Watcher* outer_;
  c10::impl::IncludeDispatchKeyGuard watched_;
};

/// Returns the calling thread's watcher; null where it has none.
Watcher* watcher_of_this_thread();

}  // namespace tessera::kernels
