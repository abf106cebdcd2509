#include "dry/memory_count.h"

#include <algorithm>
#include <atomic>
#include <unordered_map>
#include <utility>

#include "base/mutex.h"
#include "base/pass_local.h"

namespace tessera::dry {

/// Any thread that frees lowers `bytes`; the counting thread alone uses the rest.
struct MemoryCount::State {
  std::atomic<std::int64_t> bytes{0};
  std::int64_t peak = 0;
  std::function<void()> at_each;
};

namespace {

thread_local std::shared_ptr<MemoryCount::State> t_count;
using CountsHere = base::PassLocal<base::PassValue::kMemoryCounts, Counts>;

std::int64_t counted_bytes(std::size_t size) {
  constexpr std::size_t kPiece = 512;
  const bool in_pieces = CountsHere::here() == Counts::kDevice;
  return static_cast<std::int64_t>(in_pieces ? (size + kPiece - 1) / kPiece * kPiece : size);
}

struct Block {
  std::int64_t bytes = 0;
  std::shared_ptr<MemoryCount::State> of;
};

struct Blocks {
  base::Mutex mutex;
  std::unordered_map<void*, Block> all TESSERA_GUARDED_BY(mutex);
};

/// Returns the only object, which outlives every tensor.
Blocks& blocks() {
  static auto* const counted = new Blocks();
  return *counted;
}

/// Whether any thread has counted so far; without, freed memory is not looked up.
std::atomic<bool> s_counts{false};

}  // namespace

MemoryCount::MemoryCount()
    : state_(std::make_shared<State>()), outer_(std::exchange(t_count, state_)) {
  s_counts = true;
}
MemoryCount::~MemoryCount() { t_count = std::move(outer_); }

std::int64_t MemoryCount::now() const { return state_->bytes; }
std::int64_t MemoryCount::peak() const { return state_->peak; }
void MemoryCount::begin_peak() { state_->peak = state_->bytes; }
void MemoryCount::watch(std::function<void()> at_each) { state_->at_each = std::move(at_each); }
CountScope::CountScope(Counts counts) : outer_(std::exchange(CountsHere::here(), counts)) {}
CountScope::~CountScope() { CountsHere::here() = outer_; }

void note_taken(void* data, std::size_t size) {
  if (!t_count || data == nullptr || CountsHere::here() == Counts::kNothing) return;
  const std::int64_t bytes = counted_bytes(size);
  {
    const base::Lock lock(blocks().mutex);
    blocks().all[data] = {bytes, t_count};
  }
  t_count->peak = std::max(t_count->peak, t_count->bytes += bytes);
  if (t_count->at_each) t_count->at_each();
}

void note_freed(void* data) {
  if (!s_counts) return;
  Block block;
  {
    const base::Lock lock(blocks().mutex);
    const auto found = blocks().all.find(data);
    if (found == blocks().all.end()) return;
    block = std::move(found->second);
    blocks().all.erase(found);
  }
  block.of->bytes -= block.bytes;
}

}  // namespace tessera::dry
