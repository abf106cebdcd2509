#include "capture/replay/blocks.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <utility>

#include "base/test_hooks.h"

namespace tessera::capture {
namespace {

template <class List>
auto& of_kind(List& list, BlockKind kind) {
  return list[static_cast<std::size_t>(kind)];
}

}  // namespace

void Blocks::Unmap::operator()(char* memory) const { ::munmap(memory, bytes); }

void Blocks::decommit(BlockKind kind) {
  for (auto& block : of_kind(free_, kind)) {
    auto& of = block.get_deleter();
    if (!of.is_decommitted)
      of.is_decommitted = ::madvise(block.get(), of.bytes, MADV_DONTNEED) == 0;
  }
}

std::int64_t Blocks::decommitted_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& of_one_kind : free_) {
    for (const auto& block : of_one_kind) {
      const auto& of = block.get_deleter();
      if (of.is_decommitted) bytes += static_cast<std::int64_t>(of.bytes);
    }
  }
  return bytes;
}

RegionBlocks Blocks::take_most() {
  RegionBlocks found{.most = std::exchange(most_, bytes_), .units = {}};
  for (auto& [unit, of] : units_) {
    const auto entries = of_kind(of.bytes, BlockKind::kEntry);
    const auto running = entries + of_kind(of.bytes, BlockKind::kScratch);
    found.units.emplace(unit, std::exchange(of.most, {entries, running}));
  }
  return found;
}

/// Takes the smallest free block that is large enough, of equals the last one returned. Where there
/// is none, frees one that is too small.
Blocks::Mapped Blocks::take(BlockKind kind, std::size_t bytes) {
  auto& free = of_kind(free_, kind);
  const auto bytes_of = [](const Mapped& block) { return block.get_deleter().bytes; };
  auto found = free.end();
  for (auto one = free.begin(); one != free.end(); ++one) {
    const bool fits = bytes_of(*one) >= bytes;
    if (fits && (found == free.end() || bytes_of(*one) <= bytes_of(*found))) found = one;
  }
  if (found != free.end()) {
    Mapped block = std::move(*found);
    free.erase(found);
    block.get_deleter().is_decommitted = false;
    return block;
  }
  if (const auto small = std::ranges::max_element(free, {}, bytes_of); small != free.end()) {
    bytes_ -= static_cast<std::int64_t>(bytes_of(*small));
    free.erase(small);
  }
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  bytes_ += static_cast<std::int64_t>(bytes);
  most_ = std::max(most_, bytes_);
  return Mapped(static_cast<char*>(memory), Unmap{bytes});
}

void Blocks::count(const std::string& unit, BlockKind kind, std::int64_t bytes) {
  auto& of = units_[unit];
  of_kind(of.bytes, kind) += bytes;
  const auto entries = of_kind(of.bytes, BlockKind::kEntry);
  of.most.entries = std::max(of.most.entries, entries);
  of.most.running = std::max(of.most.running, entries + of_kind(of.bytes, BlockKind::kScratch));
}

Block::Block(std::shared_ptr<Blocks> blocks, const std::string& unit, BlockKind kind,
             std::int64_t bytes)
    : blocks_(std::move(blocks)), unit_(unit), kind_(kind), bytes_(bytes) {
  if (bytes_ > 0) memory_ = blocks_->take(kind_, static_cast<std::size_t>(bytes_));
  blocks_->count(unit_, kind_, bytes_);
  if (const auto hook = test_hooks::took_block.get()) (*hook)(unit_, memory_.get());
}

Block::~Block() {
  if (memory_ != nullptr) of_kind(blocks_->free_, kind_).push_back(std::move(memory_));
  blocks_->count(unit_, kind_, -bytes_);
}

}  // namespace tessera::capture
