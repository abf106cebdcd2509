// Layouts that a model or a world cannot have, and routers that produce NaN: one clear error each.
#include <ATen/ATen.h>

#include <limits>

#include "golden/degrees.h"
#include "golden/model_folder.h"
#include "models/model_spec.h"
#include "support/temporary_folder.h"
#include "train/config/config_resolve.h"
#include "train/parallelize.h"

namespace tessera::golden::layout_refusals_test {
namespace {

struct Refused {
  std::string folder;
  Degrees degrees;
  std::string key;
  std::string rule;
};

class LayoutRefusals : public ::testing::Test {
 protected:
  static std::string error(const std::string& folder, const Degrees& degrees) {
    return error_of(ErrorKind::kConfig, [&] {
      run_gradients(config_for(folder, degrees), layout_of(degrees),
                    Reference::of(folder).batches());
    });
  }
};

TEST_F(LayoutRefusals, DegreesThatDivideNothingAreRefusedWithTheirKeyAndRule) {
  const std::string tp = "parallelism.tensor_parallel_degree";
  const std::string ep = "parallelism.expert_parallel_degree";
  const std::string etp = "parallelism.expert_tensor_parallel_degree";
  const Refused all[] = {
      {"qwen3-moe-fp32", {.tp = 3}, tp, "num_attention_heads = 4"},
      {"gpt-oss-fp32", {.tp = 3}, tp, "num_attention_heads = 4"},
      {"deepseek-v2-fp32", {.tp = 3}, tp, "num_attention_heads = 4"},
      {"gemma4-fp32", {.tp = 3}, tp, "num_attention_heads = 4"},
      {"qwen3-fp32", {.tp = 3}, tp, "num_attention_heads = 4"},
      {"qwen3-moe-fp32", {.shard = 3, .ep = 3}, ep, "the number of experts = 8"},
      {"gemma4-fp32", {.shard = 3, .ep = 3}, ep, "the number of experts = 8"},
      {"qwen3-moe-fp32", {.shard = 2, .ep = 4}, ep, "data_parallel_shard_degree"},
      {"qwen3-moe-fp32", {.replicate = 2, .ep = 2}, ep, "one replica"},
      {"qwen3-moe-fp32", {.tp = 2, .ep = 2, .etp = 2}, ep, "= data_parallel_shard_degree"},
      {"qwen3-moe-fp32", {.tp = 4, .etp = 2}, etp, "expected 1 or tensor_parallel_degree = 4"},
      {"qwen3-moe-fp32", {.shard = 2, .etp = 2}, etp, "expected 1 or tensor_parallel_degree = 1"},
      {"qwen3-fp32", {.shard = 2, .ep = 2}, ep, "without experts, expected 1"},
      {"llama-fp32", {.tp = 2, .etp = 2}, etp, "without experts, expected 1"},
  };
  for (const Refused& each : all) {
    SCOPED_TRACE(concat(each.folder, ": ", to_string(each.degrees)));
    EXPECT_THAT(error(each.folder, each.degrees), Says(each.key, each.rule, "found"));
  }
}

// Sizes that no folder has: the rules alone.
TEST_F(LayoutRefusals, EverySizeThatIsCutIsAsked) {
  const auto spec = train::open_model(config_for("deepseek-v2-fp32", {}).model).spec;
  const auto refusal = [&](const ParallelDims& degrees, auto&& change) {
    models::ModelSpec other = spec;
    change(other);
    return error_of(ErrorKind::kConfig, [&] { models::check_degrees(other, degrees); });
  };
  const ParallelDims two{.tp = 2};
  EXPECT_THAT(refusal(two, [](auto& s) { s.vocab_size = 127; }), Says("vocab_size = 127"));
  EXPECT_THAT(refusal(two, [](auto& s) { s.intermediate_size = 63; }),
              Says("intermediate_size = 63"));
  EXPECT_THAT(refusal(two, [](auto& s) { s.moe->shared_intermediate_size = 31; }),
              Says("shared experts = 31"));
  EXPECT_THAT(refusal({.tp = 2, .etp = 2}, [](auto& s) { s.moe->moe_intermediate_size = 15; }),
              Says("moe_intermediate_size = 15"));
  EXPECT_THAT(refusal({.tp = 4}, [](auto& s) { s.num_key_value_heads = 3; }),
              Says("num_key_value_heads = 3"));
}

TEST_F(LayoutRefusals, RowsThatSequenceShardsCannotShareAreRefused) {
  train::ParallelismConfig parallelism;
  parallelism.tensor_parallel_degree = 4;
  EXPECT_REFUSED(kConfig, train::check_positions(parallelism, 30), "training.seq_len", "30",
                 "sequence_parallel = false");
  parallelism.sequence_parallel = false;
  train::check_positions(parallelism, 30);
}

/// The folder with NaN in one router.
std::filesystem::path broken(const std::string& folder) {
  return changed_folder(folder, [](std::vector<StoredTensor>& tensors) {
    for (auto& tensor : tensors) {
      const auto& name = tensor.spec.name;
      if (!name.ends_with("layers.2.mlp.gate.weight") &&
          !name.ends_with("layers.2.mlp.router.weight") &&
          !name.ends_with("layers.2.router.proj.weight")) {
        continue;
      }
      at::from_blob(tensor.bytes.data(), tensor.spec.shape, at::kFloat)
          .fill_(std::numeric_limits<float>::quiet_NaN());
    }
  });
}

TEST_F(LayoutRefusals, ARouterThatProducesNaNIsOneErrorInEveryLayout) {
  for (const char* folder : {"qwen3-moe-fp32", "gpt-oss-fp32", "deepseek-v2-fp32"}) {
    const auto changed = broken(folder);
    for (const Degrees& degrees :
         {Degrees{}, Degrees{.tp = 2}, Degrees{.shard = 2, .ep = 2}, Degrees{.tp = 2, .etp = 2}}) {
      SCOPED_TRACE(concat(folder, ": ", to_string(degrees)));
      auto config = config_for(folder, degrees);
      config.model.path = changed;
      EXPECT_THAT(
          error_of(
              ErrorKind::kNumeric,
              [&] { run_gradients(config, layout_of(degrees), Reference::of(folder).batches()); }),
          Says("routing", "not finite", "expert"));
    }
  }
}

}  // namespace
}  // namespace tessera::golden::layout_refusals_test
