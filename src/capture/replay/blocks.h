// Blocks: the memory of one model's regions while their values are needed, and its size.
//
// An entry has its block from a forward to the end of its backward, a scratch block is taken for
// one run. Then a block is free for any other region, so that layers that are recomputed share one,
// and it stays. It is mapped from the system: on the heap it would lie among what eager calls
// allocate and free, and neither would fit any more. Forwards and backwards come in the same order
// in each step, so that each finds the block that it had before. Where much else is allocated while
// blocks are free, they are decommitted: their addresses stay, their pages return to the system.
// Threads: one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "capture/region_blocks.h"

namespace tessera::capture {

enum class BlockKind : std::uint8_t { kEntry, kScratch };

class Blocks {
 public:
  Blocks() = default;
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;

  /// Returns the most that the blocks took since the last call.
  RegionBlocks take_most();
  /// Returns the bytes of all blocks, free ones too.
  std::int64_t bytes() const { return bytes_; }
  /// Returns the pages of free blocks to the system until they are used again.
  void decommit(BlockKind kind);
  /// Returns the bytes of blocks that are decommitted.
  std::int64_t decommitted_bytes() const;

 private:
  friend class Block;
  struct Unmap {
    std::size_t bytes = 0;
    bool is_decommitted = false;
    void operator()(char* memory) const;
  };
  using Mapped = std::unique_ptr<char, Unmap>;
  struct OfUnit {
    std::array<std::int64_t, 2> bytes = {};  // by kind
    UnitBlocks most;
  };

  Mapped take(BlockKind kind, std::size_t bytes);
  void count(const std::string& unit, BlockKind kind, std::int64_t bytes);

  std::array<std::vector<Mapped>, 2> free_;  // by kind, the last one returned at the end
  std::map<std::string, OfUnit> units_;
  std::int64_t bytes_ = 0, most_ = 0;
};

class Block {
 public:
  /// At least `bytes`, for a region in `unit`; the region outlives it. No memory for 0.
  Block(std::shared_ptr<Blocks> blocks, const std::string& unit, BlockKind kind,
        std::int64_t bytes);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  char* data() const { return memory_.get(); }

 private:
  std::shared_ptr<Blocks> blocks_;
  const std::string& unit_;
  const BlockKind kind_;
  const std::int64_t bytes_;
  Blocks::Mapped memory_;
};

}  // namespace tessera::capture
