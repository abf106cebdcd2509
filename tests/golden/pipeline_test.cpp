// Pipelines against the same layout and micro-batches without one: loss, logits, gradients, losses,
// norms and weights of clipped steps bit for bit, a tied weight within fp32's noise. Against
// transformers: pipeline_references_test.cpp.
//
// The class of bug: a stage that sums in another order or dtype, misses a micro-batch, divides by
// the stages, or takes another stage's rows. A pairwise part in ./test, all of it under
// `scripts/full pipeline`.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <tuple>

#include "base/test_hooks.h"
#include "golden/degrees.h"
#include "golden/model_folder.h"
#include "golden/pipeline_case.h"
#include "golden/reference.h"
#include "models/model_spec.h"
#include "proof.h"
#include "support/ranks.h"
#include "support/test.h"
#include "tessera/clip.h"
#include "train/contract_of_run.h"
#include "train/data/data.h"
#include "train/gradients.h"
#include "train/hf/model_source.h"
#include "train/parallelize.h"
#include "train/pipeline/pipeline_step.h"
#include "train/step.h"
#include "unit/train/parallel_degrees.h"

namespace tessera::golden::pipeline_test {
namespace {

// Whose head has a weight of its own: a tied one mixes two streams of addends (bounds, not bits).
// The last is drawn, as the folders have four layers and a V of four ranks takes eight.
const std::string kEightLayers = "qwen3-moe of 8 layers";
const std::vector<std::string> kUntied{"qwen3-fp32",       "qwen3-moe-fp32", "gpt-oss-fp32",
                                       "deepseek-v2-fp32", "mistral-fp32",   kEightLayers};
const std::vector<Degrees> kDegrees{{},
                                    {.shard = 2},
                                    {.shard = 2, .ep = 2},
                                    {.tp = 2},
                                    {.cp = 2},
                                    {.cp = 2, .form = ContextForm::kHeads},
                                    {.ep = 2, .cp = 2}};
constexpr bool kBFloat16[] = {false, true};
constexpr int kMicroBatches = 8;

std::vector<std::size_t> sizes() {
  return {kUntied.size(),       kKinds.size(),     std::size(kRanks),  kDegrees.size(),
          std::size(kBFloat16), std::size(kModes), std::size(kReshard)};
}

PipelineCase case_of(const test::Choice& choice) {
  return {kUntied[choice[0]],   kKinds[choice[1]], kRanks[choice[2]],  kDegrees[choice[3]],
          kBFloat16[choice[4]], kModes[choice[5]], kReshard[choice[6]]};
}

bool has_experts(const std::string& folder) {
  return folder != "qwen3-fp32" && folder != "mistral-fp32";
}

/// A stage has a layer at least.
bool is_case(const PipelineCase& c) {
  if (c.degrees.ep > 1 && !has_experts(c.folder)) return false;
  return c.stages * (has_several_stages(c.schedule) ? 2 : 1) <= (c.folder == kEightLayers ? 8 : 4);
}

/// config.json of qwen3-moe-fp32 with twice the layers.
std::string eight_layers() {
  static const std::filesystem::path path = [] {
    auto config = nlohmann::json::parse(read_file(data_folder("qwen3-moe-fp32") / "config.json"));
    config["num_hidden_layers"] = 8;
    const auto file = temporary_path("eight_layers.json");
    std::ofstream(file) << config.dump();
    return file;
  }();
  return path;
}

void set_eight_layers(train::ModelConfig& model) {
  model.path.clear();
  model.config = eight_layers();
}

train::Config config_of(const PipelineCase& c) {
  auto config = config_for(c.folder == kEightLayers ? "qwen3-moe-fp32" : c.folder, c.degrees);
  if (c.folder == kEightLayers) set_eight_layers(config.model);
  config.activation_checkpoint.mode = c.recompute;
  if (c.bfloat16) config.precision = {};
  if (has_experts(c.folder)) config.model.aux_loss_coef = 0.1;  // with each kind and layout
  config.pipeline.schedule = c.schedule;
  config.pipeline.micro_batches = kMicroBatches;
  config.pipeline.reshard = c.reshard;
  return config;
}

void expect_bits_of_no_pipeline(const PipelineCase& c) {
  auto config = config_of(c);
  const auto spec = train::open_model(config.model).spec;
  const int data = c.degrees.replicate * c.degrees.shard;
  // The last data rank has a row less, so its last micro-batch has none.
  const std::string batch = batch_file(spec, kMicroBatches * data - 1, 16);
  const auto expected = run_gradients(config, layout_of(c.degrees), batch);
  config.parallelism.pipeline_parallel_degree = c.stages;
  const auto found = run_gradients(config, with_stages(layout_of(c.degrees), c.stages), batch);
  expect_same_bits(found, expected);
  std::filesystem::remove(batch);
}

// Else the comparisons below say nothing of it.
TEST(PipelineCases, TheAuxiliaryLossMovesTheGradientsOfEveryFolderWithExperts) {
  for (const auto& folder : kUntied) {
    if (!has_experts(folder)) continue;
    PipelineCase c;
    c.folder = folder;
    c.schedule = "1F1B";
    auto config = config_of(c);
    const std::string batch = batch_file(train::open_model(config.model).spec, kMicroBatches, 16);
    const auto with = run_gradients(config, {}, batch);
    config.model.aux_loss_coef = 0.0;
    const auto without = run_gradients(config, {}, batch);
    std::filesystem::remove(batch);
    const auto is_router = [](const auto& each) {
      return each.first.ends_with(".gate.weight") || each.first.ends_with("router.weight");
    };
    const auto router = std::ranges::find_if(without.by_name, is_router);
    ASSERT_NE(router, without.by_name.end()) << folder;
    EXPECT_GT(relative_error(with.by_name.at(router->first), router->second), 1e-3) << folder;
  }
}

class Pipeline : public ::testing::TestWithParam<std::string> {};

TEST_P(Pipeline, HasTheBitsOfTheSameMicroBatchesWithoutOne) {
  constexpr std::uint32_t kSeed = 3;
  const auto choices = test::cases(
      sizes(), [](const test::Choice& choice) { return is_case(case_of(choice)); }, kSeed);
  bool any = false;
  for (const auto& choice : choices) {
    const PipelineCase c = case_of(choice);
    if (c.schedule != GetParam()) continue;
    any = true;
    SCOPED_TRACE(to_string(c));
    EXPECT_NO_THROW(expect_bits_of_no_pipeline(c));
  }
  EXPECT_TRUE(any);
}

INSTANTIATE_TEST_SUITE_P(Kinds, Pipeline, ::testing::ValuesIn(kKinds),
                         [](const auto& each) { return "Kind_" + each.param; });

// ------------------------------------------------------------------------ one weight at both ends

/// A folder whose head is its embedding: on the ranks of two stages, or of one (a V).
constexpr const char* kTiedFolder = "llama-fp32";
constexpr const char* kTiedName = "model.embed_tokens.weight";

struct TiedCase {
  std::string schedule;
  int stages = 2;  ///< ranks of axis pp: of 4 the two in the middle have no copy
  Degrees degrees;
  bool bfloat16 = false;
  train::PipelineReshard reshard = train::PipelineReshard::kStep;
  bool sync_every = false;
};

std::string to_string(const TiedCase& c) {
  return concat(c.schedule, " of ", c.stages, " ranks, ", to_string(c.degrees),
                c.bfloat16 ? ", bf16" : ", fp32",
                c.reshard == train::PipelineReshard::kStep ? "" : ", gathered for each micro-batch",
                c.sync_every ? ", reduced after each micro-batch" : "");
}

const std::vector<std::string> kTiedKinds{"1F1B", "ZB1P", "ZBV"};
const std::vector<Degrees> kTiedDegrees{
    {}, {.shard = 2}, {.replicate = 2}, {.replicate = 2, .shard = 2}, {.tp = 2}};

// The floats of both ends are added in another order than without a pipeline (first + last, each
// over all micro-batches), so each is off by a few 2^-24 of what is added: 6e-8 each, and so is any
// norm of them.
constexpr double kOtherOrder = 2e-6;

void expect_sums_in_another_order(const Tensors& found, const Tensors& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, gradient] : expected) {
    EXPECT_LT(relative_error(found.at(name), gradient), kOtherOrder) << name;
  }
}

