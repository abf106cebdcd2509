// Counts the memory that tensors of a thread hold, as libtorch takes it and frees it.
//
// A block counts for the thread that took it, also where another one frees it: libtorch's own
// reports lose such a block. A rank is a thread, in tests and in dry runs. Next: allocator.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace tessera::dry {

/// While alive, counts the bytes that this thread takes. One inside another counts alone. Needs
/// install_allocator().
class MemoryCount {
 public:
  MemoryCount();
  ~MemoryCount();
  MemoryCount(const MemoryCount&) = delete;
  MemoryCount& operator=(const MemoryCount&) = delete;

  std::int64_t now() const;
  /// Returns the most bytes since begin_peak(), or since its construction.
  std::int64_t peak() const;
  void begin_peak();
  /// Sets a function that is called whenever this thread has taken memory; empty: none.
  void watch(std::function<void()> at_each);

  struct State;

 private:
  std::shared_ptr<State> state_, outer_;
};

/// Which blocks of a thread are counted, and how: all, to the byte, by default. On a device a block
/// takes whole pieces of 512 bytes, as in libtorch's allocator for CUDA.
enum class Counts : std::uint8_t { kBytes, kNothing, kDevice };

/// While alive, blocks that this thread takes are counted in this way.
class CountScope {
 public:
  explicit CountScope(Counts counts);
  ~CountScope();
  CountScope(const CountScope&) = delete;
  CountScope& operator=(const CountScope&) = delete;

 private:
  Counts outer_;
};

/// Called by the allocator for a block that this thread takes, and for one that any thread frees.
void note_taken(void* data, std::size_t bytes);
void note_freed(void* data);

}  // namespace tessera::dry
