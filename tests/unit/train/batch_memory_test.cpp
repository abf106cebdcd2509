// Batches that no memory holds are refused by the key that mends it; what runs out says so.
#include "train/batch_memory.h"

#include <exception>
#include <new>
#include <stdexcept>

#include "support/test.h"

namespace tessera::train::batch_memory_test {
namespace {

const Room kRoom{0x1p34, 0x1p34};

std::string refusal(const RowsOfRank& rows, std::int64_t logits) {
  return error_of(ErrorKind::kConfig, [&] { require_room(rows, logits, kRoom); });
}

TEST(BatchMemory, WhatCannotFitIsRefusedByTheKeyThatMendsIt) {
  EXPECT_THAT(refusal({1'000'000, 1'000'000, 1024}, 260),
              AllOf(StartsWith("training.local_batch_size: found 1000000 rows of 1024 tokens"),
                    Says("expected what the 16 GiB"), Says("lower it")));
  EXPECT_THAT(refusal({1'000'000, 1, 2048}, 260),
              StartsWith("training.global_batch_size: found 1000000 rows of 2048 tokens"));
  // Products beyond 63 bits are no smaller.
  EXPECT_THAT(refusal({1'000'000'000, 1'000'000'000, 1'000'000'000}, 1 << 30),
              StartsWith("training.local_batch_size: found 1000000000 rows"));
}

// Its logits lie in its own memory, the rows of a step in the host's.
TEST(BatchMemory, WhatADeviceComputesIsComparedWithWhatItHas) {
  const Room room{0x1p40, 0x1p34, "cuda:1"};
  const auto refused = [&](const RowsOfRank& rows, std::int64_t logits) {
    return error_of(ErrorKind::kConfig, [&] { require_room(rows, logits, room); });
  };
  EXPECT_THAT(refused({16, 16, 1 << 10}, 1 << 20),
              AllOf(StartsWith("training.local_batch_size: found 16 rows of 1024 tokens"),
                    Says("expected what the 16 GiB of cuda:1 hold; lower it")));
  require_room({16, 7, 1 << 10}, 1 << 20, room);
  require_room({1 << 24, 1, 1 << 10}, 260, room);  // 2^38 bytes of ids
  EXPECT_THAT(refused({1 << 27, 1, 1 << 10}, 260),
              AllOf(StartsWith("training.global_batch_size: found 134217728 rows"),
                    Says("expected what the 1024 GiB of this machine hold")));
}

TEST(BatchMemory, RanksOfCpShareTheLogitsOfARowAndNotItsIds) {
  const RowsOfRank alone{8, 8, 1 << 10}, shared{8, 8, 1 << 10, 2};
  require_room(alone, (1 << 20) - 8, kRoom);
  EXPECT_THAT(refusal(alone, (1 << 21) - 16), Says("8 rows of 1024 tokens a micro-batch, whose"));
  require_room(shared, (1 << 21) - 16, kRoom);
  EXPECT_THAT(refusal(shared, 1 << 21), Says("over context_parallel_degree = 2 ranks, whose"));
  EXPECT_THAT(refusal({1 << 21, 1, 1024, 2}, 260), StartsWith("training.global_batch_size"));
}

TEST(BatchMemory, WhatMayFitIsNotRefused) {
  require_room({1 << 20, 1, 1024}, 1 << 18, kRoom);     // 2^34 bytes of ids
  require_room({8, 8, 1 << 10}, (1 << 20) - 8, kRoom);  // the same of ids and logits
  require_room({0, 0, 1}, 1, kRoom);
  EXPECT_GT(memory_bytes(), 0x1p20);
}

TEST(BatchMemory, TellsMemoryThatRanOutFromOtherErrors) {
  EXPECT_TRUE(is_out_of_memory(std::bad_alloc()));
  EXPECT_TRUE(is_out_of_memory(std::runtime_error(
      "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
      "you tried to allocate 9007199254740992 bytes.")));
  EXPECT_TRUE(is_out_of_memory(std::runtime_error("CUDA out of memory. Tried to allocate 2 GiB")));
  try {  // as a pipeline's runner says where it was
    try {
      throw std::bad_alloc();
    } catch (const std::exception&) {
      std::throw_with_nested(Error(ErrorKind::kUsage, "slot 1F0: std::bad_alloc"));
    }
  } catch (const std::exception& error) {
    EXPECT_TRUE(is_out_of_memory(error));
  }
  EXPECT_FALSE(is_out_of_memory(std::runtime_error("mat1 and mat2 shapes cannot be multiplied")));
  EXPECT_FALSE(is_out_of_memory(Error(ErrorKind::kComm, "rank 1 is lost: out of memory")));
  EXPECT_THAT(out_of_memory_text({8, 4, 12}, std::bad_alloc()),
              AllOf(StartsWith("training.local_batch_size: found micro-batches of 4 row(s) of 12"),
                    Says("training.seq_len"), Says("std::bad_alloc")));
}

TEST(BatchMemory, OutsideOfBatchesItSaysWhenAndNotWhichCallsLedThere) {
  const std::runtime_error error(
      "CUDA out of memory. Tried to allocate 2.00 GiB. GPU\nframe #0: f");
  EXPECT_THAT(
      out_of_memory_text("before the first step", error,
                         DeviceThatRanOut{"cuda:1", "", 0x1p30, 0x1p31, 0x1p32}),
      AllOf(StartsWith("memory ran out before the first step of cuda:1: requested 2.00 GiB, "
                       "held 1 GiB, peak 2 GiB, reserved 4 GiB, expected room"),
            Says("more ranks"), Not(Says("frame"))));
  EXPECT_THAT(out_of_memory_text("outside of forwards", std::bad_alloc()),
              StartsWith("memory ran out outside of forwards, expected room"));
}

// As CUDA's allocator and the simulated device say it, and as neither does.
TEST(BatchMemory, ADeviceSaysWhereHowMuchWasAskedForAndHeld) {
  const DeviceThatRanOut device{"cuda:1", "the backward of unit layers.3", 0x1p30, 0x1p31, 0x1p32};
  const auto text = [&](const char* said) {
    return out_of_memory_text({8, 4, 12}, std::runtime_error(said), device);
  };
  EXPECT_THAT(text("CUDA out of memory. Tried to allocate 20.50 MiB. GPU 1 has a total"),
              Says("memory ran out of cuda:1 in the backward of unit layers.3: requested "
                   "20.50 MiB, held 1 GiB, peak 2 GiB, reserved 4 GiB, expected fewer; lower it"));
  EXPECT_THAT(text("sim: out of memory. Tried to allocate 512 bytes. Expected on sim:1 at most"),
              Says("requested 512 bytes, held"));
  EXPECT_THAT(text("out of memory"), Says("requested an unknown size"));
}

}  // namespace
}  // namespace tessera::train::batch_memory_test