void expect_sums_of_no_pipeline(const TiedCase& c) {
  constexpr int kPieces = 4;
  auto config = config_for(kTiedFolder, c.degrees);
  if (c.bfloat16) config.precision = {};
  config.training.sync_every_micro_batch = c.sync_every;
  config.pipeline.schedule = c.schedule;
  config.pipeline.micro_batches = kPieces;
  config.pipeline.reshard = c.reshard;
  const int data = c.degrees.replicate * c.degrees.shard;
  const std::string batch =
      batch_file(train::open_model(config.model).spec, kPieces * data - 1, 16);
  auto expected = run_gradients(config, layout_of(c.degrees), batch);
  config.parallelism.pipeline_parallel_degree = c.stages;
  auto found = run_gradients(config, with_stages(layout_of(c.degrees), c.stages), batch);
  std::filesystem::remove(batch);
  if (c.sync_every && c.schedule != "1F1B") {
    // The gradients left by an I are issued with an earlier micro-batch (docs/pipeline.md).
    EXPECT_EQ(found.loss, expected.loss);
    EXPECT_TRUE(test::same_bits(found.logits, expected.logits)) << "logits";
    return expect_sums_in_another_order(found.by_name, expected.by_name);
  }
  const auto only_tied = [](Gradients& of) {
    auto node = of.by_name.extract(kTiedName);
    EXPECT_FALSE(node.empty());
    return Tensors{{kTiedName, node.empty() ? at::Tensor() : node.mapped()}};
  };
  expect_sums_in_another_order(only_tied(found), only_tied(expected));
  expect_same_bits(found, expected);  // of all others
}

