#include "sim/memory.h"

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <execinfo.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "sim/guard.h"
#include "sim/pinned.h"
#include "sim/sim.h"
#include "sim/simulator.h"

namespace tessera::sim {
namespace {

constexpr std::size_t kArena = std::size_t{1} << 34;
constexpr std::size_t kRounding = 512;  // as the caching allocators: vector kernels rely on it

char* as_seen_by_tensors = nullptr;
char* as_seen_by_kernels = nullptr;

bool is_device_memory(const void* pointer) {
  const auto* at = static_cast<const char*>(pointer);
  return as_seen_by_tensors != nullptr && at >= as_seen_by_tensors &&
         at < as_seen_by_tensors + kArena;
}

struct Block {
  char* data = nullptr;
  std::size_t size = 0;
  std::size_t asked = 0;             ///< of it, where a smaller one has taken it
  c10::Stream stream;                ///< whose launches use it in order
  std::vector<c10::Stream> used_by;  ///< others, by record_stream
  std::vector<Until> busy_until;     ///< a taker's thread has to have waited for these
};

struct OfDevice {
  std::size_t live = 0, peak = 0, capacity = kArena;
  std::size_t reserved = 0, reserved_peak = 0;  ///< free blocks of streams included
};

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::DeviceIndex index = current_device();
    if (bytes == 0) return {nullptr, nullptr, &drop, device(index)};
    const std::size_t size = (bytes + kRounding - 1) / kRounding * kRounding;
    const c10::Stream stream = current_stream(index);
    const std::lock_guard lock(mutex_);
    OfDevice& here = devices_.at(static_cast<std::size_t>(index));
    TORCH_CHECK_WITH(OutOfMemoryError, here.live + size <= here.capacity,
                     "sim: out of memory. Tried to allocate ", bytes, " bytes. Expected on ",
                     device(index), " at most the ", here.capacity - here.live,
                     " that are free of its ", here.capacity);
    Block* block = take(stream, size);
    if (block == nullptr) block = make(stream, size);
    block->asked = size;
    here.live += size;
    here.peak = std::max(here.peak, here.live);
    here.reserved_peak = std::max(here.reserved_peak, here.reserved);
    // No access: a launch that fills memory is one of its own.
    std::memset(for_kernels(block->data), 0xff, block->size);
    return {block->data, block, &drop, device(index)};
  }

  bool initialized() override { return true; }
  // As cudaFree: the host waits for the device, and then any stream may have the memory.
  void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override {
    for (int index = 0; index < device_count(); ++index) {
      wait_on_host(static_cast<c10::DeviceIndex>(index), "empty cache");
    }
    const std::lock_guard lock(mutex_);
    for (auto& [stream, free] : free_) {
      for (auto& [size, blocks] : free) {
        for (Block* block : blocks) {
          block->busy_until.push_back(until_now(block->stream));
          devices_.at(static_cast<std::size_t>(stream.device_index())).reserved -= block->size;
          freed_[stream.device_index()][size].push_back(block);
          give_pages_back(*block);
        }
      }
    }
    free_.clear();
  }
  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    // Memory that is not this allocator's, and empty tensors, are passed over as on a GPU.
    if (ptr.get_deleter() != &drop || ptr.get_context() == nullptr) return;
    const std::lock_guard lock(mutex_);
    auto* block = static_cast<Block*>(ptr.get_context());
    if (stream != block->stream) block->used_by.push_back(stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const std::lock_guard lock(mutex_);
    const OfDevice& here = devices_.at(static_cast<std::size_t>(index));
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes}) {
      (*bytes)[0].current = static_cast<std::int64_t>(here.live);
      (*bytes)[0].peak = static_cast<std::int64_t>(here.peak);
    }
    stats.reserved_bytes[0].current = static_cast<std::int64_t>(here.reserved);
    stats.reserved_bytes[0].peak = static_cast<std::int64_t>(here.reserved_peak);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*index*/) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    const std::lock_guard lock(mutex_);
    OfDevice& here = devices_.at(static_cast<std::size_t>(index));
    here.peak = here.live;
    here.reserved_peak = here.reserved;
  }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex index) override {
    const std::lock_guard lock(mutex_);
    const OfDevice& here = devices_.at(static_cast<std::size_t>(index));
    return {here.capacity - here.live, here.capacity};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(for_kernels(to), for_kernels(from), bytes);
  }

  std::size_t set_capacity(int index, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    return std::exchange(devices_.at(static_cast<std::size_t>(index)).capacity, bytes);
  }
  /// The block that an address lies in. Takes no memory and does not wait: of a signal's handler.
  const Block* find(const void* address) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return nullptr;
    auto it = blocks_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    return it == blocks_.begin() ? nullptr : std::prev(it)->second;
  }

 private:
  using BySize = std::map<std::size_t, std::vector<Block*>>;

  static void drop(void* context);

  /// The smallest free block that fits, at most twice as large, of these the one freed last.
  Block* take(const c10::Stream& stream, std::size_t size) {
    if (Block* block = take_from(free_of(stream), size)) return block;
    Block* block = take_from(freed_[stream.device_index()], size);
    if (block == nullptr) return nullptr;
    block->stream = stream;
    devices_.at(static_cast<std::size_t>(stream.device_index())).reserved += block->size;
    return block;
  }
  static Block* take_from(BySize& free, std::size_t size) {
    for (auto it = free.lower_bound(size); it != free.end() && it->first <= 2 * size; ++it) {
      if (Block* block = take_from(it->second)) return block;
    }
    return nullptr;
  }
  static Block* take_from(std::vector<Block*>& blocks) {
    for (auto it = blocks.rbegin(); it != blocks.rend(); ++it) {
      Block* block = *it;
      if (!std::all_of(block->busy_until.begin(), block->busy_until.end(), waited_for)) continue;
      block->busy_until.clear();
      blocks.erase(std::next(it).base());
      return block;
    }
    return nullptr;
  }
  Block* make(const c10::Stream& stream, std::size_t size) {
    TORCH_CHECK_WITH(OutOfMemoryError, used_ + size <= kArena, "sim: out of memory on the host");
    auto* block = new Block{as_seen_by_tensors + used_, size, size, stream, {}, {}};
    used_ += size;
    devices_.at(static_cast<std::size_t>(stream.device_index())).reserved += size;
    blocks_[block->data] = block;
    return block;
  }
  BySize& free_of(const c10::Stream& stream) {
    for (auto& [of, free] : free_) {
      if (of == stream) return free;
    }
    return free_.emplace_back(stream, BySize{}).second;
  }
  /// Large blocks cost the host nothing until they are taken again.
  static void give_pages_back(const Block& block) {
    constexpr std::size_t kPage = 4096, kLarge = std::size_t{1} << 18;
    if (block.size < kLarge) return;
    const auto begin =
        (reinterpret_cast<std::uintptr_t>(for_kernels(block.data)) + kPage - 1) / kPage * kPage;
    const auto end =
        (reinterpret_cast<std::uintptr_t>(for_kernels(block.data)) + block.size) / kPage * kPage;
    ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_REMOVE);
  }

  std::mutex mutex_;  // taken before the simulator's
  std::size_t used_ = 0;
  std::array<OfDevice, kMostDevices> devices_;
  std::map<char*, Block*> blocks_;
  std::vector<std::pair<c10::Stream, BySize>> free_;
  std::map<c10::DeviceIndex, BySize> freed_;  // no stream's
};

