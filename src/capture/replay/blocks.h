// Memory that values of regions lie in while they are needed, of one model; and how much it is.
//
// The block of an entry is there from a forward to the end of its backward, that of scratch for one
// run. Then it is free for any other region, so that layers that are recomputed share one, and stays:
// straight from the system, since on the heap it would lie amid what eager calls take and give back,
// and neither would fit any more. Forwards and backwards come in the same order in each step, so that
// each finds the block that it had before. Where much else is taken while blocks are free they rest:
// their addresses stay, their pages go back to the system. Threads: one.
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

  /// What the blocks took at most since the last call.
  RegionBlocks take_most();
  /// They take now, free ones too.
  std::int64_t bytes() const { return bytes_; }
  /// Those that are free have no pages until they are used again.
  void rest(BlockKind kind);
  /// Of those that rest.
  std::int64_t bytes_at_rest() const;

 private:
  friend class Block;
  struct Unmap {
    std::size_t bytes = 0;
    bool rests = false;
    void operator()(char* memory) const;
  };
  using Mapped = std::unique_ptr<char, Unmap>;
  struct OfUnit {
    std::array<std::int64_t, 2> bytes = {};  // by kind
    UnitBlocks most;
  };

  Mapped take(BlockKind kind, std::size_t bytes);
  void count(const std::string& unit, BlockKind kind, std::int64_t bytes);

  std::array<std::vector<Mapped>, 2> free_;  // by kind, the last one given back behind the others
  std::map<std::string, OfUnit> units_;
  std::int64_t bytes_ = 0, most_ = 0;
};

class Block {
 public:
  /// At least `bytes`, of a region in `unit`, which outlives it; none of 0.
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
