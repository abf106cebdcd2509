// Experts balanced without an auxiliary loss (model.load_balance_coeff), over whole runs: every
// token is counted once, in every layout, and every rank has the same bias.

#include <numeric>

#include "models/expert_bias.h"
#include "support/test.h"
#include "train/expert_balance.h"
#include "train/hf/hf_export.h"
#include "train/parallelize.h"
#include "train/step.h"
#include "train/trainer.h"
#include "unit/train/parallel_degrees.h"
#include "unit/train/run_case.h"

namespace tessera::train::load_balance_of_run_test {
namespace {

constexpr double kCoefficient = 1e-3;
constexpr std::int64_t kLayers = 4;
constexpr std::int64_t kTokens = 48;  ///< two rows of 24 in a batch of the reference

struct BalanceCase {
  std::string name;
  int replicate = 1;
  int shard = 1;
  int tp = 1;
  int ep = 1;
  int etp = 1;
  RouterTokens router = RouterTokens::kShards;
  bool sequence = true;
  RecomputeMode recompute = RecomputeMode::kNone;
  std::int64_t local_batch = 2;
  std::string family = "qwen3-moe-fp32";
  std::int64_t experts_per_token = 3;
  std::int64_t layers = kLayers;  ///< with experts
  int ranks() const { return replicate * shard * tp; }
};

std::ostream& operator<<(std::ostream& out, const BalanceCase& c) { return out << c.name; }

/// The reference's weights and batches: some labels are -100, whose tokens are tokens all the same.
Config balanced(const TemporaryFolder& folder, const BalanceCase& c) {
  Config config = run_case(folder, Head::kOwn);
  const std::string reference = std::string(TESSERA_TEST_DATA) + "/" + c.family;
  config.model.config.clear();
  config.model.path = reference;
  config.model.load_balance_coeff = kCoefficient;
  config.data.path = {reference + "/reference.safetensors"};
  set_parallelism(config, c);
  config.activation_checkpoint.mode = c.recompute;
  config.precision.param_dtype.dtype = DType::kFloat32;
  config.training.seq_len.reset();
  config.training.local_batch_size = c.local_batch;
  config.training.steps = 4;
  config.optimizer.lr = 1e-3;
  return config;
}

using Biases = std::vector<std::vector<float>>;  ///< by layer

Biases biases_of(const ShardedBase& model) {
  Biases biases;
  for (const BufferView& view : model.buffers()) {
    if (!models::HasExpertBias::is_name(view.contract->name)) continue;
    EXPECT_EQ(view.contract->storage, DType::kFloat32);
    EXPECT_EQ(view.contract->compute, DType::kFloat32);
    const auto* data = view.tensor.const_data_ptr<float>();
    biases.emplace_back(data, data + view.tensor.numel());
  }
  return biases;
}

struct BalancedRun {
  std::vector<Biases> steps;   ///< of rank 0, after each step
  std::vector<double> losses;  ///< of each step
};

/// Every rank has what rank 0 has.
BalancedRun run(const Config& config, int ranks) {
  std::vector<BalancedRun> runs(static_cast<std::size_t>(ranks));
  on_ranks(ranks, [&](World& world) {
    BalancedRun& mine = runs[static_cast<std::size_t>(world.rank())];
    TrainingHooks hooks;
    hooks.after_step = [&](const StepMetrics& metrics, const ShardedBase& model) {
      mine.steps.push_back(biases_of(model));
      mine.losses.push_back(metrics.loss);
    };
    run_training(config, world, hooks);
  });
  for (const BalancedRun& other : runs) EXPECT_EQ(other.steps, runs.front().steps);
  return runs.front();
}

/// How often each expert was chosen in the first batch, by layer.
std::vector<std::vector<double>> chosen_by(const Config& config, int ranks) {
  std::vector<std::vector<double>> chosen;
  on_ranks(ranks, [&](World& world) {
    const ModelSource source = open_model(config.model);
    const ParallelDims dims = resolve_parallelism(config.parallelism, ranks);
    const Mesh mesh = world.mesh(mesh_shape(dims));
    const auto model = parallelize(source, config, mesh);
    BatchRequest request;
    request.path = config.data.path;
    request.training = config.training;
    request.training.global_batch_size = 2;
    request.data_ranks = dims.data_ranks();
    request.vocabulary = vocabulary_of(source.spec, false);
    request.steps = 1;
    const auto data = open_batches(request);
    const int data_rank =
        mesh.coordinate(axis::kReplicate) * dims.dp_shard + mesh.coordinate(axis::kShard);
    const auto rows = micro_batches(data->rows_in_step(), *config.training.local_batch_size,
                                    dims.data_ranks(), data_rank);
    const auto loss = forward_backward(*model, *data, 1, rows, step_options(config, nullptr));
    if (world.rank() == 0) chosen = loss.chosen;
  });
  return chosen;
}

constexpr auto kAll = RouterTokens::kAll;
const std::vector<BalanceCase> kCases{
    {.name = "one_rank"},
    {.name = "two_micro_batches", .local_batch = 1},
    {.name = "full", .recompute = RecomputeMode::kFull},
    {.name = "selective", .recompute = RecomputeMode::kSelective, .local_batch = 1},
    {.name = "dp2", .shard = 2},
    {.name = "hsdp", .replicate = 2, .shard = 2},
    {.name = "dp4_two_without_rows", .shard = 4},
    {.name = "tp2", .tp = 2},
    {.name = "tp2_whole", .tp = 2, .sequence = false},
    {.name = "tp2_router_on_all", .tp = 2, .router = kAll},
    {.name = "tp2_etp2", .tp = 2, .etp = 2},
    {.name = "ep2", .shard = 2, .ep = 2},
    {.name = "tp2_ep2_full", .tp = 2, .ep = 2, .recompute = RecomputeMode::kFull},
    {.name = "dp2_tp2_ep2_etp2", .shard = 2, .tp = 2, .ep = 2, .etp = 2},
    {.name = "gemma4_hsdp",
     .replicate = 2,
     .shard = 2,
     .family = "gemma4-fp32",
     .experts_per_token = 2},
    {.name = "gemma4_tp2_ep2_full",
     .tp = 2,
     .ep = 2,
     .recompute = RecomputeMode::kFull,
     .family = "gemma4-fp32",
     .experts_per_token = 2},
    {.name = "deepseek_v3_dp2_tp2_ep2",
     .shard = 2,
     .tp = 2,
     .ep = 2,
     .family = "deepseek-v3-fp32",
     .experts_per_token = 4,
     .layers = 2},
};

/// The family of the case on one rank.
BalanceCase alone(const BalanceCase& c) {
  return {.name = "one_rank",
          .family = c.family,
          .experts_per_token = c.experts_per_token,
          .layers = c.layers};
}

/// The bias of a layer with experts as the folder has it; zeros where it has none.
std::vector<float> stored_bias(const Config& config, std::size_t layer, std::size_t experts) {
  const ModelSource source = open_model(config.model);
  std::vector<float> values(experts);
  if (!source.spec.moe->has_stored_bias()) return values;
  const auto number = models::routed_experts(source.spec).layers.at(layer);
  source.folder->read(concat("model.layers.", number, ".mlp.gate.e_score_correction_bias"), 0,
                      std::ssize(values), std::as_writable_bytes(std::span(values)));
  return values;
}

class LoadBalanceOfRun : public ::testing::TestWithParam<BalanceCase> {};

TEST_P(LoadBalanceOfRun, EveryTokenCountsOnceAndEveryRankHasTheSameBias) {
  const TemporaryFolder folder;
  const TemporaryFolder other;
  const Config config = balanced(folder, GetParam());
  const Config one_rank = balanced(other, alone(GetParam()));
  const auto chosen = chosen_by(config, GetParam().ranks());
  EXPECT_EQ(chosen, chosen_by(one_rank, 1));
  ASSERT_EQ(chosen.size(), static_cast<std::size_t>(GetParam().layers));
  for (const auto& layer : chosen) {
    EXPECT_EQ(std::accumulate(layer.begin(), layer.end(), 0.0),
              static_cast<double>(kTokens * GetParam().experts_per_token));
  }

  const BalancedRun found = run(config, GetParam().ranks());
  EXPECT_EQ(found.steps, run(one_rank, 1).steps);
  for (std::size_t layer = 0; layer < chosen.size(); ++layer) {
    const double mean = std::accumulate(chosen[layer].begin(), chosen[layer].end(), 0.0) /
                        static_cast<double>(chosen[layer].size());
    // The change of a step: a stored bias does not begin as zeros.
    const auto& after = found.steps.front().at(layer);
    std::vector<float> bias = stored_bias(config, layer, after.size());
    for (std::size_t e = 0; e < bias.size(); ++e) bias[e] = after[e] - bias[e];
    const auto busiest = std::ranges::max_element(chosen[layer]) - chosen[layer].begin();
    ASSERT_GT(chosen[layer][static_cast<std::size_t>(busiest)], mean);
    EXPECT_NEAR(std::ranges::min(bias), bias[static_cast<std::size_t>(busiest)], 1e-7);
    EXPECT_NEAR(std::accumulate(bias.begin(), bias.end(), 0.0), 0.0, 1e-6);
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, LoadBalanceOfRun, ::testing::ValuesIn(kCases),
                         [](const auto& one) { return one.param.name; });

TEST(LoadBalanceOfRuns, AResumedRunKeepsItsBias) {
  const BalanceCase two{.name = "dp2", .shard = 2};
  const TemporaryFolder whole_folder;
  const BalancedRun whole = run(balanced(whole_folder, two), 2);

  const TemporaryFolder folder;
  Config config = balanced(folder, two);
  config.checkpoint.enable = true;
  config.checkpoint.folder = (folder / "checkpoints").string();
  config.checkpoint.interval = 2;
  config.training.steps = 2;
  run(config, 2);
  // A reader of the checkpoint as a model has the bias, too; an export says that it has not.
  ModelConfig written;
  written.path = (folder / "checkpoints/step-2").string();
  const ModelSource source = open_model(written);
  EXPECT_EQ(expert_biases_of(source, 0), models::expert_biases(source.spec));
  EXPECT_EQ(plan_export(source, {}).left_out.size(), static_cast<std::size_t>(kLayers));
  Config of_checkpoint = config;
  of_checkpoint.model = written;
  of_checkpoint.parallelism = {};
  on_ranks(1, [&](World& world) {
    const auto dims = resolve_parallelism({}, 1);
    const auto model = parallelize(source, of_checkpoint, world.mesh(mesh_shape(dims)));
    EXPECT_EQ(biases_of(*model), whole.steps.at(1));
  });

  config.training.steps = 4;
  const BalancedRun resumed = run(config, 2);
  EXPECT_EQ(resumed.steps, (std::vector<Biases>{whole.steps.at(2), whole.steps.at(3)}));
  EXPECT_EQ(resumed.losses, (std::vector<double>{whole.losses.at(2), whole.losses.at(3)}));
}

// DeepSeek V3's routers have the bias: nothing is added, and what was moved is exported.
TEST(LoadBalanceOfRuns, AStoredBiasIsMovedAndExported) {
  const BalanceCase one{
      .name = "one_rank", .family = "deepseek-v3-mixed", .experts_per_token = 4, .layers = 2};
  const TemporaryFolder folder;
  Config config = balanced(folder, one);
  config.checkpoint.enable = true;
  config.checkpoint.folder = (folder / "checkpoints").string();
  config.training.steps = 2;
  config.precision.param_dtype.dtype = DType::kBFloat16;
  const BalancedRun moved = run(config, 1);
  EXPECT_NE(moved.steps.at(0).at(0), stored_bias(config, 0, 12));
  EXPECT_NE(moved.steps.at(1), moved.steps.at(0));

  Config of_checkpoint = config;
  of_checkpoint.model = {};
  of_checkpoint.model.path = (folder / "checkpoints/step-2").string();
  for (std::size_t layer = 0; layer < 2; ++layer) {
    EXPECT_EQ(stored_bias(of_checkpoint, layer, 12), moved.steps.at(1).at(layer));
  }
  const ModelSource source = open_model(of_checkpoint.model);
  EXPECT_TRUE(expert_biases_of(source, kCoefficient).empty());
  const ExportPlan plan = plan_export(source, {});
  EXPECT_TRUE(plan.left_out.empty());
  bool exported = false;
  for (const TensorSpec& tensor : plan.shards.front().tensors) {
    if (!models::HasExpertBias::is_stored_name(tensor.name)) continue;
    EXPECT_EQ(tensor.dtype, DType::kFloat32);
    exported = true;
  }
  EXPECT_TRUE(exported);

  // Without a coefficient it is read, used, and never moved.
  const TemporaryFolder other;
  Config still = balanced(other, one);
  still.model.load_balance_coeff = 0;
  for (const Biases& step : run(still, 1).steps) {
    EXPECT_EQ(step.at(0), stored_bias(config, 0, 12));
  }
}

TEST(LoadBalanceOfRuns, TheBiasChangesWhoIsChosen) {
  const TemporaryFolder with, without;
  Config balancing = balanced(with, kCases.front());
  balancing.model.load_balance_coeff = 0.1;  // of probabilities
  Config plain = balanced(without, kCases.front());
  plain.model.load_balance_coeff = 0;
  const BalancedRun moved = run(balancing, 1);
  const BalancedRun still = run(plain, 1);
  EXPECT_TRUE(still.steps.front().empty());
  EXPECT_EQ(moved.losses[0], still.losses[0]) << "the first forward has a bias of zeros";
  EXPECT_NE(moved.losses[1], still.losses[1]);
}

std::string refusal(const ModelSource& source) {
  return refusal_of(ErrorKind::kConfig, [&] { expert_biases_of(source, kCoefficient); });
}

TEST(LoadBalanceOfRuns, RefusesModelsWithoutExperts) {
  ModelConfig model;
  model.path = std::string(TESSERA_TEST_DATA) + "/qwen3-fp32";
  EXPECT_THAT(refusal(open_model(model)),
              Says("model.load_balance_coeff: found 0.001 for a model without "
                   "experts, expected 0"));
}

}  // namespace
}  // namespace tessera::train::load_balance_of_run_test
