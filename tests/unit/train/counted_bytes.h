// Counts the memory that a rank, which is a thread, has of libtorch at any time.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace tessera::train {

/// What one rank's thread has taken of libtorch's memory and nobody has given back: libtorch's own
/// reports lose what another thread frees. `at_each` is called wherever it takes some.
struct TakenBytes {
  std::atomic<std::int64_t> bytes{0};
  std::function<void()> at_each;
  bool skips_next = false;  ///< it is the transport's
};
inline thread_local std::shared_ptr<TakenBytes> t_taken;

class CountingAllocator final : public c10::Allocator {
 public:
  /// Once, for all tests of the process.
  static void install() {
    if (s_inner != nullptr) return;
    s_inner = c10::GetAllocator(c10::kCPU);
    static CountingAllocator allocator;
    c10::SetAllocator(c10::kCPU, &allocator, /*priority=*/100);
  }
  c10::DataPtr allocate(std::size_t size) override {
    void* const data = s_inner->raw_allocate(size);
    if (t_taken && t_taken->skips_next) {
      t_taken->skips_next = false;
    } else if (t_taken && data != nullptr) {
      const auto bytes = static_cast<std::int64_t>(size);
      {
        const std::lock_guard lock(s_mutex);
        blocks()[data] = {bytes, t_taken};
      }
      t_taken->bytes += bytes;
      if (t_taken->at_each) t_taken->at_each();
    }
    return {data, data, &free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    s_inner->copy_data(to, from, size);
  }

 private:
  struct Block {
    std::int64_t bytes = 0;
    std::shared_ptr<TakenBytes> owner;
  };
  static void free(void* data) {
    if (data == nullptr) return;
    {
      const std::lock_guard lock(s_mutex);
      if (const auto found = blocks().find(data); found != blocks().end()) {
        found->second.owner->bytes -= found->second.bytes;
        blocks().erase(found);
      }
    }
    s_inner->raw_deallocate(data);
  }
  /// Outlives every tensor.
  static std::unordered_map<void*, Block>& blocks() {
    static auto* const all = new std::unordered_map<void*, Block>();
    return *all;
  }
  static inline c10::Allocator* s_inner = nullptr;
  static inline std::mutex s_mutex;
};

/// While alive counts what this thread takes.
class CountedBytes {
 public:
  CountedBytes() { t_taken = std::make_shared<TakenBytes>(); }
  ~CountedBytes() { t_taken.reset(); }
  CountedBytes(const CountedBytes&) = delete;
  CountedBytes& operator=(const CountedBytes&) = delete;
  std::int64_t now() const { return t_taken->bytes; }
  void watch(std::function<void()> at_each) { t_taken->at_each = std::move(at_each); }
  /// Of this thread's next allocation nothing is counted.
  static void skip_next() {
    if (t_taken) t_taken->skips_next = true;
  }
};

}  // namespace tessera::train
