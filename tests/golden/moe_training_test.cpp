// 50 steps of a small mixture of experts on real text, in several layouts: they part from one
// rank's run no further than that parts from itself when its weights are moved by one ulp.
//
// data/emma.txt is the beginning of Jane Austen's Emma, of which scripts/corpus makes the text of
// ./run; bytes are tokens.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <span>

#include "golden/layouts.h"
#include "golden/model_folder.h"
#include "models/description.h"

namespace tessera::golden::moe_training_test {
namespace {

constexpr std::int64_t kSteps = 50;
constexpr std::int64_t kRows = 4;
constexpr std::int64_t kTokens = 64;
constexpr int kMovedRuns = 5;
constexpr double kSpreads = 3.0;

/// 1.4 M parameters.
const std::string kModel = R"({"architectures": ["Qwen3MoeForCausalLM"],
  "model_type": "qwen3_moe", "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
  "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256, "hidden_act": "silu",
  "moe_intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": true,
  "router_aux_loss_coef": 0.01, "output_router_logits": true, "decoder_sparse_step": 1,
  "mlp_only_layers": [], "vocab_size": 256, "max_position_embeddings": 64, "rope_theta": 10000.0,
  "rms_norm_eps": 1e-06, "attention_bias": false, "initializer_range": 0.02,
  "tie_word_embeddings": false, "torch_dtype": "float32"})";

StoredTensor stored(const std::string& name, const at::Tensor& values) {
  const at::Tensor whole = values.contiguous();
  const auto* data = static_cast<const std::byte*>(whole.const_data_ptr());
  const DType dtype = whole.scalar_type() == at::kLong ? DType::kInt64 : DType::kFloat32;
  return {{name, dtype, whole.sizes().vec()}, {data, data + whole.nbytes()}};
}

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

/// A third of the elements one step up, a third one step down.
std::vector<StoredTensor> moved_by_one_ulp(std::vector<StoredTensor> tensors, unsigned seed) {
  std::mt19937_64 random(seed);
  constexpr float kFar = std::numeric_limits<float>::infinity();
  for (StoredTensor& tensor : tensors) {
    for (std::size_t at = 0; at < tensor.bytes.size(); at += sizeof(float)) {
      float value = 0;
      std::memcpy(&value, tensor.bytes.data() + at, sizeof value);
      const auto way = random() % 3;
      if (way != 0) value = std::nextafter(value, way == 1 ? kFar : -kFar);
      std::memcpy(tensor.bytes.data() + at, &value, sizeof value);
    }
  }
  return tensors;
}

std::filesystem::path model_of(const std::vector<StoredTensor>& tensors) {
  const auto folder = temporary_path("model");
  write_model(folder, kModel, tensors, 1);
  return folder;
}

/// The text as batches of training, the first also as that of `gradients`.
std::string batches() {
  const std::string text = read_text(data_folder("emma.txt"));
  const std::int64_t size = kSteps * kRows * kTokens;
  EXPECT_GE(std::ssize(text), size);
  const std::vector<std::uint8_t> bytes(text.begin(), text.begin() + size);
  const at::Tensor ids =
      at::tensor(at::ArrayRef<std::uint8_t>(bytes), at::kLong).view({kSteps, kRows, kTokens});
  std::vector<StoredTensor> tensors;
  for (const char* name : {"input_ids", "labels"}) {
    tensors.push_back(stored(name, ids[0]));
    tensors.push_back(stored(concat("steps/", name), ids));
  }
  std::vector<TensorSpec> specs;
  for (const StoredTensor& tensor : tensors) specs.push_back(tensor.spec);
  const auto path = temporary_path("emma.safetensors");
  SafetensorsWriter writer(path, specs);
  for (const StoredTensor& tensor : tensors) writer.write(tensor.spec.name, tensor.bytes);
  writer.finish();
  return path.string();
}

struct MoeLayout {
  const char* name;
  int shard = 1;
  int tp = 1;
  int ep = 1;
  Layout ranks() const { return {.ranks = shard * tp}; }
};
constexpr MoeLayout kOneRank{"one rank"};
constexpr MoeLayout kLayouts[] = {
    {"dp 4", 4}, {"tp 2 x dp 2", 2, 2}, {"ep 2 x tp 2", 1, 2, 2}, {"ep 4", 4, 1, 4}};

train::Config config_of(const std::filesystem::path& model, const std::string& data,
                        const MoeLayout& layout) {
  auto config = config_for(layout.ranks());
  config.model.path = model;
  config.data.path = {data};
  config.parallelism.data_parallel_shard_degree = layout.shard;
  config.parallelism.tensor_parallel_degree = layout.tp;
  config.parallelism.expert_parallel_degree = layout.ep;
  config.training.steps = kSteps;
  config.training.local_batch_size = kRows;
  config.optimizer.lr = 1e-3;
  return config;
}

/// Between two losses: the sum of the token losses is rounded to fp32, the mean is of that.
double resolution(double loss) {
  constexpr auto kLabels = static_cast<double>(kRows * (kTokens - 1));
  const auto sum = static_cast<float>(loss * kLabels);
  return static_cast<double>(std::nextafter(sum, std::numeric_limits<float>::infinity()) - sum) /
         kLabels;
}

class MoeTraining : public ::testing::Test {
 protected:
  std::vector<double> losses(const std::filesystem::path& model, const MoeLayout& layout) const {
    auto found = run_training(config_of(model, data_, layout), layout.ranks()).losses;
    EXPECT_EQ(std::ssize(found), kSteps) << layout.name;
    return found;
  }

  const std::vector<StoredTensor> weights_ = drawn_weights();
  const std::filesystem::path model_ = model_of(weights_);
  const std::string data_ = batches();
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
      if (expected.count_nonzero().item<std::int64_t>() == 0) {  // an expert that nobody chose
        EXPECT_TRUE(gradient.equal(expected)) << name;
        ++without;
      } else {
        EXPECT_LT(relative_error(gradient, expected), kGradientBound) << name;
      }
    }
    EXPECT_LT(without, one.by_name.size() / 10) << "nearly every expert has tokens";
  }
}

// What rounding does to the weights it does to the losses, more with every step: the spread of runs
// that differ in nothing else is the measure, at each step the largest so far (and at least what
// two losses differ by if they differ at all).
TEST_F(MoeTraining, LossesPartNoFurtherThanByOneUlp) {
  const auto one = losses(model_, kOneRank);
  auto lowest = one;
  auto highest = one;
  for (unsigned seed = 1; seed <= kMovedRuns; ++seed) {
    const auto moved = losses(model_of(moved_by_one_ulp(weights_, seed)), kOneRank);
    for (std::size_t i = 0; i < one.size(); ++i) {
      lowest[i] = std::min(lowest[i], moved[i]);
      highest[i] = std::max(highest[i], moved[i]);
    }
  }
  EXPECT_LT(one.back(), one.front() - 1.0) << "it learns";
  for (const MoeLayout& layout : kLayouts) {
    const auto found = losses(model_, layout);
    double spread = 0;
    double largest = 0;
    for (std::size_t i = 0; i < one.size(); ++i) {
      spread = std::max({spread, highest[i] - lowest[i], resolution(one[i])});
      EXPECT_LE(std::abs(found[i] - one[i]), kSpreads * spread)
          << layout.name << ", step " << i + 1;
      largest = std::max(largest, std::abs(found[i] - one[i]));
    }
    RecordProperty(layout.name, concat(largest, " of a spread of ", spread));
  }
}

}  // namespace
}  // namespace tessera::golden::moe_training_test
