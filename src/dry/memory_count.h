// Counts the memory that tensors of a thread hold, as libtorch takes it and gives it back.
//
// A block counts for the thread that took it, also where another one frees it: libtorch's own reports
// lose such a block. A rank is a thread, in tests and in dry runs. Next: allocator.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace tessera::dry {

/// While alive counts what this thread takes, in bytes; one inside another counts alone. Needs
/// install_allocator().
class MemoryCount {
 public:
  MemoryCount();
  ~MemoryCount();
  MemoryCount(const MemoryCount&) = delete;
  MemoryCount& operator=(const MemoryCount&) = delete;

  std::int64_t now() const;
  /// The most since begin_peak(), or since it was made.
  std::int64_t peak() const;
  void begin_peak();
  /// Called wherever this thread has taken some; empty: no more.
  void watch(std::function<void()> at_each);

  struct State;

 private:
  std::shared_ptr<State> state_, outer_;
};

/// Which blocks of a thread are counted: all, to the byte, unless it says otherwise. On a device a block
/// takes whole pieces of 512 bytes, as of libtorch's allocator for CUDA.
enum class Counts : std::uint8_t { kBytes, kNothing, kDevice };

/// While alive, blocks that this thread takes count so.
class CountScope {
 public:
  explicit CountScope(Counts counts);
  ~CountScope();
  CountScope(const CountScope&) = delete;
  CountScope& operator=(const CountScope&) = delete;

 private:
  Counts outer_;
};

/// The allocator says so of a block that this thread takes, and of one that any thread gives back.
void note_taken(void* data, std::size_t bytes);
void note_freed(void* data);

}  // namespace tessera::dry
