// How often operations are called, by their names, from any caller: eager code, a backward, a
// replay.
#pragma once

#include <ATen/record_function.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

namespace tessera::test {

/// Counts on the thread that makes it, while it lives; one at a time. "aten::mm" is mm_out, too.
/// `when`: which calls are counted apart.
class CountedCalls {
 public:
  explicit CountedCalls(std::vector<std::string_view> names, bool (*when)() = nullptr)
      : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&seen))) {
    names_ = std::move(names);
    count_ = count_when_ = 0;
    when_ = when;
  }
  ~CountedCalls() { at::removeCallback(handle_); }
  CountedCalls(const CountedCalls&) = delete;
  CountedCalls& operator=(const CountedCalls&) = delete;

  std::int64_t count() const { return count_; }
  std::int64_t count_when() const { return count_when_; }

 private:
  static std::unique_ptr<at::ObserverContext> seen(const at::RecordFunction& function) {
    const auto counted = std::ranges::count(names_, std::string_view(function.name()));
    count_ += counted;
    if (when_ != nullptr && when_()) count_when_ += counted;
    return nullptr;
  }

  static inline thread_local std::vector<std::string_view> names_;
  static inline thread_local std::int64_t count_ = 0, count_when_ = 0;
  static inline thread_local bool (*when_)() = nullptr;
  at::CallbackHandle handle_;
};

}  // namespace tessera::test
