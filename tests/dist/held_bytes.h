// How much memory tensors hold: what libtorch's allocator reports of one thread.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <memory>

namespace tessera::test {

/// While alive counts the bytes that this thread's tensors take, less those that they free. On CPUs
/// backward runs on the thread that calls it.
class HeldBytes {
 public:
  HeldBytes() : guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}
  std::int64_t bytes() const { return counter_->bytes; }
  /// At any moment so far.
  std::int64_t most() const { return counter_->most; }
  /// From here on; what was taken before this was made is not known, and missed when it goes.
  std::int64_t restart() { return counter_->most = counter_->bytes; }

 private:
  struct Counter : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void*, std::int64_t size, std::size_t, std::size_t,
                           c10::Device) override {
      bytes += size;
      most = std::max(most, bytes);
    }
    bool memoryProfilingEnabled() const override { return true; }
    std::int64_t bytes = 0;
    std::int64_t most = 0;
  };
  std::shared_ptr<Counter> counter_ = std::make_shared<Counter>();
  c10::DebugInfoGuard guard_;
};

}  // namespace tessera::test
