#include "dry/allocator.h"

#include <c10/core/Allocator.h>
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "dry/memory_count.h"
#include "tessera/error.h"

namespace tessera::dry {
namespace {

thread_local bool t_fake = false;

/// The range of addresses, and which of them are taken.
class Addresses {
 public:
  Addresses() {
    for (std::size_t size = kMost; size >= kLeast && first_ == nullptr; size /= 2) {
      void* const found =
          mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (found == MAP_FAILED) continue;
      first_ = static_cast<std::byte*>(found);
      size_ = size;
    }
    TESSERA_CHECK(first_ != nullptr, ErrorKind::kConfig, "dry run: found no free range of ", kLeast,
                  " addresses, expected one; raise the limit of virtual memory (ulimit -v)");
  }

  void* take(std::size_t bytes) {
    const std::size_t rounded =
        std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    const base::Lock lock(mutex_);
    std::byte* found = nullptr;
    if (auto& free = free_[rounded]; !free.empty()) {
      found = free.back();
      free.pop_back();
    } else {
      TESSERA_CHECK(rounded <= size_ - used_, ErrorKind::kConfig, "dry run: found ", size_,
                    " addresses, expected more; raise the limit of virtual memory (ulimit -v)");
      found = first_ + used_;
      used_ += rounded;
    }
    taken_[found] = rounded;
    return found;
  }

  void give_back(void* data) {
    const base::Lock lock(mutex_);
    const auto found = taken_.find(static_cast<std::byte*>(data));
    free_[found->second].push_back(found->first);
    taken_.erase(found);
  }

  bool has(const void* data) const {
    const auto* byte = static_cast<const std::byte*>(data);
    return byte >= first_ && byte < first_ + size_;
  }

 private:
  static constexpr std::size_t kMost = std::size_t{1} << 45, kLeast = std::size_t{1} << 36;
  static constexpr std::size_t kAlignment = 64;

  std::byte* first_ = nullptr;
  std::size_t size_ = 0;
  base::Mutex mutex_;
  std::size_t used_ TESSERA_GUARDED_BY(mutex_) = 0;
  std::map<std::size_t, std::vector<std::byte*>> free_ TESSERA_GUARDED_BY(mutex_);
  std::unordered_map<std::byte*, std::size_t> taken_ TESSERA_GUARDED_BY(mutex_);
};

/// Outlives every tensor.
Addresses& addresses() {
  static auto* const all = new Addresses();
  return *all;
}

class Allocator final : public c10::Allocator {
 public:
  explicit Allocator(c10::Allocator& real) : real_(real) { s_real = &real; }

  c10::DataPtr allocate(std::size_t size) override {
    void* const data = t_fake && size > 0 ? addresses().take(size) : real_.raw_allocate(size);
    note_taken(data, size);
    return {data, data, &give_back, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    real_.copy_data(to, from, size);
  }

 private:
  static void give_back(void* data) {
    if (data == nullptr) return;
    note_given_back(data);
    if (addresses().has(data)) return addresses().give_back(data);
    s_real->raw_deallocate(data);
  }

  static inline c10::Allocator* s_real = nullptr;
  c10::Allocator& real_;
};

}  // namespace

bool is_fake(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && tensor.is_cpu() &&
         addresses().has(tensor.storage().unsafeGetStorageImpl()->data_ptr().get());
}

FakeMemoryScope::FakeMemoryScope(bool is_fake) : outer_(std::exchange(t_fake, t_fake || is_fake)) {}
FakeMemoryScope::~FakeMemoryScope() { t_fake = outer_; }

void install_allocator() {
  static const bool installed = [] {
    static Allocator allocator(*c10::GetAllocator(c10::kCPU));
    c10::SetAllocator(c10::kCPU, &allocator, /*priority=*/50);
    return true;
  }();
  static_cast<void>(installed);
}

}  // namespace tessera::dry
