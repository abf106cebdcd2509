// PassLocal: a value that belongs to a call under way, and not to the thread that runs it.
//
// A thread is a rank, so that most thread-local values belong to the rank. A scope of a call (a
// WideScope, the place of a SampleScope) does not: where two passes of a rank take turns on its
// thread (comm/turns.h), each has its own. These values are in one block for each pass, and a turn
// exchanges which block is read. scripts/check_thread_locals.py lists all other thread-locals, with
// the reason why they belong to the rank.
//
// A pass begins with the values of its caller: scopes around both passes hold for both. Pure.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>
#include <utility>

namespace tessera::base {

/// All pass-local values, each with the file that reads it. A new one needs a line here.
enum class PassValue : std::uint8_t {
  kWideScopes,       ///< base/wide_scope.cpp
  kSamplePlace,      ///< base/random.cpp
  kDoing,            ///< base/doing.h
  kUnit,             ///< base/doing.h
  kStage,            ///< base/doing.h
  kMicroBatch,       ///< base/doing.h
  kNoInterrupts,     ///< base/interrupt.h
  kNoTurns,          ///< NoTurns
  kForeignBackward,  ///< base/threads/backward_pass.cpp
  kShapesOnly,       ///< base/threads/shapes_only.cpp
  kKeptErrors,       ///< launch/abort_flag.cpp
  kResults,          ///< kernels/results.cpp
  kWatcher,          ///< kernels/watch.cpp
  kFakeMemory,       ///< dry/allocator.cpp
  kMemoryCounts,     ///< dry/memory_count.cpp
  kRegions,          ///< grad/region.cpp
  kRecording,        ///< grad/region.cpp
  kKeptFirst,        ///< grad/keep.cpp
  kKeptAgain,        ///< grad/keep.cpp
  kTransitionWatch,  ///< parallel/transition.cpp
  kRowLosses,        ///< nn/loss.cpp
  kExpertChoice,     ///< moe/routing.cpp
  kScoreChecks,      ///< moe/routing.cpp
  kFirstForward,     ///< fsdp/recompute.cpp
  kRecomputing,      ///< fsdp/recompute.cpp
  kCallWatch,        ///< fsdp/call.cpp
  kTest,             ///< tests/unit/comm/turns_test.cpp
  kCount
};

/// The values of one pass, all zero at first.
struct PassValues {
  static constexpr std::size_t kEach = 8;  ///< bytes: a pointer or a number
  alignas(kEach) std::array<std::byte, kEach* static_cast<std::size_t>(PassValue::kCount)> bytes{};
};

/// The largest number of passes that take turns on a thread.
inline constexpr std::size_t kPasses = 2;

namespace detail {
inline constinit thread_local PassValues values_of_thread{};
/// The values of the second pass while it runs; null: those of the thread are read.
inline constinit thread_local PassValues* values_of_second = nullptr;
}  // namespace detail

/// Returns 0, or 1 on the stack of the second pass while two take turns: for an object of the rank
/// that keeps a stack of open calls for each.
inline std::size_t pass_here() { return detail::values_of_second == nullptr ? 0 : 1; }

/// Returns the values that PassLocal reads.
inline PassValues& pass_values() {
  PassValues* const second = detail::values_of_second;
  return second != nullptr ? *second : detail::values_of_thread;
}

/// Makes this thread read `second`, or its own values where that is null. Returns the block that
/// was set before. For comm/turns.cpp alone.
inline PassValues* exchange_pass_values(PassValues* second) {
  return std::exchange(detail::values_of_second, second);
}

/// A pointer or a number of the pass that this thread runs, initially null or 0.
template <PassValue value, class T>
class PassLocal {
 public:
  // NOLINTNEXTLINE(bugprone-sizeof-expression): T may be a pointer, and the pointer is what is kept
  static_assert(sizeof(T) <= PassValues::kEach && std::is_trivially_copyable_v<T> &&
                std::is_trivially_destructible_v<T>);

  static T& here() {
    constexpr std::size_t kAt = PassValues::kEach * static_cast<std::size_t>(value);
    return *std::launder(reinterpret_cast<T*>(pass_values().bytes.data() + kAt));
  }
};

/// While it lives, this pass does not give the turn to the other one, since what runs meanwhile
/// must not be interrupted, such as a recording. `why` completes "found a turn inside of"; null:
/// changes nothing.
class NoTurns {
 public:
  explicit NoTurns(const char* why) : outer_(Here::here()) {
    if (why != nullptr) Here::here() = why;
  }
  ~NoTurns() { Here::here() = outer_; }
  NoTurns(const NoTurns&) = delete;
  NoTurns& operator=(const NoTurns&) = delete;

  /// Returns the reason of the innermost one; null for none.
  static const char* why() { return Here::here(); }

 private:
  using Here = PassLocal<PassValue::kNoTurns, const char*>;

  const char* outer_;
};

}  // namespace tessera::base
