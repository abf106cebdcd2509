// Turns: two passes of a rank on its one thread, in strict alternation.
//
// A forward and a backward of two micro-batches alternate: while one waits for an exchange, the
// other computes. Each has its own call stack, and one of them runs at a time: pass() suspends the
// stack that calls it and resumes the other. So layers are written as usual, nothing is cut, and
// the order of the two follows from counts only, the same on every rank.
//
// A turn exchanges state that libtorch and we keep for a thread, which would leak from one pass
// into the other: at::ThreadLocalState (grad mode, dispatch keys, saved-tensor hooks, autocast's
// dtypes), autocast's cache flag, the warning handler, the current stream of the device and
// base::PassLocal. Autograd's current graph task cannot be exchanged: base::in_backward_pass()
// tells whose it is, and two backwards at once are refused. This is no scheduler: two stacks, one
// thread, one order.
// Next: base/pass_local.h.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

namespace tessera::comm {

/// Threads: it belongs to the thread that makes it, and so do its two stacks.
class Turns {
 public:
  /// The turns that each pass has passed, also those after the other had ended.
  struct Counts {
    std::int64_t first = 0, second = 0;
    friend bool operator==(const Counts&, const Counts&) = default;
  };

  struct Options {
    /// For a trace's row "turns", where each piece has its pass's name and a number: "forward 3 of
    /// stage 0 #2".
    std::string first = "first", second = "second";
    /// Called whenever the other pass is about to resume, also after one has ended: exchanges what
    /// the caller keeps for each pass. Must not throw.
    std::function<void()> at_turn = {};
  };

  /// Ends a pass where the other pass has failed: pass() throws it. It is a std::exception, so that
  /// autograd's engine ends its graph task as with any error.
  class Ended final : public std::exception {
   public:
    const char* what() const noexcept override;
  };

  /// `device`: the one whose current stream each pass has for itself.
  explicit Turns(c10::Device device = c10::kCPU);
  ~Turns();
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;

  /// Runs `first` on the caller's stack and `second` on a stack that is kept (8 MiB, of which only
  /// the accessed pages count). `first` begins; `second` starts with the scopes and modes that the
  /// caller has now. When one has ended the other resumes, and runs to its end without turns.
  /// Errors: the first error that leaves either pass. The other is resumed once, its pass() throws
  /// Ended, and it unwinds; where `second` has not begun it never does. kUsage where both are in a
  /// backward.
  Counts run(const std::function<void()>& first, const std::function<void()>& second,
             const Options& options);
  Counts run(const std::function<void()>& first, const std::function<void()>& second) {
    return run(first, second, Options());
  }

  /// Within run(), resumes the other pass until that one passes; outside of it does nothing.
  /// Errors: Ended; kInternal within a handler, a destructor that an error runs, or base::NoTurns.
  static void pass() {
    ++passed_;
    if (now_ != nullptr) pass_now();
  }
  /// The number of times that this thread has come to pass(), in any pass of the rank.
  static std::int64_t passed() { return passed_; }
  /// Whether this thread is within run().
  static bool under_way() { return now_ != nullptr; }

 private:
  class Stacks;

  static void pass_now();

  static inline constinit thread_local Stacks* now_ = nullptr;
  static inline constinit thread_local std::int64_t passed_ = 0;

  std::unique_ptr<Stacks> stacks_;
};

}  // namespace tessera::comm
