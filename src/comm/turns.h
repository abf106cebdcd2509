// Turns: two passes of a rank on its one thread, in strict alternation.
//
// A forward and a backward of two micro-batches run side by side: while the one waits for an
// exchange, the other computes. Each has its own call stack, and one of them runs at a time: pass()
// suspends the stack that calls it and resumes the other. So layers are written as ever, nothing is
// cut, and which one runs when follows from counts alone, the same on every rank.
//
// A turn exchanges what libtorch and we keep for a thread and a pass would leak into the other:
// at::ThreadLocalState (grad mode, dispatch keys, saved-tensor hooks, autocast's dtypes), autocast's
// cache flag, the warning handler, the current stream of the device and base::PassLocal. What cannot
// be exchanged is autograd's current graph task: base::in_backward_pass() tells whose it is, and
// two backwards at once are refused. Not a scheduler: two stacks, one thread, one order.
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
  /// Turns that each has passed, also while the other had ended.
  struct Counts {
    std::int64_t first = 0, second = 0;
    friend bool operator==(const Counts&, const Counts&) = default;
  };

  struct Options {
    /// For a trace's row "turns", where each piece has its side's name and number: "forward 3 of stage 0 #2".
    std::string first = "first", second = "second";
    /// Called whenever the other one is about to resume, also since one has ended: exchanges what the
    /// caller keeps for each. Throws nothing.
    std::function<void()> at_turn = {};
  };

  /// Leaves pass() where the other pass has failed. A std::exception, so that autograd's engine ends
  /// its graph task as it does with any error.
  class Ended final : public std::exception {
   public:
    const char* what() const noexcept override;
  };

  /// `device`: the one whose current stream each pass has for itself.
  explicit Turns(c10::Device device = c10::kCPU);
  ~Turns();
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;

  /// Runs `first` on the caller's stack and `second` on one that is kept (8 MiB, of which the
  /// accessed pages count). `first` begins; `second` starts with the scopes and modes that the caller
  /// has now. When one has ended the other resumes, and runs to its end alone.
  /// Errors: the first one that leaves either. The other is resumed once, its pass() throws Ended,
  /// and it unwinds; where `second` has not begun it never does. kUsage where both are in a backward.
  Counts run(const std::function<void()>& first, const std::function<void()>& second,
             const Options& options);
  Counts run(const std::function<void()>& first, const std::function<void()>& second) {
    return run(first, second, Options());
  }

  /// Inside of run() the other resumes until it passes; outside it does nothing. Errors: Ended;
  /// kInternal inside of a handler, a destructor that an error runs, or base::NoTurns.
  static void pass() {
    ++passed_;
    if (now_ != nullptr) pass_now();
  }
  /// How often this thread has come to pass(), in any pass of the rank.
  static std::int64_t passed() { return passed_; }
  /// Whether this thread is inside of run().
  static bool under_way() { return now_ != nullptr; }

 private:
  class Stacks;

  static void pass_now();

  static inline constinit thread_local Stacks* now_ = nullptr;
  static inline constinit thread_local std::int64_t passed_ = 0;

  std::unique_ptr<Stacks> stacks_;
};

}  // namespace tessera::comm
