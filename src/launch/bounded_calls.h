// BoundedCalls: runs calls that may never return, and stops waiting for them.
//
// c10d's store waits without a limit for an answer, and Gloo for the store: where the process that
// serves it is stopped, only another thread can notice. Next: store.h.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

namespace tessera::comm {

/// One thread that takes calls in turn. Threads: any.
class BoundedCalls {
 public:
  BoundedCalls();
  /// Abandons a call that has not returned, with all that it holds.
  ~BoundedCalls();
  BoundedCalls(const BoundedCalls&) = delete;
  BoundedCalls& operator=(const BoundedCalls&) = delete;

  /// Returns or throws what `call` does. Returns none if it takes longer than `limit`, an earlier
  /// call hangs, or `in_vain` says that the result is no longer needed; `in_vain` is called every
  /// few milliseconds, and may throw, which abandons the call. `call` must own what it uses: it may
  /// outlive the caller.
  template <class Call, class Result = std::invoke_result_t<Call>>
  std::optional<Result> run(Call call, std::chrono::milliseconds limit,
                            const std::function<bool()>& in_vain = {}) {
    auto task = std::make_shared<std::packaged_task<Result()>>(std::move(call));
    std::future<Result> answer = task->get_future();
    if (!post([task] { (*task)(); })) return std::nullopt;
    const auto deadline = std::chrono::steady_clock::now() + limit;
    const auto next_look = [&] {
      return in_vain ? std::min(deadline, std::chrono::steady_clock::now() + kLook) : deadline;
    };
    while (answer.wait_until(next_look()) != std::future_status::ready) {
      if (std::chrono::steady_clock::now() < deadline && is_needed(in_vain)) continue;
      give_up();
      return std::nullopt;
    }
    return answer.get();
  }

 private:
  struct State;

  static constexpr std::chrono::milliseconds kLook{10};

  bool is_needed(const std::function<bool()>& in_vain) {
    try {
      return !in_vain || !in_vain();
    } catch (...) {
      give_up();
      throw;
    }
  }
  bool post(std::function<void()> job);
  void give_up();

  std::shared_ptr<State> state_;
};

}  // namespace tessera::comm
