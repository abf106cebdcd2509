// Runs whose batches memory does not hold.
#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>

#include "base/memory_pool.h"
#include "dist/held_bytes.h"
#include "tessera/error.h"
#include "train/base_model.h"
#include "train/batch_memory.h"
#include "train/parallelize.h"
#include "train/step.h"
#include "train/trainer.h"
#include "unit/train/run_case.h"

namespace tessera::train::memory_of_run_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;

// Naive: they are accepted, and the program is killed in the first step.
TEST(MemoryOfRun, RowsThatNoMachineHoldsAreRefusedBeforeTheModelIsMade) {
  const testing::TemporaryFolder folder;
  Config config = run_case(folder, Head::kTied);
  const auto refusal = [&] {
    return error_of(ErrorKind::kConfig,
                    [&] { on_ranks(2, [&](World& world) { run_training(config, world); }); });
  };
  config.training.local_batch_size = 1'000'000'000;
  EXPECT_THAT(refusal(),
              HasSubstr("training.local_batch_size: found 1000000000 rows of 16 tokens"));
  config.training.local_batch_size = 1;
  config.training.global_batch_size = 1'000'000'000'000;
  EXPECT_THAT(refusal(), HasSubstr("training.global_batch_size: found 500000000000 rows of 16"));
  config.training.steps = 1'000'000'000;
  EXPECT_THAT(refusal(), HasSubstr("training.global_batch_size: found 1000000000000 rows a step "
                                   "for 1000000000 steps"));
}

/// What the graph of a forward over so many rows of kTokens holds on this rank's thread.
constexpr std::int64_t kTokens = 16;
double held_after_forward(Sharded<models::LanguageModel>& model, std::int64_t rows) {
  models::ModelInputs inputs;
  const std::int64_t vocabulary = model.module()->spec().vocab_size;
  inputs.input_ids = at::arange(rows * kTokens).remainder(vocabulary).view({rows, kTokens});
  inputs.targets = inputs.input_ids.clone();
  const test::HeldBytes held;
  const at::Tensor loss = model.forward(inputs);
  const auto bytes = static_cast<double>(held.bytes());
  torch::autograd::backward({loss});
  model.zero_grad();
  return bytes;
}

struct Family {
  const char* folder;
  const char* first_layer;  ///< a pattern
};

// A floor above it would refuse runs that work. Twice as many rows more take what is held for
// parameters out of the comparison.
TEST(MemoryOfRun, TheFloorIsBelowWhatAForwardKeepsInEveryFamilyAndMode) {
  for (const Family& family :
       {Family{"qwen3-fp32", "layers.0"}, Family{"llama-fp32", "layers.0"},
        Family{"qwen2-fp32", "layers.0"}, Family{"mistral-fp32", "layers.0"},
        Family{"gpt-oss-fp32", "layers.0"}, Family{"qwen3-moe-fp32", "layers.0"},
        Family{"deepseek-v2-fp32", "layers.0"}, Family{"gemma4-fp32", "language_model.layers.0"}}) {
    for (const int tp : {1, 2}) {
      for (int number = 0; number < 12; ++number) {
        const testing::TemporaryFolder folder;
        Config config = run_case(folder, Head::kTied);
        config.model.config =
            std::filesystem::path(TESSERA_TEST_DATA) / family.folder / "config.json";
        config.parallelism.tensor_parallel_degree = tp;
        config.parallelism.sequence_parallel = number % 2 == 0;
        config.activation_checkpoint.mode = static_cast<RecomputeMode>(number / 2 % 3);
        config.precision.param_dtype.dtype = tp == 1 ? DType::kFloat32 : DType::kBFloat16;
        if (number >= 6) config.model.freeze = {{"embed_tokens", family.first_layer}};
        SCOPED_TRACE(concat(family.folder, " on ", tp, " rank(s), case ", number));
        on_ranks(tp, [&](World& world) {
          const auto source = open_model(config.model);
          const auto dims = resolve_parallelism(config.parallelism, tp);
          const auto mesh = world.mesh(mesh_shape(dims));
          ModelParts parts = model_parts(source, config, mesh);
          const KeptOfToken kept = kept_of_token(
              source.spec, parts.contract.parameters,
              {config.activation_checkpoint.mode, tp, config.parallelism.sequence_parallel});
          EXPECT_GT(kept.activations, 0);
          const auto model = parallelize(std::move(parts), source, config, mesh);
          held_after_forward(*model, 1);  // what is made once
          const double one = held_after_forward(*model, 1);
          const double three = held_after_forward(*model, 3);
          EXPECT_LE((kept.logits + kept.activations) * 2 * kTokens, three - one);
        });
      }
    }
  }
}

// Naive: its logits fit into the machine, and the kernel ends the first step.
TEST(MemoryOfRun, RowsThatOnlyTheirLogitsWouldFitAreRefused) {
  const testing::TemporaryFolder folder;
  Config config = run_case(folder, Head::kTied);
  double most = 0;
  for (const MemoryPool& pool : memory_pools()) most = std::max(most, pool.size_bytes);
  ASSERT_GT(most, 0);
  const double logits = 16 * (260 * 2 + 16);  // of a row, and its ids
  config.training.local_batch_size = static_cast<std::int64_t>(0.9 * most / logits);
  EXPECT_THAT(error_of(ErrorKind::kConfig,
                       [&] { on_ranks(1, [&](World& world) { run_training(config, world); }); }),
              AllOf(HasSubstr("training.local_batch_size: found "),
                    HasSubstr("saved activations alone are at least")));
}

/// Rows that take more memory than there is.
class Endless final : public BatchSource {
 public:
  std::int64_t rows_in_step() const override { return 2; }
  std::int64_t row_tokens() const override { return 16; }
  MicroBatch load(std::int64_t, RowRange rows) const override {
    const auto ids = at::empty({rows.size(), std::int64_t{1} << 50}, at::kLong);
    return {ids, ids};
  }
};

// Naive: the allocator's words, which name no key.
TEST(MemoryOfRun, MemoryThatEndsInAStepIsAnErrorThatNamesTheKey) {
  const testing::TemporaryFolder folder;
  const Config config = run_case(folder, Head::kTied);
  on_ranks(1, [&](World& world) {
    const auto source = open_model(config.model);
    const auto mesh = world.mesh(mesh_shape(resolve_parallelism(config.parallelism, 1)));
    const auto model = parallelize(source, config, mesh);
    const auto said = AllOf(HasSubstr("training.local_batch_size: found micro-batches of 2 row(s) "
                                      "of 16 tokens, for which memory ran out"),
                            HasSubstr("can't allocate memory"));
    EXPECT_THAT(
        error_of(ErrorKind::kConfig, [&] { forward_backward(*model, Endless(), 1, {{0, 2}}, {}); }),
        said);
    EXPECT_THAT(error_of(ErrorKind::kConfig, [&] { forward_only(*model, Endless(), 1, {{0, 2}}); }),
                said);
  });
}

}  // namespace
}  // namespace tessera::train::memory_of_run_test
