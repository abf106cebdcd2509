// 50 steps of a small mixture of experts on real text (text_training.h), in several layouts: they
// part from one rank's run no further than that parts from itself when its weights are moved by one
// ulp. ./test trains two of the layouts, `scripts/full families` all. Every family, smaller:
// family_training_test.cpp.
#include <ATen/ATen.h>

#include "golden/layouts.h"
#include "golden/model_folder.h"
#include "golden/text_training.h"
#include "models/description.h"
#include "proof.h"
#include "support/test.h"

namespace tessera::golden::moe_training_test {
namespace {

constexpr std::int64_t kTokens = 64;
constexpr unsigned kMovedRuns = 5;

/// 1.4 M parameters.
const std::string kModel = R"({"architectures": ["Qwen3MoeForCausalLM"],
  "model_type": "qwen3_moe", "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
  "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256, "hidden_act": "silu",
  "moe_intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": true,
  "router_aux_loss_coef": 0.01, "output_router_logits": true, "decoder_sparse_step": 1,
  "mlp_only_layers": [], "vocab_size": 256, "max_position_embeddings": 64, "rope_theta": 10000.0,
  "rms_norm_eps": 1e-06, "attention_bias": false, "initializer_range": 0.02,
  "tie_word_embeddings": false, "torch_dtype": "float32"})";

/// As a family draws them, under the names of the files.
std::vector<StoredTensor> drawn_weights() {
  at::manual_seed(20261121);
  std::vector<StoredTensor> tensors;
  for (const auto& row : models::describe(models::parse_spec(kModel).spec).parameters) {
    const bool norm = row.init == models::InitKind::kOnes;
    const auto draw = [&](const std::vector<std::int64_t>& shape) {
      return norm ? at::ones(shape) : at::randn(shape) * row.init_std;
    };
    if (row.stacked.empty()) tensors.push_back(stored(row.name, draw(row.shape)));
    for (const auto& name : row.stacked) tensors.push_back(stored(name, draw(row.stacked_shape)));
  }
  return tensors;
}

std::filesystem::path model_of(const std::vector<StoredTensor>& tensors) {
  const auto folder = temporary_path("model");
  write_model(folder, kModel, tensors, 1);
  return folder;
}

struct MoeLayout {
  const char* name;
  int shard = 1;
  int tp = 1;
  int ep = 1;
  Layout ranks() const { return {.ranks = shard * tp}; }
};
constexpr MoeLayout kOneRank{"one rank"};
const std::vector<MoeLayout> kLayouts{
    {"tp 2 x dp 2", 2, 2}, {"ep 4", 4, 1, 4}, {"dp 4", 4}, {"ep 2 x tp 2", 1, 2, 2}};

train::Config config_of(const std::filesystem::path& model, const std::string& data,
                        const MoeLayout& layout) {
  auto config = config_for(layout.ranks());
  config.model.path = model;
  config.data.path = {data};
  config.parallelism.data_parallel_shard_degree = layout.shard;
  config.parallelism.tensor_parallel_degree = layout.tp;
  config.parallelism.expert_parallel_degree = layout.ep;
  config.training.steps = kTextSteps;
  config.training.local_batch_size = kTextRows;
  config.optimizer.lr = 1e-3;
  return config;
}

class MoeTraining : public ::testing::Test {
 protected:
  std::vector<double> losses(const std::filesystem::path& model, const MoeLayout& layout) const {
    return run_training(config_of(model, data_, layout), layout.ranks()).losses;
  }

  const std::vector<StoredTensor> weights_ = drawn_weights();
  const std::filesystem::path model_ = model_of(weights_);
  const std::string data_ = text_batches(kTokens);
};

TEST_F(MoeTraining, GradientsOfTheFirstStepAreThoseOfOneRank) {
  const auto one = run_gradients(config_of(model_, data_, kOneRank), kOneRank.ranks(), data_);
  ASSERT_EQ(one.by_name.size(), weights_.size());
  for (const MoeLayout& layout : kLayouts) {
    SCOPED_TRACE(layout.name);
    const auto found = run_gradients(config_of(model_, data_, layout), layout.ranks(), data_);
    EXPECT_NEAR(found.loss, one.loss, kLossBound);
    ASSERT_EQ(found.by_name.size(), one.by_name.size());
    std::size_t without = 0;
    for (const auto& [name, expected] : one.by_name) {
      const at::Tensor& gradient = found.by_name.at(name);
      if (expected.count_nonzero().item<std::int64_t>() == 0) {  // an expert that no token chose
        EXPECT_TRUE(gradient.equal(expected)) << name;
        ++without;
      } else {
        EXPECT_LT(relative_error(gradient, expected), kGradientBound) << name;
      }
    }
    EXPECT_LT(without, one.by_name.size() / 10) << "nearly every expert has tokens";
  }
}

TEST_F(MoeTraining, LossesPartNoFurtherThanByOneUlp) {
  Spread spread(losses(model_, kOneRank), kTokens);
  for (unsigned seed = 1; seed <= kMovedRuns; ++seed) {
    spread.add(losses(model_of(moved_by_one_ulp(weights_, seed)), kOneRank));
  }
  auto layouts = kLayouts;
  if (!test::full_proof()) layouts.resize(2);
  for (const MoeLayout& layout : layouts) {
    const double distance = spread.distance(losses(model_, layout));
    EXPECT_LE(distance, kSpreads) << layout.name;
    RecordProperty(layout.name, concat(distance, " spreads"));
  }
}

}  // namespace
}  // namespace tessera::golden::moe_training_test
