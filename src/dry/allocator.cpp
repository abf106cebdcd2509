#include "dry/allocator.h"

#include <c10/core/Allocator.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/pass_local.h"
#include "dry/memory_count.h"
#include "tessera/error.h"

namespace tessera::dry {
namespace {

using FakeHere = base::PassLocal<base::PassValue::kFakeMemory, bool>;

/// The addresses in use, in a range that no process has: it begins at 2^54, and the kernel maps
/// nothing beyond 2^47 unless it is asked to.
class Addresses {
 public:
  void* take(std::size_t bytes) {
    const std::size_t rounded =
        std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    const base::Lock lock(mutex_);
    std::byte* found = nullptr;
    if (auto& free = free_[rounded]; !free.empty()) {
      found = free.back();
      free.pop_back();
    } else {
      TESSERA_CHECK(rounded <= kSize - used_, ErrorKind::kConfig, "dry run: found tensors of ",
                    used_, " bytes and one of ", bytes, ", expected at most ", kSize, " in all");
      found = first() + used_;
      used_ += rounded;
    }
    taken_[found] = rounded;
    return found;
  }

  void recycle(void* data) {
    const base::Lock lock(mutex_);
    const auto found = taken_.find(static_cast<std::byte*>(data));
    free_[found->second].push_back(found->first);
    taken_.erase(found);
  }

  static bool has(const void* data) {
    const auto* byte = static_cast<const std::byte*>(data);
    return byte >= first() && byte < first() + kSize;
  }

 private:
  static constexpr std::size_t kSize = std::size_t{1} << 54;
  static constexpr std::size_t kAlignment = 64;
  static std::byte* first() {
    return reinterpret_cast<std::byte*>(std::uintptr_t{1} << 54);  // NOLINT: never read
  }

  base::Mutex mutex_;
  std::size_t used_ TESSERA_GUARDED_BY(mutex_) = 0;
  std::map<std::size_t, std::vector<std::byte*>> free_ TESSERA_GUARDED_BY(mutex_);
  std::unordered_map<std::byte*, std::size_t> taken_ TESSERA_GUARDED_BY(mutex_);
};

/// Returns the only object, which outlives every tensor.
Addresses& addresses() {
  static auto* const all = new Addresses();
  return *all;
}

class Allocator final : public c10::Allocator {
 public:
  explicit Allocator(c10::Allocator& real) : real_(real) { s_real = &real; }

  c10::DataPtr allocate(std::size_t size) override {
    void* const data =
        FakeHere::here() && size > 0 ? addresses().take(size) : real_.raw_allocate(size);
    note_taken(data, size);
    return {data, data, &recycle, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &recycle; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    real_.copy_data(to, from, size);
  }

 private:
  static void recycle(void* data) {
    if (data == nullptr) return;
    note_freed(data);
    if (addresses().has(data)) return addresses().recycle(data);
    s_real->raw_deallocate(data);
  }

  static inline c10::Allocator* s_real = nullptr;
  c10::Allocator& real_;
};

}  // namespace

bool is_fake(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() &&
         addresses().has(tensor.storage().unsafeGetStorageImpl()->data_ptr().get());
}

FakeMemoryScope::FakeMemoryScope(bool is_fake)
    : outer_(std::exchange(FakeHere::here(), FakeHere::here() || is_fake)) {}
FakeMemoryScope::~FakeMemoryScope() { FakeHere::here() = outer_; }

void install_allocator() {
  static const bool installed = [] {
    static Allocator allocator(*c10::GetAllocator(c10::kCPU));
    c10::SetAllocator(c10::kCPU, &allocator, /*priority=*/50);
    return true;
  }();
  static_cast<void>(installed);
}

}  // namespace tessera::dry
