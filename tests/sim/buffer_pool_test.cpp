// comm/buffer_pool.h on a device: a block carries the event of its last use, so that memory is
// handed on between streams in the host's order, and nothing else is asked of the allocator.
#include "comm/buffer_pool.h"

#include <ATen/ATen.h>

#include "sim/ranks.h"
#include "sim/streams.h"
#include "support/test.h"

namespace tessera::sim::buffer_pool_test {
namespace {

using comm::BufferPool;
using comm::EventEnd;
using comm::EventSite;
using comm::Stream;
using comm::StreamScope;

/// Returns the report where a block is used on one stream, returned there and taken on another one.
/// `between`: what happens to the pool meanwhile.
template <class Between>
std::string race_of_two_users(const Between& between) {
  BufferPool pool(device(0));
  const Stream first = Stream::make(device(0)), second = Stream::make(device(0));
  return race_of([&] {
    {
      const StreamScope here(first);
      at::Tensor block = pool.take(100, at::kFloat);
      block.fill_(1);
      pool.recycle(std::move(block));
    }
    between(pool);
    const StreamScope here(second);
    at::Tensor block = pool.take(100, at::kFloat);
    block.fill_(2);
    pool.recycle(std::move(block));
  });
}

void keep(BufferPool& /*pool*/) {}
void trim(BufferPool& pool) { pool.trim(); }

TEST(DevicePool, WhoTakesABlockIsOrderedAfterItsLastUse) { EXPECT_EQ(race_of_two_users(keep), ""); }

// Its memory goes to the allocator, and the next block is made of it.
TEST(DevicePool, ABlockIsFreedBehindItsLastUse) { EXPECT_EQ(race_of_two_users(trim), ""); }

// Naive: memory that is destroyed with its user, which the allocator knows nothing of.
TEST(DevicePool, AGatherBufferThatIsGoneGivesItsMemoryBack) {
  const auto pool = std::make_shared<BufferPool>(device(0));
  const Stream first = Stream::make(device(0)), second = Stream::make(device(0));
  EXPECT_EQ(race_of([&] {
              {
                const StreamScope here(first);
                comm::GatherBuffer buffer(pool, at::kFloat, 100, 1, 0, "released");
                buffer.begin();
                buffer.writable_slice().fill_(1);
              }
              const StreamScope here(second);
              pool->take(100, at::kFloat).fill_(2);
            }),
            "");
}

TEST(DevicePool, EachEventThatIsLeftOutIsFound) {
  for (const EventEnd end : {EventEnd::kRecord, EventEnd::kBlock}) {
    for (const EventSite site :
         {EventSite::kPoolBack, EventSite::kPoolFree, EventSite::kPoolMade}) {
      const auto left_out = without(site, end);
      const bool is_of_free = site != EventSite::kPoolBack;
      // A block that is freed has the event of its last user's return: it has no record of its own.
      if (site == EventSite::kPoolFree && end == EventEnd::kRecord) continue;
      EXPECT_NE(race_of_two_users(is_of_free ? trim : keep), "") << to_string(site);
    }
  }
}

TEST(DevicePool, TakesForTheStreamThatIsNamed) {
  BufferPool pool(device(1));
  const Stream group = Stream::make(device(1));
  EXPECT_EQ(race_of([&] {
              at::Tensor block = pool.take(100, at::kFloat);
              block.fill_(1);
              pool.recycle(std::move(block));
              at::Tensor again = pool.take(100, at::kFloat, group);
              {
                const StreamScope there(group);
                again.fill_(2);
              }
              comm::Event end;
              end.record(group, EventSite::kWorkEnd);
              pool.recycle(std::move(again), end);
              pool.take(100, at::kFloat).fill_(3);
            }),
            "");
}

// Naive: the block that came back last is the one whose user is still at work.
TEST(DevicePool, TheBlockThatCameBackFirstGoesOutFirst) {
  BufferPool pool(device(0));
  std::vector<at::Tensor> blocks;
  std::vector<const void*> places;
  for (int i = 0; i < 4; ++i) {
    blocks.push_back(pool.take(100, at::kFloat));
    places.push_back(blocks.back().const_data_ptr());
  }
  for (at::Tensor& block : blocks) pool.recycle(std::move(block));
  for (int round = 0; round < 3; ++round) {
    for (const void* place : places) {
      at::Tensor block = pool.take(100, at::kFloat);
      EXPECT_EQ(block.const_data_ptr(), place);
      pool.recycle(std::move(block));
    }
  }
}

/// Takes a block of each size, all at once, and gives them back.
void step(BufferPool& pool, const std::vector<std::int64_t>& sizes) {
  std::vector<at::Tensor> taken;
  taken.reserve(sizes.size());
  for (const auto size : sizes) taken.push_back(pool.take(size, at::kByte));
  for (auto& one : taken) pool.recycle(std::move(one));
}

TEST(DevicePool, ASteadyStepMakesNothing) {
  BufferPool pool(device(0));
  step(pool, {100, 100, 120, 700, 5000});
  const auto made = pool.blocks_made();
  for (int i = 0; i < 1000; ++i) step(pool, {100, 100, 120, 700, 5000});
  EXPECT_EQ(pool.blocks_made(), made);
}

// Naive: since each of several blocks is taken in its turn, none of them ever grows idle.
TEST(DevicePool, BlocksThatAStepDoesNotNeedAreFreed) {
  BufferPool pool(device(0));
  step(pool, {1000, 1000, 1000, 1000});
  for (int i = 0; i < 3000; ++i) step(pool, {1000});
  EXPECT_EQ(pool.total_bytes(), 1000);
}

// Naive: a free block of a size that fits no request is missing to a caller that asks for the last
// bytes.
TEST(DevicePool, WhatWaitsIsFreedBeforeTheDeviceIsFull) {
  BufferPool pool(device(2));
  const CapacityScope full(2, static_cast<std::size_t>(live_bytes(2)) + 8192);
  step(pool, {3072});
  ASSERT_EQ(pool.free_bytes(), 3072);
  at::Tensor most = pool.take(7168, at::kByte);
  EXPECT_EQ(pool.free_bytes(), 0);
  EXPECT_THROW(pool.take(2048, at::kByte), c10::OutOfMemoryError) << "nothing waits any more";
  EXPECT_EQ(pool.total_bytes(), 7168) << "of blocks that there are";
  EXPECT_EQ(pool.blocks_made(), 2);
  pool.recycle(std::move(most));
}

/// Returns the report where a free block is freed for want of memory, and its memory taken again on
/// another stream.
std::string race_in_a_full_device() {
  BufferPool pool(device(2));
  const CapacityScope full(2, static_cast<std::size_t>(live_bytes(2)) + 8192);
  const Stream first = Stream::make(device(2)), second = Stream::make(device(2));
  const auto use = [&](const Stream& on, std::int64_t bytes) {
    const StreamScope here(on);
    at::Tensor block = pool.take(bytes, at::kByte);
    block.fill_(1);
    pool.recycle(std::move(block));
  };
  return race_of([&] {
    use(first, 3072);
    use(second, 7168);  // which frees the first one
    use(second, 3072);  // which frees that, and is made of the first one's memory
  });
}

TEST(DevicePool, WhatIsFreedForWantOfMemoryIsFreedBehindItsLastUse) {
  EXPECT_EQ(race_in_a_full_device(), "");
  const test_hooks::Set without(test_hooks::leaves_out_event, [](EventSite site, EventEnd half) {
    return site == EventSite::kPoolFree && half == EventEnd::kBlock;
  });
  EXPECT_NE(race_in_a_full_device(), "");
}

}  // namespace
}  // namespace tessera::sim::buffer_pool_test
