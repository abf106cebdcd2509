// BufferPool: a steady step makes nothing new, and sizes that are no longer requested do not stay.
#include "comm/buffer_pool.h"

#include <ATen/ATen.h>

#include <random>

#include "support/test.h"

namespace tessera::comm::buffer_pool_test {
namespace {

/// Takes a block of each size, all at once, and gives them back.
void step(BufferPool& pool, const std::vector<std::int64_t>& sizes) {
  std::vector<at::Tensor> taken;
  taken.reserve(sizes.size());
  for (const auto size : sizes) taken.push_back(pool.take(size, at::kByte));
  for (auto& one : taken) pool.recycle(std::move(one));
}

TEST(BufferPool, ASteadyStepMakesNothing) {
  BufferPool pool(at::kCPU);
  step(pool, {100, 100, 120, 700, 5000});
  const auto made = pool.blocks_made();
  for (int i = 0; i < 5000; ++i) step(pool, {100, 100, 120, 700, 5000});
  EXPECT_EQ(pool.blocks_made(), made);
  EXPECT_EQ(pool.total_bytes(), pool.free_bytes());
}

// Naive: blocks that a long step uses once are freed in between, at every step again.
TEST(BufferPool, AStepOfAnyLengthComesToRest) {
  BufferPool pool(at::kCPU);
  const auto long_step = [&] {
    step(pool, {90000, 4000});
    for (int i = 0; i < 5000; ++i) step(pool, {100, 700});
  };
  for (int i = 0; i < 6; ++i) long_step();
  const auto made = pool.blocks_made();
  EXPECT_LT(made, 20);
  for (int i = 0; i < 6; ++i) long_step();
  EXPECT_EQ(pool.blocks_made(), made);
}

// Naive: every size that there ever was stays.
TEST(BufferPool, SizesThatGrowLeaveNoRowOfBlocksBehind) {
  BufferPool pool(at::kCPU);
  std::int64_t size = 1000;
  for (int i = 0; i < 400; ++i, size += 7) {
    step(pool, {size, size});
    EXPECT_LE(pool.total_bytes(), 8 * size) << i;
  }
}

TEST(BufferPool, SizesThatNoOneTakesAnyMoreAreFreed) {
  BufferPool pool(at::kCPU);
  step(pool, {1000000, 1000000, 1000000});
  EXPECT_EQ(pool.total_bytes(), 3000000);
  for (int i = 0; i < 3000; ++i) step(pool, {1000});
  EXPECT_EQ(pool.total_bytes(), 1000);
  // Also those of a size that is still in use, where fewer are.
  step(pool, {1000, 1000, 1000, 1000});
  for (int i = 0; i < 3000; ++i) step(pool, {1000});
  EXPECT_EQ(pool.total_bytes(), 1000);
}

TEST(BufferPool, AnySizesStayWithinAFewTimesTheLargestStep) {
  BufferPool pool(at::kCPU);
  std::mt19937 random(5);
  std::uniform_int_distribution<std::int64_t> sizes(1, 100000);
  for (int i = 0; i < 4000; ++i) {
    step(pool, {sizes(random), sizes(random), sizes(random)});
    // In each class of sizes, which are 1.5 times those of the next, as many as were taken at once.
    EXPECT_LE(pool.total_bytes(), 3 * 3 * 150000);
  }
}

// Random steps that overlap as gathers and slots do, each twice or more. Naive: the last one
// returned is taken first, so that blocks of one size change places.
TEST(BufferPool, AStepThatComesAgainIsGivenTheSameMemory) {
  std::mt19937 engine(7);
  const auto below = [&](unsigned count) { return engine() % count; };
  struct Event {
    bool takes;
    std::int64_t size;    // of a block to take
    std::size_t recycle;  // which of those that are taken
  };
  for (int drawn = 0; drawn < 50; ++drawn) {
    std::vector<Event> events;
    std::size_t open = 0;
    for (int i = 0; i < 60; ++i) {
      const bool takes = open == 0 || below(2) == 0;
      events.push_back({takes, 100 + 40 * static_cast<std::int64_t>(below(4)),
                        takes ? 0 : below(static_cast<unsigned>(open))});
      open = takes ? open + 1 : open - 1;
    }
    BufferPool pool(at::kCPU);
    const auto run = [&] {
      pool.begin_step();
      std::vector<const void*> found;
      std::vector<at::Tensor> taken;
      for (const auto& event : events) {
        if (event.takes) {
          taken.push_back(pool.take(event.size, at::kByte));
          found.push_back(taken.back().const_data_ptr());
        } else {
          const auto one = taken.begin() + static_cast<std::ptrdiff_t>(event.recycle);
          pool.recycle(std::move(*one));
          taken.erase(one);
        }
      }
      for (auto& one : taken) pool.recycle(std::move(one));
      return found;
    };
    // The first ones make blocks, and free those that are just too small.
    const auto settled = [&] {
      for (int step = 0; step < 4; ++step) run();
      return run();
    };
    auto expected = settled();
    for (int again = 0; again < 4; ++again) EXPECT_EQ(run(), expected) << drawn;
    // Another one in between takes what it likes.
    std::swap(events.front().size, events.at(2).size);
    run();
    std::swap(events.front().size, events.at(2).size);
    expected = settled();
    EXPECT_EQ(run(), expected) << drawn;
  }
}

TEST(BufferPool, TrimFreesWhatIsNotTaken) {
  BufferPool pool(at::kCPU);
  auto taken = pool.take(300, at::kFloat);
  step(pool, {50, 7000});
  pool.trim();
  EXPECT_EQ(pool.free_bytes(), 0);
  EXPECT_EQ(pool.total_bytes(), 1200);
  pool.recycle(std::move(taken));
  EXPECT_EQ(pool.free_bytes(), 1200);
  pool.trim();
  EXPECT_EQ(pool.total_bytes(), 0);
}

// Naive: all that is free, which the next step of the same kind makes again.
TEST(BufferPool, WhatAStepHasNotTakenIsFreedAndTheRestStays) {
  BufferPool pool(at::kCPU);
  auto taken = pool.take(300, at::kByte);
  step(pool, {1000, 1000, 7000});
  const auto before = pool.requests();
  step(pool, {1000, 50});
  pool.trim_idle_since(before);
  EXPECT_EQ(pool.free_bytes(), 1000 + 50);
  EXPECT_EQ(pool.total_bytes(), 300 + 1000 + 50);
  const auto made = pool.blocks_made();
  step(pool, {1000, 50});
  EXPECT_EQ(pool.blocks_made(), made);
  pool.recycle(std::move(taken));
}

}  // namespace
}  // namespace tessera::comm::buffer_pool_test