TEST(PipelineOfTiedEnds, HasTheSumsOfNoPipelineAndTheBitsOfWhatIsNotTied) {
  constexpr std::uint32_t kSeed = 5;
  const std::vector<std::size_t> all{
      kTiedKinds.size(), std::size(kRanks), kTiedDegrees.size(), 2, std::size(kReshard), 2};
  const auto case_of_tied = [](const test::Choice& choice) {
    return TiedCase{kTiedKinds[choice[0]], kRanks[choice[1]],   kTiedDegrees[choice[2]],
                    kBFloat16[choice[3]],  kReshard[choice[4]], choice[5] == 1};
  };
  const auto has_layers = [&](const test::Choice& choice) {  // four
    return case_of_tied(choice).stages == 2 || case_of_tied(choice).schedule != "ZBV";
  };
  for (const auto& choice : test::cases(all, has_layers, kSeed)) {
    const TiedCase c = case_of_tied(choice);
    SCOPED_TRACE(to_string(c));
    EXPECT_NO_THROW(expect_sums_of_no_pipeline(c));
  }
}

// ------------------------------------------------------------------------ scaled losses

// Naive: each stage checks its own gradients alone, and others continue with another scale. It is
// halved, so that there are passes in which only one stage has gradients that are too large.
TEST(PipelineOfFloat16, AScaleThatIsTooLargeForOneStageIsLoweredOnAll) {
  constexpr double kScale = 0x1p26;
  constexpr double kLargest = 65504;
  for (const std::string folder : {"qwen3-fp32", "qwen3-moe-fp32"}) {
    PipelineCase c;
    c.folder = folder;
    c.schedule = "1F1B";
    auto config = config_of(c);
    config.precision = {};
    config.precision.param_dtype.dtype = DType::kFloat16;
    config.grad_scaler.init_scale = kScale;
    const std::string batch = batch_file(train::open_model(config.model).spec, kMicroBatches, 16);
    const auto expected = run_gradients(config, {}, batch);
    int too_large = 0;
    for (const auto& [name, gradient] : expected.by_name) {
      EXPECT_TRUE(gradient.isfinite().all().item<bool>()) << name;
      too_large += gradient.abs().max().item<double>() * kScale > 8 * kLargest ? 1 : 0;
    }
    EXPECT_GT(2 * too_large, std::ssize(expected.by_name)) << "at the first scale, and some more";
    config.parallelism.pipeline_parallel_degree = 2;
    for (const std::string schedule : {"1F1B", "ZBV"}) {
      SCOPED_TRACE(concat(folder, ", ", schedule));
      config.pipeline.schedule = schedule;
      expect_same_bits(run_gradients(config, {.ranks = 2}, batch), expected);
    }
    std::filesystem::remove(batch);
  }
}

