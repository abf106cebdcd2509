// The truth table's rows of buffers and integers on a real file: cast once in a frozen part, left
// alone in a trained one; what they do to gradients, against fp64.

#include "golden/truth_table_model.h"
#include "io/hf_folder.h"
#include "support/plain.h"
#include "train/hf/weights.h"

namespace tessera::golden::truth_table_buffers_test {
namespace {

constexpr std::int64_t kWidth = 5;
constexpr double kFine = 1.0 + 0x1p-10;  // no bf16

/// (x weight) scale[order] with a table that nothing may touch.
struct Part : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const auto y = x * weight * scale.index_select(0, order);
    gives = y.scalar_type();
    return y;
  }
  at::Tensor weight = register_parameter("weight", nn::empty_parameter({kWidth}));
  at::Tensor scale = register_buffer("scale", at::zeros({kWidth}));
  at::Tensor inv_freq = register_buffer("inv_freq", at::zeros({kWidth}));
  at::Tensor order = register_buffer("order", at::zeros({kWidth}, at::kLong));
  at::ScalarType gives = at::kByte;
};

struct Model : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return head->forward(tower->forward(x)); }
  std::shared_ptr<Part> tower = register_module("tower", std::make_shared<Part>());
  std::shared_ptr<Part> head = register_module("head", std::make_shared<Part>());
};

test::Tensors file_of(at::ScalarType buffers) {
  test::Tensors stored;
  for (const std::string part : {"tower.", "head."}) {
    stored[part + "weight"] = at::full({kWidth}, 2.0, at::kBFloat16);
    stored[part + "scale"] = at::full({kWidth}, kFine, buffers);
    stored[part + "inv_freq"] = at::full({kWidth}, kFine, at::kFloat);
    stored[part + "order"] = at::arange(kWidth).flip(0);
  }
  return stored;
}

/// Resolves the folder's header; tower.weight is frozen.
ModelContract resolve(const TensorSource& folder, const PrecisionPolicy& policy) {
  std::vector<ParameterMeta> parameters;
  std::vector<BufferMeta> buffers;
  for (const auto& [name, info] : folder.tensors()) {
    if (name.ends_with("weight")) {
      ParameterMeta meta;
      meta.name = name;
      meta.shape = info.shape;
      meta.dtype = info.dtype;
      meta.checkpoint = info.dtype;
      meta.checkpoint_bulk = DType::kBFloat16;
      meta.trainable = name.starts_with("head");
      parameters.push_back(meta);
    } else {
      BufferMeta meta;
      meta.name = name;
      meta.shape = info.shape;
      meta.dtype = info.dtype;
      meta.checkpoint = info.dtype;
      meta.checkpoint_bulk = info.dtype;
      buffers.push_back(meta);
    }
  }
  ReductionPlan reductions{{std::string(axis::kShard)}, {}, 2};
  return resolve_model_contract(parameters, buffers, {}, policy, reductions);
}

struct Found {
  test::Tensors gradients;
  test::Tensors buffers;
  at::ScalarType tower_gives = at::kByte, head_gives = at::kByte;
};

/// Rank r brings r + 1 as inputs and a gradient of 1.
Found run(const std::filesystem::path& path, const PrecisionPolicy& policy) {
  const HfTensors folder(HfFolder::open(path));
  const auto model_contract = resolve(folder, policy);
  Found found;
  test::ranks(2).run([&](World& world) {
    auto model = std::make_shared<Model>();
    model->tower->weight.set_requires_grad(false);
    ShardOptions options;
    options.contracts =
        std::make_shared<const std::vector<GradContract>>(model_contract.parameters);
    options.buffer_contracts =
        std::make_shared<const std::vector<BufferContract>>(model_contract.buffers);
    auto handle = fully_shard(model, test::data_mesh(world), policy, options);
    train::load_weights(handle, folder);
    train::load_buffers(handle, folder);
    handle.set_loaded();
    test::backward(handle.forward(at::full({kWidth}, world.rank() + 1.0)).sum());
    const auto gradients = test::whole_gradients(handle);
    if (world.rank() != 0) return;
    found.gradients = gradients;
    for (const auto& entry : model->named_buffers()) found.buffers[entry.key()] = entry.value();
    found.tower_gives = model->tower->gives;
    found.head_gives = model->head->gives;
  });
  return found;
}

// Naive: an fp32 buffer makes fp32 of all that the frozen tower gives; or a cast reaches tables.
TEST(TruthTableBuffers, OfAFrozenPartAreCastOnceAndOfATrainedOneStay) {
  for (const auto stored : {at::kFloat, at::kBFloat16}) {
    const auto found = run(write_folder(file_of(stored)), test::in_bfloat16());
    EXPECT_EQ(found.tower_gives, at::kBFloat16);
    const auto fine = at::full({kWidth}, kFine, stored);
    EXPECT_TRUE(test::same_bits(found.buffers.at("tower.scale"), fine.to(at::kBFloat16)));
    EXPECT_TRUE(test::same_bits(found.buffers.at("head.scale"), fine));
    EXPECT_EQ(found.head_gives, stored) << "a trained part's buffer promotes, as the user wrote it";
    for (const std::string part : {"tower.", "head."}) {
      EXPECT_TRUE(test::same_bits(found.buffers.at(part + "inv_freq"),
                                  at::full({kWidth}, kFine, at::kFloat)));
      EXPECT_TRUE(test::same_bits(found.buffers.at(part + "order"), at::arange(kWidth).flip(0)));
    }
    // x * 2 of the tower, in fp64; the head's scale rounded to bf16 with the gradient that goes
    // through the product of bf16.
    double sum = 0;
    for (int rank = 0; rank < 2; ++rank) sum += 2.0 * (rank + 1);
    EXPECT_TRUE(test::same_bits(found.gradients.at("head.weight"),
                                at::full({kWidth}, sum / 2, at::kFloat)));
  }
}

TEST(TruthTableBuffers, APinKeepsOneOfAFrozenPart) {
  auto policy = test::in_bfloat16();
  PrecisionRule rule;
  rule.match = {"tower.scale"};
  rule.pin = true;
  policy.rules = {rule};
  const auto found = run(write_folder(file_of(at::kFloat)), policy);
  EXPECT_TRUE(
      test::same_bits(found.buffers.at("tower.scale"), at::full({kWidth}, kFine, at::kFloat)));
  EXPECT_EQ(found.tower_gives, at::kFloat);
}

// Without param_dtype nothing is cast, and gradients have all digits of both buffers.
TEST(TruthTableBuffers, WithoutAPolicyNothingIsCast) {
  const auto found = run(write_folder(file_of(at::kFloat)), {});
  EXPECT_TRUE(
      test::same_bits(found.buffers.at("tower.scale"), at::full({kWidth}, kFine, at::kFloat)));
  double sum = 0;
  for (int rank = 0; rank < 2; ++rank) sum += 2.0 * (rank + 1) * kFine * kFine;
  EXPECT_TRUE(
      test::same_bits(found.gradients.at("head.weight"), at::full({kWidth}, sum / 2, at::kFloat)));
}

}  // namespace
}  // namespace tessera::golden::truth_table_buffers_test
