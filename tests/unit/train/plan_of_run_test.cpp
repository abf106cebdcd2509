// The plan that is worked out from a configuration is the one that ranks lay their buckets out by.
#include "train/plan_of_run.h"

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <tuple>

#include "fsdp/handle.h"
#include "support/test.h"
#include "train/parallelize.h"
#include "train/step.h"
#include "train/trainer.h"
#include "unit/train/run_case.h"

namespace tessera::train::plan_of_run_test {
namespace {

struct PlanCase {
  std::string name;
  int ranks = 1;
  int replicas = 1;
  Head head = Head::kOwn;
  std::vector<PrecisionRule> rules = {};
  std::vector<std::string> freeze = {};
};

PrecisionRule rule(const std::string& match, DType param, DType reduce) {
  PrecisionRule made;
  made.match = {match};
  made.param_dtype = param;
  made.reduce_dtype = reduce;
  return made;
}

PrecisionRule frozen_rule(const std::string& match) {
  PrecisionRule made;
  made.match = {match};
  made.frozen = FrozenRule::kShard;
  return made;
}

class PlanOfRun : public ::testing::TestWithParam<PlanCase> {};

TEST_P(PlanOfRun, EqualsThePlanOfTheConfiguration) {
  const PlanCase& c = GetParam();
  const TemporaryFolder folder;
  Config config = run_case(folder, c.head);
  config.parallelism.data_parallel_replicate_degree = c.replicas;
  config.precision.rule = c.rules;
  config.model.freeze = c.freeze;

  const ModelSource source = open_model(config.model);
  const ParallelDims dims = resolve_parallelism(config.parallelism, c.ranks);
  const ModelContract contract = resolve_model(source, config, dims);
  const auto expected = plan_model(source.description, contract.parameters, mesh_shape(dims));
  bool has_moved = false;
  for (const auto& item : expected.units.front().items) {
    has_moved = has_moved || item.name.starts_with("model.layers.");
  }
  EXPECT_EQ(has_moved, !c.rules.empty()) << "some cases have small buckets, which merge";

  on_ranks(c.ranks, [&](World& world) {
    const auto model = parallelize(source, config, world.mesh(mesh_shape(dims)));
    const ModelContract agreed = model->contract();
    EXPECT_EQ(agreed.units, contract.units);
    EXPECT_EQ(agreed.buffers, contract.buffers);
    for (const GradContract& parameter : contract.parameters) {
      EXPECT_NE(std::ranges::find(agreed.parameters, parameter), agreed.parameters.end())
          << parameter.name;
    }
    const layout::ModelPlan found = fsdp::plan_of(*model);
    EXPECT_EQ(to_string(found), to_string(expected));
    EXPECT_EQ(hash(found), hash(expected));
  });
}

/// The reference's model, wide enough that layers are no small buckets.
std::string wide(const std::string& family) {
  std::ifstream in(std::string(TESSERA_TEST_DATA) + "/" + family + "-fp32/config.json");
  std::stringstream text;
  text << in.rdbuf();
  models::ModelSpec spec = models::parse_spec(text.str()).spec;
  spec.hidden_size = 256;
  if (spec.gemma4) spec.gemma4->vision->hidden_size = 256;
  return models::config_json(spec);
}

// Tower, text layers and what belongs to the root; norms are small and move there.
TEST(PlanOfGemma4, EqualsThePlanOfTheConfiguration) {
  const TemporaryFolder folder;
  std::ofstream(folder / "config.json") << wide("gemma4");
  Config config;
  config.model.config = folder / "config.json";
  const ModelSource source = open_model(config.model);
  for (const int ranks : {1, 3, -3}) {  // below zero: with the tower whole on every rank
    config.model.frozen = ranks < 0 ? FrozenAs::kReplicate : FrozenAs::kShard;
    const ParallelDims dims = resolve_parallelism(config.parallelism, std::abs(ranks));
    const ModelContract contract = resolve_model(source, config, dims);
    const auto expected = plan_model(source.description, contract.parameters, mesh_shape(dims));
    EXPECT_EQ(expected.units.size(), 1U + 3U + 4U);
    on_ranks(std::abs(ranks), [&](World& world) {
      const auto model = parallelize(source, config, world.mesh(mesh_shape(dims)));
      EXPECT_EQ(to_string(fsdp::plan_of(*model)), to_string(expected));
      const ModelContract agreed = model->contract();
      EXPECT_EQ(agreed.units, contract.units);
      EXPECT_EQ(agreed.buffers.size(), contract.buffers.size());
      for (const BufferContract& buffer : contract.buffers) {
        EXPECT_NE(std::ranges::find(agreed.buffers, buffer), agreed.buffers.end()) << buffer.name;
      }
    });
  }
}

struct ModelPlanCase {
  std::string name;
  int shard = 1;
  int tp = 1;
  int ep = 1;
  int etp = 1;
  bool sequence = true;
  int replicas = 1;
};

std::ostream& operator<<(std::ostream& out, const ModelPlanCase& c) { return out << c.name; }

class PlanOfModelAxes : public ::testing::TestWithParam<std::tuple<std::string, ModelPlanCase>> {};

// Parameters that are cut, whole and summed over tp, or experts' of the sparse mesh: a bucket for
// each set of axes, the same on every rank and worked out by none.
TEST_P(PlanOfModelAxes, EqualsThePlanOfTheConfiguration) {
  const auto& [family, c] = GetParam();
  const TemporaryFolder folder;
  std::ofstream(folder / "config.json") << wide(family);
  Config config;
  config.model.config = folder / "config.json";
  config.parallelism.data_parallel_replicate_degree = c.replicas;
  config.parallelism.data_parallel_shard_degree = c.shard;
  config.parallelism.tensor_parallel_degree = c.tp;
  config.parallelism.expert_parallel_degree = c.ep;
  config.parallelism.expert_tensor_parallel_degree = c.etp;
  config.parallelism.sequence_parallel = c.sequence;
  const int ranks = c.replicas * c.shard * c.tp;
  const ModelSource source = open_model(config.model);
  const ParallelDims dims = resolve_parallelism(config.parallelism, ranks);
  const ModelContract contract = resolve_model(source, config, dims);
  const auto expected = plan_model(source.description, contract.parameters, mesh_shape(dims));
  on_ranks(ranks, [&](World& world) {
    const auto model = parallelize(source, config, world.mesh(mesh_shape(dims)));
    const ModelContract agreed = model->contract();
    EXPECT_EQ(agreed.units, contract.units);
    EXPECT_EQ(agreed.parameters.size(), contract.parameters.size());
    for (const GradContract& parameter : contract.parameters) {
      EXPECT_NE(std::ranges::find(agreed.parameters, parameter), agreed.parameters.end())
          << parameter.name;
    }
    const layout::ModelPlan found = fsdp::plan_of(*model);
    EXPECT_EQ(to_string(found), to_string(expected));
    EXPECT_EQ(hash(found), hash(expected));
  });
}

std::string plan_case_name(
    const ::testing::TestParamInfo<std::tuple<std::string, ModelPlanCase>>& info) {
  std::string name = std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
  std::ranges::replace(name, '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(
    Experts, PlanOfModelAxes,
    ::testing::Combine(::testing::Values("qwen3-moe", "deepseek-v2", "gpt-oss", "gemma4"),
                       ::testing::Values(ModelPlanCase{"tp2", 1, 2},
                                         ModelPlanCase{"tp4_whole", 1, 4, 1, 1, false},
                                         ModelPlanCase{"ep2", 2, 1, 2},
                                         ModelPlanCase{"dp4_ep2", 4, 1, 2},
                                         ModelPlanCase{"hsdp_ep2", 2, 1, 2, 1, true, 2},
                                         ModelPlanCase{"dp2_tp2_ep4", 2, 2, 4},
                                         ModelPlanCase{"tp2_etp2", 1, 2, 1, 2},
                                         ModelPlanCase{"dp2_tp2_ep2_etp2", 2, 2, 2, 2})),
    plan_case_name);
INSTANTIATE_TEST_SUITE_P(
    Dense, PlanOfModelAxes,
    ::testing::Combine(::testing::Values("qwen3", "llama"),
                       ::testing::Values(ModelPlanCase{"tp2", 1, 2}, ModelPlanCase{"dp2_tp2", 2, 2},
                                         ModelPlanCase{"tp4_whole", 1, 4, 1, 1, false})),
    plan_case_name);

// Buckets of 1 KiB (norms), 32 KiB and 48 KiB merge; up_proj's of 96 KiB stands alone.
const std::vector<PrecisionRule> kRules{rule("*norm", DType::kFloat32, DType::kFloat32),
                                        rule("mlp.up_proj", DType::kFloat32, DType::kBFloat16),
                                        rule("mlp.down_proj", DType::kBFloat16, DType::kBFloat16),
                                        frozen_rule("layers.1.self_attn.q_proj")};

INSTANTIATE_TEST_SUITE_P(
    Layouts, PlanOfRun,
    ::testing::Values(PlanCase{"one_rank", 1}, PlanCase{"two_ranks", 2}, PlanCase{"three_ranks", 3},
                      PlanCase{"two_by_two", 4, 2}, PlanCase{"tied", 2, 1, Head::kTied},
                      PlanCase{"mixed", 2, 1, Head::kOwn, kRules},
                      PlanCase{"mixed_tied", 3, 1, Head::kTied, kRules},
                      PlanCase{
                          "frozen", 2, 1, Head::kOwn, kRules, {"model.embed_tokens", "layers.2"}}),
    [](const auto& one) { return one.param.name; });

// Runs whose batches memory does not hold.

// Naive: they are accepted, and the program is killed in the first step.
TEST(MemoryOfRun, RowsThatNoMachineHoldsAreRefusedBeforeTheModelIsMade) {
  const TemporaryFolder folder;
  Config config = run_case(folder, Head::kTied);
  const auto refusal = [&] {
    return error_of(ErrorKind::kConfig,
                    [&] { on_ranks(2, [&](World& world) { run_training(config, world); }); });
  };
  config.training.local_batch_size = 1'000'000'000;
  EXPECT_THAT(refusal(), Says("training.local_batch_size: found 1000000000 rows of 16 tokens"));
  config.training.local_batch_size = 1;
  config.training.global_batch_size = 1'000'000'000'000;
  EXPECT_THAT(refusal(), Says("training.global_batch_size: found 500000000000 rows of 16"));
  config.training.steps = 1'000'000'000;
  EXPECT_THAT(refusal(), Says("training.global_batch_size: found 1000000000000 rows a step "
                              "for 1000000000 steps"));
}

/// Rows that take more memory than there is.
class Endless final : public BatchSource {
 public:
  std::int64_t rows_in_step() const override { return 2; }
  std::int64_t row_tokens() const override { return 16; }
  std::int64_t rows_in_pass() const override { return rows_in_step(); }
  void check_labels(std::int64_t) override {}
  MicroBatch load(std::int64_t, RowRange rows) const override {
    const auto ids = at::empty({rows.size(), std::int64_t{1} << 50}, at::kLong);
    return {ids, ids};
  }
  std::vector<std::string> opened_from() const override { return {}; }
};

// Naive: the allocator's words, which name no key.
TEST(MemoryOfRun, MemoryThatEndsInAStepIsAnErrorThatNamesTheKey) {
  const TemporaryFolder folder;
  const Config config = run_case(folder, Head::kTied);
  on_ranks(1, [&](World& world) {
    const auto source = open_model(config.model);
    const auto mesh = world.mesh(mesh_shape(resolve_parallelism(config.parallelism, 1)));
    const auto model = parallelize(source, config, mesh);
    const auto said = Says(
        "training.local_batch_size: found micro-batches of 2 row(s) "
        "of 16 tokens, for which memory ran out",
        "can't allocate memory");
    EXPECT_THAT(
        error_of(ErrorKind::kConfig, [&] { forward_backward(*model, Endless(), 1, {{0, 2}}, {}); }),
        said);
    EXPECT_THAT(error_of(ErrorKind::kConfig, [&] { forward_only(*model, Endless(), 1, {{0, 2}}); }),
                said);
  });
}

}  // namespace
}  // namespace tessera::train::plan_of_run_test
