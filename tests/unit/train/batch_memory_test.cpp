#include "train/batch_memory.h"

#include <gmock/gmock.h>

#include <new>
#include <stdexcept>

#include "unit/io/temporary_folder.h"

namespace tessera::train::batch_memory_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr double kMemory = 0x1p34;

std::vector<MemoryPool> pools_of(double left) {
  return {{"host a", "/proc/meminfo", 0x1p36, left}};
}

std::string refusal(const RowsOfRank& rows, const KeptOfToken& kept) {
  const auto pools = pools_of(kMemory);
  return error_of(ErrorKind::kConfig,
                  [&] { require_room(rows, {claim_of(rows, kept, pools)}, pools); });
}

TEST(BatchMemory, WhatCannotFitIsRefusedByTheKeyThatMendsIt) {
  EXPECT_THAT(refusal({1'000'000, 1'000'000, 1024}, {520, 0}),
              AllOf(StartsWith("training.local_batch_size: found 1000000 rows of 1024 tokens"),
                    HasSubstr("at most 16 GiB of 64 GiB (/proc/meminfo"), HasSubstr("lower it"),
                    HasSubstr("activation_checkpoint.mode")));
  // Naive: logits alone fit, and the first forward ends by the kernel's hand.
  EXPECT_THAT(refusal({1'000'000, 1'000'000, 16}, {520, 1024}),
              StartsWith("training.local_batch_size: found 1000000 rows of 16 tokens"));
  EXPECT_THAT(refusal({1'000'000, 1, 2048}, {520, 0}),
              StartsWith("training.global_batch_size: found 1000000 rows of 2048 tokens"));
  // Products beyond 63 bits are no smaller.
  EXPECT_THAT(refusal({1'000'000'000, 1'000'000'000, 1'000'000'000}, {0x1p30, 0}),
              StartsWith("training.local_batch_size: found 1000000000 rows"));
}

TEST(BatchMemory, WhatMayFitIsNotRefused) {
  const auto fits = [](const RowsOfRank& rows, const KeptOfToken& kept, double left = kMemory) {
    const auto pools = pools_of(left);
    require_room(rows, {claim_of(rows, kept, pools)}, pools);
  };
  fits({1 << 20, 1, 1024}, {0, 0});              // 2^34 bytes of ids
  fits({8, 8, 1 << 10}, {0x1p21 - 16, 0});       // the same of ids and logits
  fits({8, 8, 1 << 10}, {0x1p20, 0x1p20 - 16});  // and of what layers keep
  fits({0, 0, 1}, {1, 1}, 0);
  require_room({1'000'000, 1'000'000, 1024}, {}, {});  // no pool could be read
}

TEST(BatchMemory, RanksThatShareAPoolAreAddedUpAndNoOthers) {
  const RowsOfRank rows{8, 8, 1 << 10};
  const KeptOfToken kept{0x1p20, 0x1p20 - 16};
  const std::vector<MemoryPool> host{{"host a", "/proc/meminfo", 0x1p36, 0x1p35}};
  const std::vector<MemoryPool> limited{host[0], {"group 7", "memory.max", 0x1p34, 0x1p34}};
  const MemoryClaim outside = claim_of(rows, kept, host);
  const MemoryClaim inside = claim_of(rows, kept, limited);
  const MemoryClaim elsewhere = claim_of(rows, kept, {{"host b", "", 0, 0}});
  require_room(rows, {outside, outside, elsewhere, elsewhere}, host);
  EXPECT_THAT(error_of(ErrorKind::kConfig,
                       [&] { require_room(rows, {outside, outside, elsewhere, outside}, host); }),
              AllOf(HasSubstr("at least 48 GiB on the 3 ranks that share it"),
                    HasSubstr("at most 32 GiB of 64 GiB")));
  require_room(rows, {inside, outside}, limited);
  EXPECT_THAT(error_of(ErrorKind::kConfig, [&] { require_room(rows, {inside, inside}, limited); }),
              AllOf(HasSubstr("at least 32 GiB on the 2 ranks"), HasSubstr("(memory.max")));
  // Some moment may have room for what fits into the whole of a pool.
  EXPECT_FALSE(is_beyond({outside, outside, outside, outside}, host));
  EXPECT_TRUE(is_beyond({outside, outside, outside, outside, outside}, host));
  EXPECT_FALSE(is_beyond({elsewhere}, host));
  EXPECT_EQ(decode_claim(encode(inside)), inside);
}

GradContract contract(const std::string& name, bool trainable = true,
                      DType compute = DType::kBFloat16) {
  GradContract made;
  made.name = name;
  made.trainable = trainable;
  made.compute.dtype = compute;
  return made;
}

/// Two layers of widths 3 (stream), 4 heads of 5, 1 of keys, 7 inside; 11 tokens.
models::ModelSpec small_spec() {
  models::ModelSpec spec;
  spec.vocab_size = 11;
  spec.hidden_size = 3;
  spec.num_hidden_layers = 2;
  spec.num_attention_heads = 4;
  spec.num_key_value_heads = 1;
  spec.head_dim = 5;
  spec.intermediate_size = 7;
  return spec;
}

// That it is below what a forward keeps: memory_of_run_test.cpp.
TEST(BatchMemory, WhatIsKeptOfATokenFollowsFromWhatIsTrainedAndComputedAgain) {
  const auto spec = small_spec();
  const std::string first = "model.layers.0.self_attn.q_proj.weight";
  const std::string last = "model.layers.1.mlp.up_proj.weight";
  const auto kept = [&](const std::vector<GradContract>& contracts, const ForwardForm& form) {
    return kept_of_token(spec, contracts, form).activations / 2;  // bytes of bfloat16
  };
  const std::vector<GradContract> all{contract("model.embed_tokens.weight"), contract(first),
                                      contract(last)};
  constexpr double kLayer = 30 + 14;  // q, k, v and both inputs of the gate
  EXPECT_EQ(kept(all, {}), 3 + 2 * (6 + kLayer));
  EXPECT_EQ(kept(all, {RecomputeMode::kSelective}), 3 + 2 * (3 + kLayer));
  EXPECT_EQ(kept(all, {RecomputeMode::kFull}), 3 + 2 * 3);
  EXPECT_EQ(kept(all, {RecomputeMode::kNone, 2, false}), 3 + 2 * (6 + kLayer / 2));
  EXPECT_EQ(kept(all, {RecomputeMode::kNone, 2, true}), (3 + 2 * (6 + kLayer)) / 2);
  // What is in front of the first trained layer, and that layer's input, belong to no graph.
  const std::vector<GradContract> adapters{
      contract("model.embed_tokens.weight", false), contract(first, false),
      contract("model.layers.0.self_attn.q_proj.lora_A.weight"), contract(last, false)};
  EXPECT_EQ(kept(adapters, {}), 3 + 6 + kLayer);
  EXPECT_EQ(kept({contract(first, false), contract(last)}, {}), 3);
  EXPECT_EQ(kept({contract(first, false), contract("lm_head.weight")}, {}), 0);
  // No element is narrower than the narrowest compute dtype.
  EXPECT_EQ(kept_of_token(spec, all, {}).logits, 22);
  EXPECT_EQ(kept_of_token(spec, {contract(first, true, DType::kFloat32)}, {}).logits, 44);
  EXPECT_EQ(kept_of_token(spec, all, {RecomputeMode::kNone, 2, false}).logits, 10);
}

TEST(BatchMemory, TellsMemoryThatRanOutFromOtherErrors) {
  EXPECT_TRUE(is_out_of_memory(std::bad_alloc()));
  EXPECT_TRUE(is_out_of_memory(std::runtime_error(
      "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
      "you tried to allocate 9007199254740992 bytes.")));
  EXPECT_TRUE(is_out_of_memory(std::runtime_error("CUDA out of memory. Tried to allocate 2 GiB")));
  EXPECT_FALSE(is_out_of_memory(std::runtime_error("mat1 and mat2 shapes cannot be multiplied")));
  EXPECT_FALSE(is_out_of_memory(Error(ErrorKind::kComm, "rank 1 is lost: out of memory")));
  EXPECT_THAT(out_of_memory_text({8, 4, 12}, std::bad_alloc()),
              AllOf(StartsWith("training.local_batch_size: found micro-batches of 4 row(s) of 12"),
                    HasSubstr("training.seq_len"), HasSubstr("std::bad_alloc")));
}

}  // namespace
}  // namespace tessera::train::batch_memory_test