// ------------------------------------------------------------------------ adapters

/// Whose second factors are no longer zero, since then the first ones would count for nothing.
std::filesystem::path trained_adapters(const std::string& folder, const LoraRequest& lora) {
  auto config = training_config(Reference::of(folder), OptimizerKind::kAdamW, {});
  config.lora = lora;
  config.optimizer.lr = 0.05;
  config.training.steps = 2;
  config.checkpoint.folder = temporary_path("adapters");
  run_training(config, {});
  return std::filesystem::path(config.checkpoint.folder) / "step-2";
}

// Logits are of the model as it is used, gradients of its training: naive, both are dropped out.
void expect_the_bits_of_one_stage(const std::string& folder, const LoraRequest& lora) {
  PipelineCase c;
  c.folder = folder;
  c.schedule = "1F1B";
  auto config = config_of(c);
  config.model.path = trained_adapters(folder, lora);
  const std::string batch = batch_file(train::open_model(config.model).spec, kMicroBatches, 16);
  const auto expected = run_gradients(config, {}, batch);
  EXPECT_GT(relative_error(expected.logits, run_gradients(config_of(c), {}, batch).logits), 1e-3)
      << "adapters that count";
  config.parallelism.pipeline_parallel_degree = 2;
  for (const std::string schedule : {"1F1B", "ZBV"}) {
    SCOPED_TRACE(schedule);
    config.pipeline.schedule = schedule;
    expect_same_bits(run_gradients(config, {.ranks = 2}, batch), expected);
  }
  std::filesystem::remove(batch);
}

TEST(PipelineOfAdapters, WithDropoutHasTheLogitsWithoutAndTheGradientsWithIt) {
  expect_the_bits_of_one_stage(
      "qwen3-fp32", {.rank = 2, .alpha = 8.0, .targets = {"q_proj", "o_proj"}, .dropout = 0.3});
}

TEST(PipelineOfAdapters, OfExpertsHasTheBitsOfOneStage) {
  expect_the_bits_of_one_stage("qwen3-moe-fp32",
                               {.rank = 2, .alpha = 8.0, .targets = {"experts.*"}});
}

// ------------------------------------------------------------------------ training

struct Training {
  std::string folder;
  std::string schedule;
  bool bfloat16 = false;
  int stages = 2;  ///< ranks of axis pp
};

/// Micro-batches of a row.
train::Config clipped_training(const std::string& folder, int steps) {
  const bool drawn = folder == kEightLayers;
  auto config = training_config(Reference::of(drawn ? "qwen3-moe-fp32" : folder),
                                OptimizerKind::kAdamW, {.micro_batches = MicroBatches::kOneRow});
  if (drawn) set_eight_layers(config.model);
  config.training.steps = steps;
  config.training.max_norm = 0.05;
  return config;
}

void expect_clipped(const TrainingRun& run, double max_norm) {
  for (std::size_t step = 0; step < run.norms.size(); ++step) {
    EXPECT_GT(run.norms[step], max_norm) << "step " << step + 1 << " was not clipped";
  }
}

