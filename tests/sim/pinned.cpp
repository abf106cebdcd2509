#include "sim/pinned.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace tessera::sim {
namespace {

constexpr std::size_t kPinnedArena = std::size_t{1} << 32;
constexpr std::size_t kPage = 4096;

std::size_t in_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

class PinnedMemory final : public c10::Allocator {
 public:
  PinnedMemory() {
    void* arena = ::mmap(nullptr, kPinnedArena, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(arena != MAP_FAILED, "sim: no address space for pinned memory");
    arena_ = static_cast<char*>(arena);
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &drop, c10::Device(c10::kCPU)};
    const std::size_t size = in_pages(bytes);
    const std::lock_guard lock(mutex_);
    char* block = nullptr;
    if (auto& free = free_[size]; !free.empty()) {
      block = free.back();
      free.pop_back();
    } else {
      TORCH_CHECK(used_ + size <= kPinnedArena, "sim: out of pinned memory");
      block = arena_ + used_;
      used_ += size;
    }
    live_[block] = size;
    std::memset(block, 0xff, size);
    return {block, block, &drop, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  bool holds(const void* pointer) const {
    const auto* at = static_cast<const char*>(pointer);
    return at >= arena_ && at < arena_ + kPinnedArena;
  }
  /// Where the block ends that this is in.
  char* end_of_block(const char* at) {
    const std::lock_guard lock(mutex_);
    auto it = live_.upper_bound(const_cast<char*>(at));
    if (it == live_.begin()) return nullptr;
    --it;
    return it->first + it->second;
  }

 private:
  static void drop(void* block);

  std::mutex mutex_;
  char* arena_ = nullptr;
  std::size_t used_ = 0;
  std::map<char*, std::size_t> live_;
  std::map<std::size_t, std::vector<char*>> free_;
};

PinnedMemory& memory() {
  static auto* const memory = new PinnedMemory;  // tensors may outlive static objects
  return *memory;
}

void PinnedMemory::drop(void* block) {
  if (block == nullptr) return;
  PinnedMemory& self = memory();
  const std::lock_guard lock(self.mutex_);
  const auto it = self.live_.find(static_cast<char*>(block));
  self.free_[it->second].push_back(it->first);
  self.live_.erase(it);
}

}  // namespace

c10::Allocator& pinned_memory() { return memory(); }

bool is_pinned(const void* pointer) { return memory().holds(pointer); }

void forbid(const at::Tensor& tensor, bool unreadable) {
  if (tensor.numel() == 0 || !tensor.is_contiguous() || !is_pinned(tensor.const_data_ptr())) return;
  const auto* first = static_cast<const char*>(tensor.const_data_ptr());
  char* const last = const_cast<char*>(first) + tensor.nbytes();
  char* const block_end = memory().end_of_block(first);
  const auto storage_end =
      static_cast<const char*>(tensor.storage().data()) + tensor.storage().nbytes();
  // The memory after a block's last byte has no owner; after a view of a part of it (from_blob)
  // comes the next part.
  const bool whole = tensor.storage().data_ptr().get_deleter() == memory().raw_deleter();
  char* const end = whole && last == storage_end ? block_end : last;
  const auto begin = in_pages(reinterpret_cast<std::uintptr_t>(first));
  const auto stop = reinterpret_cast<std::uintptr_t>(end) / kPage * kPage;
  if (begin >= stop) return;
  const int access = unreadable ? PROT_NONE : PROT_READ | PROT_WRITE;
  TORCH_CHECK(::mprotect(reinterpret_cast<void*>(begin), stop - begin, access) == 0,
              "sim: pages cannot be protected");
}

}  // namespace tessera::sim
