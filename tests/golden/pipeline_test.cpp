// Pipelines against the same layout and micro-batches without one: loss, logits, gradients, losses
// and norms of clipped steps bit for bit, and against transformers within its bounds.
//
// The class of bug: a stage that sums in another order or dtype, misses a micro-batch, divides by
// the stages, or takes another stage's rows. A pairwise part in ./test, all of it under
// `scripts/full pipeline`.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/test_hooks.h"
#include "dist/ranks.h"
#include "golden/degrees.h"
#include "golden/model_folder.h"
#include "golden/reference.h"
#include "io/safetensors.h"
#include "models/model_spec.h"
#include "proof.h"
#include "tessera/clip.h"
#include "tessera/error.h"
#include "train/contract_of_run.h"
#include "train/data/data.h"
#include "train/gradients.h"
#include "train/hf/model_source.h"
#include "train/parallelize.h"
#include "train/pipeline_step.h"
#include "train/step.h"

namespace tessera::golden::pipeline_test {
namespace {

struct Case {
  std::string folder;
  std::string schedule;
  int stages = 2;  ///< ranks of axis pp
  Degrees beside;  ///< the other axes
  bool bfloat16 = false;
  RecomputeMode recompute = RecomputeMode::kNone;
  train::PipelineReshard reshard = train::PipelineReshard::kStep;
};

std::string to_string(const Case& c) {
  constexpr const char* kRecomputed[] = {"nothing", "layers", "all but weight products"};
  return concat(c.folder, ", ", c.schedule, " of ", c.stages, " ranks, ", to_string(c.beside),
                c.bfloat16 ? ", bf16" : ", fp32", ", ", kRecomputed[static_cast<int>(c.recompute)],
                " recomputed, ",
                c.reshard == train::PipelineReshard::kStep ? "kept in the step"
                                                           : "gathered for each micro-batch");
}

// Whose head has a weight of its own: a tied one mixes two streams of addends (bounds, not bits).
// The last is drawn, as the folders have four layers and a V of four ranks takes eight.
const std::string kEightLayers = "qwen3-moe of 8 layers";
const std::vector<std::string> kUntied{"qwen3-fp32",       "qwen3-moe-fp32", "gpt-oss-fp32",
                                       "deepseek-v2-fp32", "mistral-fp32",   kEightLayers};
const std::vector<std::string> kKinds{
    "GPipe", "1F1B", "Interleaved1F1B", "ZB1P", "InterleavedZeroBubble", "ZBV", "DualPipeV"};
constexpr int kRanks[] = {2, 4};
const std::vector<Degrees> kBeside{{}, {.shard = 2}, {.shard = 2, .ep = 2}, {.tp = 2}};
constexpr bool kBFloat16[] = {false, true};
constexpr RecomputeMode kModes[] = {RecomputeMode::kNone, RecomputeMode::kFull,
                                    RecomputeMode::kSelective};
constexpr train::PipelineReshard kReshard[] = {train::PipelineReshard::kStep,
                                               train::PipelineReshard::kMicroBatch};
constexpr int kMicroBatches = 8;

bool has_several_stages(const std::string& kind) {
  return kind != "GPipe" && kind != "1F1B" && kind != "ZB1P";
}

std::vector<std::size_t> sizes() {
  return {kUntied.size(),       kKinds.size(),     std::size(kRanks),  kBeside.size(),
          std::size(kBFloat16), std::size(kModes), std::size(kReshard)};
}

Case case_of(const test::Choice& choice) {
  return {kUntied[choice[0]],   kKinds[choice[1]], kRanks[choice[2]],  kBeside[choice[3]],
          kBFloat16[choice[4]], kModes[choice[5]], kReshard[choice[6]]};
}

/// A stage has a layer at least.
bool is_case(const Case& c) {
  if (c.beside.ep > 1 && (c.folder == "qwen3-fp32" || c.folder == "mistral-fp32")) return false;
  return c.stages * (has_several_stages(c.schedule) ? 2 : 1) <= (c.folder == kEightLayers ? 8 : 4);
}

/// Rows of ids at random with every fifth label left out: as many a rank and micro-batch as told.
std::string batch_file(const models::ModelSpec& spec, std::int64_t rows, std::int64_t tokens) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  const auto ids = at::randint(0, spec.vocab_size - 1, {rows, tokens}, generator,
                               at::TensorOptions().dtype(at::kLong));
  auto labels = ids.clone();
  labels.view({-1}).slice(0, 3, rows * tokens, 5).fill_(-100);
  const auto path = temporary_path("batch.safetensors");
  SafetensorsWriter writer(path, {{"input_ids", DType::kInt64, {rows, tokens}},
                                  {"labels", DType::kInt64, {rows, tokens}}});
  const auto write = [&](const char* name, const at::Tensor& tensor) {
    writer.write(name, {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()});
  };
  write("input_ids", ids);
  write("labels", labels);
  writer.finish();
  return path;
}

/// config.json of qwen3-moe-fp32 with twice the layers.
std::string eight_layers() {
  static const std::filesystem::path path = [] {
    auto config = nlohmann::json::parse(read_text(data_folder("qwen3-moe-fp32") / "config.json"));
    config["num_hidden_layers"] = 8;
    const auto file = temporary_path("eight_layers.json");
    std::ofstream(file) << config.dump();
    return file;
  }();
  return path;
}

train::Config config_of(const Case& c) {
  auto config = config_for(c.folder == kEightLayers ? "qwen3-moe-fp32" : c.folder, c.beside);
  if (c.folder == kEightLayers) {
    config.model.path.clear();
    config.model.config = eight_layers();
  }
  config.activation_checkpoint.mode = c.recompute;
  if (c.bfloat16) config.precision = {};
  config.pipeline.schedule = c.schedule;
  config.pipeline.micro_batches = kMicroBatches;
  config.pipeline.reshard = c.reshard;
  return config;
}

Layout with_stages(const Layout& layout, int stages) {
  auto all = layout;
  all.ranks *= stages;
  return all;
}

void expect_bits_of_no_pipeline(const Case& c) {
  auto config = config_of(c);
  const auto spec = train::open_model(config.model).spec;
  const int data = c.beside.replicate * c.beside.shard;
  // The last data rank has a row less, so its last micro-batch has none.
  const std::string batch = batch_file(spec, kMicroBatches * data - 1, 16);
  const auto expected = run_gradients(config, layout_of(c.beside), batch);
  config.parallelism.pipeline_parallel_degree = c.stages;
  const auto found = run_gradients(config, with_stages(layout_of(c.beside), c.stages), batch);
  expect_same_bits(found, expected);
  std::filesystem::remove(batch);
}

class Pipeline : public ::testing::TestWithParam<std::string> {};

TEST_P(Pipeline, HasTheBitsOfTheSameMicroBatchesWithoutOne) {
  constexpr std::uint32_t kSeed = 3;
  const auto choices = test::cases(
      sizes(), [](const test::Choice& choice) { return is_case(case_of(choice)); }, kSeed);
  bool any = false;
  for (const auto& choice : choices) {
    const Case c = case_of(choice);
    if (c.schedule != GetParam()) continue;
    any = true;
    SCOPED_TRACE(to_string(c));
    EXPECT_NO_THROW(expect_bits_of_no_pipeline(c));
  }
  EXPECT_TRUE(any);
}

INSTANTIATE_TEST_SUITE_P(Kinds, Pipeline, ::testing::ValuesIn(kKinds),
                         [](const auto& each) { return "Kind_" + each.param; });

/// The reference's own batch of two rows, in two micro-batches.
void expect_transformers(const std::string& folder, const std::string& schedule) {
  SCOPED_TRACE(folder + ", " + schedule);
  const Reference& reference = Reference::of(folder);
  auto config = config_for(Layout{});
  config.model.path = data_folder(folder);
  config.pipeline.schedule = schedule;
  config.pipeline.micro_batches = schedule == "DualPipeV" ? 4 : 2;
  config.parallelism.pipeline_parallel_degree = 2;
  expect_within_bounds(run_gradients(config, {.ranks = 2}, reference.batches()), reference);
}

TEST(PipelineOfReferences, EveryFolderIsTransformers) {
  std::vector<std::string> folders = kFolders;
  for (const auto* more : {&kGemmaFolders, &kMoeFolders, &kDeepseekFolders}) {
    folders.insert(folders.end(), more->begin(), more->end());
  }
  for (const auto& folder : folders) {
    EXPECT_NO_THROW(expect_transformers(folder, "1F1B"));
    if (test::full_proof()) {
      EXPECT_NO_THROW(expect_transformers(folder, "ZB1P"));
    }
  }
}

/// 30 steps with a clipped norm.
TEST(PipelineOfTraining, ClippedStepsHaveTheBitsOfNoPipeline) {
  for (const std::string schedule : {"1F1B", "ZBV"}) {
    for (const std::string folder : {"qwen3-fp32", "qwen3-moe-fp32"}) {
      SCOPED_TRACE(folder + ", " + schedule);
      const Reference& reference = Reference::of(folder);
      auto config = training_config(reference, OptimizerKind::kAdamW,
                                    {.micro_batches = MicroBatches::kOneRow});
      config.training.steps = 30;
      config.training.max_norm = 0.5;
      config.model.aux_loss_coef = folder == "qwen3-fp32" ? 0.0 : 0.01;
      config.pipeline.schedule = schedule;
      const auto expected = run_training(config, {}, {30});
      config.parallelism.pipeline_parallel_degree = 2;
      const auto found = run_training(config, {.ranks = 2}, {30});
      EXPECT_EQ(found.losses, expected.losses);
      EXPECT_EQ(found.norms, expected.norms);
    }
  }
}

// ------------------------------------------------------------------------ what is wrong on purpose

enum class Mistake : std::uint8_t { kNone, kCopyNotSummed, kLabelsOfEachStage, kNormOfOneStage };

struct Found {
  at::Tensor embedding;  ///< its gradient
  double norm = 0;
};

/// One step of the tied reference on two stages, as rank 0 has it.
Found step_with(Mistake mistake) {
  const Reference& reference = Reference::of("llama-fp32");
  auto config = config_for(Layout{});
  config.model.path = data_folder("llama-fp32");
  config.parallelism.pipeline_parallel_degree = 2;
  Found found;
  test::ranks(2).run([&](World& world) {
    at::set_num_threads(1);
    const auto source = train::open_model(config.model);
    const auto dims = train::resolve_parallelism(config.parallelism, world.size());
    const auto mesh = world.mesh(train::mesh_shape(dims));
    const auto batch = train::open_gradients_batch(
        reference.batches(), train::vocabulary_of(source.spec, false), std::nullopt);
    const auto plan =
        *train::resolve_pipeline(config, dims, source.spec, source.description, {2, 24});
    auto parts = train::model_parts(source, config, mesh, train::Purpose::kTraining, &plan);
    if (mistake == Mistake::kCopyNotSummed) {
      for (auto& contract : parts.contract.parameters) contract.reductions.copies.clear();
    }
    const auto borders = train::stream_borders(plan, dims, source.description, parts.contract);
    const auto model = train::parallelize(std::move(parts), source, config, mesh);
    train::PipelineOfRun pipeline(plan, borders, *model);
    const test_hooks::Set sums(test_hooks::rank_sum, [&](train::RankSum what,
                                                         const auto& of_ranks) {
      auto sum = train::added_by_rank(of_ranks);
      const bool wrong = mistake == Mistake::kLabelsOfEachStage && what == train::RankSum::kLabels;
      if (wrong) sum[0] *= 2;
      return sum;
    });
    train::StepOptions options;
    options.pipeline = &pipeline;
    train::forward_backward(*model, *batch, 1, {{0, 1}, {1, 2}}, options);
    double norm = gradient_norm(*model);
    if (mistake == Mistake::kNormOfOneStage) {
      norm = 0;
      for (const auto& view : model->shards()) {
        norm += view.shard.grad().to(at::kDouble).square().sum().item<double>();
      }
      norm = std::sqrt(norm);
    }
    train::visit_full_gradients_of_run(
        *model, [&](const std::string& name, const at::Tensor& gradient) {
          if (world.rank() != 0 || name != "model.embed_tokens.weight") return;
          found = {gradient.clone(), norm};
        });
  });
  return found;
}

TEST(PipelineMistakes, AreFarOutsideOfTheBounds) {
  const Tensors& expected = Reference::of("llama-fp32").gradients();
  const at::Tensor embedding = expected.at("model.embed_tokens.weight");
  double norm = 0;
  for (const auto& [name, gradient] : expected) {
    norm += gradient.to(at::kDouble).square().sum().item<double>();
  }
  norm = std::sqrt(norm);
  const auto error = [&](const Found& found) {
    return std::max(relative_error(found.embedding, embedding), std::abs(found.norm / norm - 1));
  };
  EXPECT_LT(error(step_with(Mistake::kNone)), kGradientBound);
  for (const auto mistake :
       {Mistake::kCopyNotSummed, Mistake::kLabelsOfEachStage, Mistake::kNormOfOneStage}) {
    EXPECT_GT(error(step_with(mistake)), 100 * kGradientBound) << static_cast<int>(mistake);
  }
}

}  // namespace
}  // namespace tessera::golden::pipeline_test