TEST(PipelineOfTraining, ClippedStepsHaveTheBitsOfNoPipeline) {
  const int steps = test::full_proof() ? 30 : 10;
  const std::vector<Training> all{
      {"qwen3-fp32", "1F1B"},
      {"qwen3-fp32", "ZBV", true},
      {"qwen3-fp32", "ZB1P"},
      {"qwen3-moe-fp32", "1F1B", true},
      {"qwen3-moe-fp32", "ZBV"},
      {"qwen3-moe-fp32", "ZB1P", true},
      {"qwen3-fp32", "DualPipeV"},
      {"qwen3-fp32", "GPipe", true},
      {"qwen3-moe-fp32", "Interleaved1F1B"},
      {"qwen3-fp32", "InterleavedZeroBubble", true},
      {"qwen3-moe-fp32", "Paired1F1B"},
      {kEightLayers, "1F1B", true, 4},
      {kEightLayers, "ZBV", false, 4},
  };
  std::map<std::tuple<std::string, bool, bool>, TrainingRun> without;
  for (const auto& training : all) {
    SCOPED_TRACE(concat(training.folder, ", ", training.schedule, " of ", training.stages, " ranks",
                        training.bfloat16 ? ", bf16" : ""));
    auto config = clipped_training(training.folder, steps);
    if (training.bfloat16) config.precision = {};
    config.model.aux_loss_coef = has_experts(training.folder) ? 0.01 : 0.0;
    // These take four micro-batches, twice the rows of the reference.
    const std::string batch = batch_file(train::open_model(config.model).spec, 4, 24);
    const bool takes_four = training.schedule == "DualPipeV" || training.schedule == "Paired1F1B" ||
                            training.stages == 4;
    if (takes_four) config.data.path = {batch};
    const auto [place, is_new] =
        without.try_emplace({training.folder, training.bfloat16, takes_four});
    TrainingRun& expected = place->second;
    if (is_new) {
      expected = run_training(config, {}, {steps});
      ASSERT_EQ(expected.norms.size(), static_cast<std::size_t>(steps));
      expect_clipped(expected, config.training.max_norm);
    }
    config.pipeline.schedule = training.schedule;
    config.parallelism.pipeline_parallel_degree = training.stages;
    const auto found = run_training(config, {.ranks = training.stages}, {steps});
    std::filesystem::remove(batch);
    EXPECT_EQ(found.losses, expected.losses);
    EXPECT_EQ(found.norms, expected.norms);
    expect_same_bits(found.parameters.at(steps), expected.parameters.at(steps));
  }
}

// Each end steps its own copy: run_training finds them alike bit for bit. What the pair adds to the
// norm is counted once.
TEST(PipelineOfTraining, TiedEndsStayAlikeAndCountOnce) {
  constexpr int kSteps = 6;
  for (const std::string schedule : {"1F1B", "ZB1P"}) {
    for (const Degrees& degrees : {Degrees{}, Degrees{.shard = 2}, Degrees{.replicate = 2}}) {
      SCOPED_TRACE(concat(schedule, ", ", to_string(degrees)));
      auto config = clipped_training(kTiedFolder, kSteps);
      train::set_parallelism(config, degrees);
      config.pipeline.schedule = schedule;
      // Each data rank has a micro-batch for each stage.
      const std::string batch = batch_file(train::open_model(config.model).spec, 4, 24);
      config.data.path = {batch};
      const auto expected = run_training(config, layout_of(degrees), {kSteps});
      config.parallelism.pipeline_parallel_degree = 2;
      const auto found = run_training(config, with_stages(layout_of(degrees), 2), {kSteps});
      std::filesystem::remove(batch);
      expect_clipped(expected, config.training.max_norm);
      ASSERT_EQ(found.norms.size(), static_cast<std::size_t>(kSteps));
      EXPECT_NEAR(found.norms[0] / expected.norms[0], 1.0, kOtherOrder);
      for (std::size_t step = 0; step < found.losses.size(); ++step) {
        EXPECT_NEAR(found.losses[step], expected.losses[step], kStepLossBound);
      }
      ASSERT_EQ(found.parameters.at(kSteps).size(), expected.parameters.at(kSteps).size());
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
    const test_hooks::Set labels(test_hooks::data_ranks_of_sum, [&](train::RankSum what,
                                                                    comm::Group* data) {
      const bool wrong = mistake == Mistake::kLabelsOfEachStage && what == train::RankSum::kLabels;
      return wrong ? &world.control() : data;
    });
    const test_hooks::Set norms(test_hooks::stages_of_norm, [&](comm::Group* stages) {
      return mistake == Mistake::kNormOfOneStage ? nullptr : stages;
    });
    train::StepOptions options;
    options.pipeline = &pipeline;
    train::forward_backward(*model, *batch, 1, {{0, 1}, {1, 2}}, options);
    const double norm = gradient_norm(*model);
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
