// A run whose steps follow plans is the run without them, bit for bit: every family, for all
// choices of what is gathered, kept and reduced when; and so is one whose regions are replayed. In
// pipelines: replayed_pipeline_test.cpp.
//
// ./test has a few layouts of each kind of family, each of them with one form and one budget of
// two; TESSERA_FULL=1 (`scripts/full compiled`) every folder in every form of layout under every
// way to recompute.

#include <random>
#include <span>

#include "golden/degrees.h"
#include "golden/model_folder.h"
#include "golden/same_runs.h"
#include "proof.h"
#include "support/test.h"

namespace tessera::golden::planned_steps_test {
namespace {

struct Family {
  std::string folder;
  std::vector<Degrees> layouts;  ///< in ./test --all
  unsigned first_seed = 1;       ///< of drawn_config there, each layout's two behind the last one's
  unsigned replayed_seed = 11;   ///< of the one layout that is replayed there, 11 for the first one
};
void PrintTo(const Family& family, std::ostream* out) { *out << family.folder; }

// In ./test --all a family has one of the two halves of the layouts of its kind.
const std::vector<Degrees> kDense{{}, {.replicate = 2, .shard = 2}};
const std::vector<Degrees> kDenseToo{{.shard = 2}, {.tp = 2}};
const std::vector<Degrees> kExperts{{.shard = 2, .ep = 2}, {.shard = 2, .tp = 2}};
const std::vector<Degrees> kExpertsToo{{.tp = 2, .ep = 2}};
const Degrees kReplicatedExperts{.replicate = 2, .shard = 2, .ep = 2};

std::vector<Family> families() {
  std::vector<Family> all{{"qwen3-fp32", kDense},
                          {"llama-mixed", kDenseToo, 2},
                          {"qwen2-mixed", kDense, 1, 12},
                          {"mistral-fp32", kDenseToo, 2, 12},
                          {"olmo2-mixed", kDense},
                          {"gemma3-text-mixed", kDenseToo, 2},
                          {"granite-mixed", kDenseToo, 2},
                          {"smollm3-mixed", kDense, 1, 12},
                          {"phi3-mixed", kDenseToo, 2, 12},
                          {"phi4-mini-fp32", {{.tp = 2}}},
                          {"gpt2-mixed", kDense, 1, 12},
                          {"qwen3-5-text-mixed", {{.tp = 2}}},
                          {"mixtral-mixed", kExperts},
                          {"qwen3-moe-mixed", kExpertsToo, 2},
                          {"qwen3-next-mixed", kExpertsToo, 2},
                          {"gpt-oss-mixed", kExperts, 1, 12},
                          {"deepseek-v2-mixed", kExpertsToo, 2},
                          {"gemma4-mixed", kExperts},
                          {"llama-fp32", {{.tp = 2, .sequence = false}}},
                          {"qwen3-moe-fp32", {{.tp = 2, .sequence = false}}},
                          {"deepseek-v3-mixed", {{.tp = 2, .etp = 2}}},
                          {"deepseek-v2-group-mixed", {kReplicatedExperts}},
                          {"glm4-moe-mixed", {{.shard = 2, .ep = 2}}},
                          {"nemotron-h-mixed", {{.tp = 2}}},
                          {"llama4-text-mixed", {{.tp = 2, .router = RouterTokens::kAll}}},
                          {"gpt-oss-mxfp4", {{.shard = 2, .tp = 2, .ep = 2, .etp = 2}}}};
  if (!test::full_proof()) return all;
  for (const auto* folders : {&kFolders, &kGpt2Folders, &kGemmaFolders, &kMoeFolders,
                              &kDeepseekFolders, &kSharedExpertFolders}) {
    for (const auto& folder : *folders) {
      const auto is_it = [&](const Family& family) { return family.folder == folder; };
      if (std::ranges::none_of(all, is_it)) all.push_back({folder, {}});
    }
  }
  return all;
}

/// Layers with a state are none of what is replayed, and named.
void expect_states_eager(const std::string& folder, const TrainingRun& run) {
  const bool keeps_states =
      std::ranges::count(spec_of(folder).layer_types, models::LayerType::kLinear) > 0;
  for (const ReplayCalls& calls : run.regions) {
    const bool is_named = std::ranges::any_of(calls.eager, [](const auto& reason) {
      return reason.first.find("a layer with a state") != std::string::npos;
    });
    EXPECT_EQ(is_named, keeps_states);
  }
}

bool is_gemma4(const std::string& folder) { return folder.starts_with("gemma4"); }

/// Those of the family that this run goes through.
std::vector<Degrees> layouts_of(const Family& family) {
  if (!test::full_proof()) return family.layouts;
  auto all = one_of_each_form(experts_of(family.folder));
  if (experts_of(family.folder) == Experts::kSome) all.push_back(kReplicatedExperts);
  std::erase_if(all, [&](const Degrees& degrees) {
    // Two rows have images: some ranks would have none.
    const bool lacks_rows = is_gemma4(family.folder) && degrees.replicate * degrees.shard > 2;
    return lacks_rows || heads_of(family.folder) % degrees.tp != 0;
  });
  return all;
}

/// In ./test --all `first` or `second` alone, in turn.
template <class Item>
std::vector<Item> one_of(const Item& first, const Item& second, unsigned turn) {
  return test::in_turn(std::vector{first, second}, 2, std::vector{0U, 1U}, turn % 2);
}

class PlannedSteps : public ::testing::TestWithParam<Family> {};

constexpr std::int64_t kTokens = 24;  ///< of rows that are no reference's

/// The reference has two rows. Where that is none or, in the full proof, one for some rank, others.
std::string rows_of(const std::string& folder, const Degrees& degrees) {
  const int data = degrees.replicate * degrees.shard;
  const bool has_rows = data == 1 || (data == 2 && !test::full_proof());
  if (has_rows || is_gemma4(folder)) return Reference::of(folder).batches();
  return batch_file(spec_of(folder), test::full_proof() ? 2 * data : data, kTokens);
}

/// Draws the settings that a plan may depend on.
train::Config drawn_config(const std::string& folder, const Degrees& degrees, unsigned seed) {
  std::mt19937 random(seed);
  auto layout = layout_of(degrees);
  const bool one_row = random() % 2 == 0;
  layout.micro_batches = one_row ? MicroBatches::kOneRow : MicroBatches::kWhole;
  auto config = training_config(Reference::of(folder), OptimizerKind::kAdamW, layout);
  const auto of_layout = config_for(folder, degrees);
  config.model = of_layout.model;
  config.parallelism = of_layout.parallelism;
  config.data.path = {rows_of(folder, degrees)};
  config.parallelism.reshard_after_forward = random() % 4 != 0;
  config.training.sync_every_micro_batch = random() % 3 == 0;
  config.activation_checkpoint.mode = static_cast<RecomputeMode>(random() % 3);
  balance_experts(config, spec_of(folder), seed);
  return config;
}

/// The least of any plan, as its refusal names it.
std::int64_t least_budget(train::Config config, const Layout& layout) {
  config.compile.memory_budget = train::MemoryBudget{.bytes = 1};
  try {
    run_training(config, layout, {});
  } catch (const std::exception& error) {
    const std::string text = error.what();
    const std::string before = "expected at least ";
    const auto at = text.find(before);
    if (at != std::string::npos) return std::stoll(text.substr(at + before.size()));
    ADD_FAILURE() << text;
  }
  return 0;
}

// Naive: a unit that is read before its gather, weights of the last step, half of a sum.
TEST_P(PlannedSteps, TrainAsWithoutPlans) {
  const auto& folder = GetParam().folder;
  unsigned seed = test::full_proof() ? 1 : GetParam().first_seed;
  for (const Degrees& degrees : layouts_of(GetParam())) {
    auto config = drawn_config(folder, degrees, seed);
    seed += test::full_proof() ? 1 : 2;
    SCOPED_TRACE(to_string(degrees));
    const unsigned turn = seed / 2;
    const auto run = [&](train::CompileChoice mode, int form) {
      config.compile.mode = mode;
      config.compile.form = form;
      return run_training(config, layout_of(degrees), {6});
    };
    const auto expected = run(train::CompileChoice::kOff, 3);
    for (const int form : one_of(3, config.training.sync_every_micro_batch ? 2 : 1, turn)) {
      SCOPED_TRACE(concat("form ", form));
      expect_same(run(train::CompileChoice::kPlan, form), expected, 6);
    }
    // Where no mode of recomputation is set, and memory is short, the plan tells each layer.
    config.activation_checkpoint.mode.reset();
    const bool is_reference = config.data.path.front() == Reference::of(folder).batches();
    config.training.seq_len =
        is_reference ? Reference::of(folder).result("input_ids").size(1) : kTokens;
    config.compile.mode = train::CompileChoice::kPlan;
    config.compile.form = 3;
    const auto least = least_budget(config, layout_of(degrees));
    for (const std::int64_t more : one_of(std::int64_t{0}, least / 4, turn + 1)) {
      SCOPED_TRACE(concat("budget ", least, " + ", more));
      config.compile.memory_budget = train::MemoryBudget{.bytes = least + more};
      expect_same(run(train::CompileChoice::kPlan, 3), expected, 6);
    }
  }
}

/// How layers are recomputed: in ./test as it was drawn.
std::vector<RecomputeMode> modes_of(const train::Config& drawn) {
  if (!test::full_proof()) return {*drawn.activation_checkpoint.mode};
  return {RecomputeMode::kNone, RecomputeMode::kFull, RecomputeMode::kSelective};
}

/// Computed in fp32, or with the defaults in bf16.
train::PrecisionConfig precision_of(unsigned number) {
  train::PrecisionConfig precision;
  if (number % 2 == 0) precision.param_dtype.dtype = DType::kFloat32;
  return precision;
}

// Naive: memory that the last replay wrote, a gradient that is added twice or not at all, a layer
// that reads what another one's scratch has become.
TEST_P(PlannedSteps, TrainAsWithoutReplays) {
  const auto& folder = GetParam().folder;
  unsigned seed = 10;
  for (const Degrees& degrees : layouts_of(GetParam())) {
    if (++seed != GetParam().replayed_seed && !test::full_proof()) continue;
    auto config = drawn_config(folder, degrees, seed);
    config.training.steps = 8;
    for (const auto mode : modes_of(config)) {
      SCOPED_TRACE(concat(to_string(degrees), ", recompute mode ", static_cast<int>(mode)));
      config.activation_checkpoint.mode = mode;
      config.precision = precision_of(seed + static_cast<unsigned>(mode));
      config.compile.mode = train::CompileChoice::kOff;
      const auto expected = run_training(config, layout_of(degrees), {8});
      config.compile.mode = train::CompileChoice::kReplay;
      const auto found = run_training(config, layout_of(degrees), {8});
      expect_same(found, expected, 8);
      expect_replayed(found);
      expect_states_eager(folder, found);
    }
  }
}

// Through the batch as often as it takes until regions are replayed; the last time counts.
TEST_P(PlannedSteps, GiveTheGradientsOfEagerSteps) {
  const auto& folder = GetParam().folder;
  unsigned seed = 20;
  auto layouts = layouts_of(GetParam());
  if (!test::full_proof()) layouts.resize(1);
  for (const Degrees& degrees : layouts) {
    auto config = drawn_config(folder, degrees, ++seed);
    config.precision = precision_of(seed);
    SCOPED_TRACE(to_string(degrees));
    const auto batch = config.data.path.front();
    const auto run = [&](train::CompileChoice mode) {
      config.compile.mode = mode;
      return run_gradients(config, layout_of(degrees), batch);
    };
    expect_same_bits(run(train::CompileChoice::kReplay), run(train::CompileChoice::kOff));
  }
}

struct ReplayedRun : ::testing::Test {
  static train::Config config_of(const char* folder, const Layout& layout) {
    auto config = training_config(Reference::of(folder), OptimizerKind::kAdamW, layout);
    config.training.steps = 10;
    return config;
  }
  static constexpr Layout kLayout{.ranks = 2, .micro_batches = MicroBatches::kOneRow};
  static void expect_alike(const train::Config& config) {
    const auto expected = run_training(config, kLayout, {10});
    auto replayed = config;
    replayed.compile.mode = train::CompileChoice::kReplay;
    const auto found = run_training(replayed, kLayout, {10});
    expect_same(found, expected, 10);
    expect_replayed(found);
  }
};

TEST_F(ReplayedRun, OfAdaptersIsTheSame) {
  auto config = config_of("qwen3-fp32", kLayout);
  config.lora.rank = 4;
  config.lora.alpha = 10.0;
  config.lora.targets = {"q_proj", "v_proj", "down_proj"};
  config.optimizer.lr = 0.05;
  expect_alike(config);
}

// Steps are left out until the scale fits: gradients that are not finite go the same way.
TEST_F(ReplayedRun, UnderALossScaleIsTheSame) {
  auto config = config_of("qwen3-fp32", kLayout);
  config.precision = {};
  config.precision.param_dtype.dtype = DType::kFloat16;
  config.grad_scaler.init_scale = 0x1p30;
  config.grad_scaler.backoff_factor = 0x1p-8;
  expect_alike(config);
}

// Products are added to slots that other micro-batches have written, and reductions come between.
TEST_F(ReplayedRun, OfSeveralMicroBatchesOnEachRankIsTheSame) {
  for (const bool sync_every : {false, true}) {
    SCOPED_TRACE(sync_every);
    auto config = config_of("qwen3-fp32", kLayout);
    config.data.path = {batch_file(spec_of("qwen3-fp32"), 6, 24)};
    config.precision = {};
    config.training.sync_every_micro_batch = sync_every;
    config.activation_checkpoint.mode =
        sync_every ? RecomputeMode::kSelective : RecomputeMode::kFull;
    config.training.max_norm = 0.05;
    expect_alike(config);
  }
}

TEST_F(ReplayedRun, ResumesFromACheckpointAsIfItHadNotEnded) {
  auto config = config_of("qwen3-fp32", kLayout);
  const auto expected = run_training(config, kLayout, {10});
  config.compile.mode = train::CompileChoice::kReplay;
  config.checkpoint.folder = temporary_path("replayed");
  config.training.steps = 5;
  run_training(config, kLayout);
  config.training.steps = 10;
  const auto found = run_training(config, kLayout, {10});
  expect_replayed(found);
  ASSERT_EQ(found.losses.size(), 5U);
  EXPECT_TRUE(std::ranges::equal(found.losses, std::span(expected.losses).last(5)));
  for (const auto& [name, value] : expected.parameters.at(10)) {
    EXPECT_TRUE(at::equal(value, found.parameters.at(10).at(name))) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Families, PlannedSteps, ::testing::ValuesIn(families()),
                         [](const auto& each) { return test_name(each.param.folder); });

}  // namespace
}  // namespace tessera::golden::planned_steps_test
