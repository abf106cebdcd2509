// Free memory of replayed regions is decommitted where an eager step has most.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "capture/replay/blocks.h"
#include "capture/replay/regions.h"
#include "dist/replayed.h"

namespace tessera::test::replay_blocks_test {
namespace {

// Pages go back, the address stays: nothing that was captured of it points elsewhere.
TEST(ReplayBlocks, ABlockAtRestHasNoPagesAndItsAddress) {
  constexpr std::int64_t kBytes = std::int64_t{1} << 20;
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const auto blocks = std::make_shared<capture::Blocks>();
  const std::string unit;
  const auto resident = [&](char* memory) {
    std::vector<unsigned char> pages(kBytes / page);
    EXPECT_EQ(::mincore(memory, kBytes, pages.data()), 0);
    return std::ranges::count_if(pages, [](unsigned char one) { return (one & 1) != 0; });
  };
  char* memory = nullptr;
  {
    const capture::Block block(blocks, unit, capture::BlockKind::kScratch, kBytes);
    memory = block.data();
    std::memset(memory, 1, kBytes);
    blocks->decommit(capture::BlockKind::kScratch);  // it is taken
    EXPECT_EQ(resident(memory), kBytes / static_cast<std::int64_t>(page));
    EXPECT_EQ(blocks->decommitted_bytes(), 0);
  }
  blocks->decommit(capture::BlockKind::kEntry);
  EXPECT_EQ(blocks->decommitted_bytes(), 0);
  blocks->decommit(capture::BlockKind::kScratch);
  EXPECT_EQ(resident(memory), 0);
  EXPECT_EQ(blocks->decommitted_bytes(), kBytes);
  const capture::Block again(blocks, unit, capture::BlockKind::kScratch, kBytes);
  EXPECT_EQ(again.data(), memory);
  EXPECT_EQ(blocks->decommitted_bytes(), 0);
}

// There a model has its head and its loss, whose activations are the most that an eager step has.
TEST_ON_RANKS(ReplayBlocks, ScratchRestsBehindTheLastRegionOfAForward, 1) {
  const Sharded<Model>* watched = nullptr;
  std::vector<std::int64_t> decommitted;
  Twins twins(data_mesh(world), [&](Model& model, const Several& inputs) {
    at::Tensor x = inputs[0] * model.before;
    for (const auto& part : model.parts) {
      x = part->region({x}, [&](const Several& in) { return Several{part->layer(in[0])}; })[0];
      if (watched != nullptr && watched->module().get() == &model) {
        decommitted.push_back(capture::region_bytes(*watched).decommitted);
      }
    }
    return Several{x * model.after};
  });
  for (int step = 0; step < 5; ++step) {
    twins.step({{rows(static_cast<std::uint64_t>(step), 512)}});
  }
  watched = &twins.replayed;
  twins.step({{rows(10, 512)}, {rows(11, 512)}});
  ASSERT_EQ(decommitted.size(), 4);
  EXPECT_GT(decommitted[1], decommitted[0]);
  EXPECT_EQ(decommitted[2], decommitted[0]);
  EXPECT_EQ(decommitted[3], decommitted[1]);
}

}  // namespace
}  // namespace tessera::test::replay_blocks_test