DeviceMemory& memory_of_devices() {
  static auto* const memory = new DeviceMemory;  // tensors may outlive static objects
  return *memory;
}

void DeviceMemory::drop(void* context) {
  if (context == nullptr) return;
  auto* block = static_cast<Block*>(context);
  DeviceMemory& self = memory_of_devices();
  const std::lock_guard lock(self.mutex_);
  self.devices_.at(static_cast<std::size_t>(block->stream.device_index())).live -= block->asked;
  for (const c10::Stream& stream : block->used_by) block->busy_until.push_back(until_now(stream));
  block->used_by.clear();
  free_bytes(block->data, block->size);
  self.free_of(block->stream)[block->size].push_back(block);
}

void say(const char* text) {
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text, std::strlen(text));
}

void say(std::size_t number) {
  std::array<char, 24> digits{};
  std::size_t at = digits.size() - 1;
  do {
    digits[--at] = static_cast<char>('0' + number % 10);
    number /= 10;
  } while (number != 0);
  say(&digits[at]);
}

/// Says whose memory the host accessed and where from, with nothing that takes memory or a lock.
void on_fault(int signal, siginfo_t* info, void* /*context*/) {
  const void* address = info->si_addr;
  if (is_device_memory(address)) {
    say("sim: the host accesses device memory");
    if (const Block* block = memory_of_devices().find(address)) {
      say(": a block of ");
      say(block->size);
      say(" bytes of sim:");
      say(static_cast<std::size_t>(block->stream.device_index()));
    }
    if (const char* operation = last_writer(address)) {
      say(", last written by ");
      say(operation);
    }
    say("; copy it to the host first\n");
  } else if (is_pinned(address)) {
    say("sim: the host accesses pinned memory before a copy from the device has arrived there; "
        "wait "
        "for an event behind the copy first\n");
  } else {
    std::signal(signal, SIG_DFL);  // happens again, without us
    return;
  }
  std::array<void*, 64> frames{};
  const int count = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  ::backtrace_symbols_fd(frames.data(), count, STDERR_FILENO);
  ::_exit(134);
}

}  // namespace

void map_memory() {
  const int file = ::memfd_create("sim", 0);
  TORCH_CHECK(file >= 0 && ::ftruncate(file, static_cast<off_t>(kArena)) == 0,
              "sim: no file in memory");
  const auto map = [&](int access) {
    void* at = ::mmap(nullptr, kArena, access, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(at != MAP_FAILED, "sim: no address space for device memory");
    return static_cast<char*>(at);
  };
  as_seen_by_tensors = map(PROT_NONE);
  as_seen_by_kernels = map(PROT_READ | PROT_WRITE);
  ::close(file);
  pinned_memory();
  std::array<void*, 4> frames{};
  ::backtrace(frames.data(), static_cast<int>(frames.size()));  // its first call takes memory
  struct sigaction action = {};
  action.sa_sigaction = &on_fault;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGSEGV, &action, nullptr);
}

c10::DeviceAllocator& device_memory() { return memory_of_devices(); }

void* for_kernels(const void* pointer) {
  TORCH_CHECK(is_device_memory(pointer),
              "sim: found a tensor of a device whose memory is not the "
              "device's, expected memory that its allocator made");
  return as_seen_by_kernels + (static_cast<const char*>(pointer) - as_seen_by_tensors);
}

// Functions for tests (sim.h).

CapacityScope::CapacityScope(int device, std::size_t bytes)
    : device_(device), before_(memory_of_devices().set_capacity(device, bytes)) {}
CapacityScope::~CapacityScope() { memory_of_devices().set_capacity(device_, before_); }

std::int64_t live_bytes(int device) {
  return device_memory()
      .getDeviceStats(static_cast<c10::DeviceIndex>(device))
      .allocated_bytes[0]
      .current;
}
std::int64_t peak_bytes(int device) {
  return device_memory()
      .getDeviceStats(static_cast<c10::DeviceIndex>(device))
      .allocated_bytes[0]
      .peak;
}

}  // namespace tessera::sim
