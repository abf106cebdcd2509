// How often operations are called, by their names, whoever calls them: eager code, a backward, a
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
class CountedCalls {
 public:
  explicit CountedCalls(std::vector<std::string_view> names)
      : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&seen))) {
    names_ = std::move(names);
    count_ = 0;
  }
  ~CountedCalls() { at::removeCallback(handle_); }
  CountedCalls(const CountedCalls&) = delete;
  CountedCalls& operator=(const CountedCalls&) = delete;

  std::int64_t count() const { return count_; }

 private:
  static std::unique_ptr<at::ObserverContext> seen(const at::RecordFunction& function) {
    count_ += std::ranges::count(names_, std::string_view(function.name()));
    return nullptr;
  }

  static inline thread_local std::vector<std::string_view> names_;
  static inline thread_local std::int64_t count_ = 0;
  at::CallbackHandle handle_;
};

}  // namespace tessera::test
