// Whole models on a simulated device, compared with transformers (tests/golden/data), and bit for
// bit with a run on the CPU that takes a device's choice of kernels.

#include <optional>

#include "base/test_hooks.h"
#include "comm/device.h"
#include "nn/loss.h"
#include "sim/streams.h"
#include "support/tensors.h"
#include "support/test.h"
#include "unit/models/reference.h"

namespace tessera::sim::models_test {
namespace {

using models::Reference;
using test::relative_error;

/// The model's parameters and buffers become tensors of the device.
void move_to(const torch::nn::Module& model, const at::Device& where) {
  const at::NoGradGuard no_grad;
  for (auto& item : model.named_parameters()) item.value().set_data(item.value().to(where));
  for (auto& item : model.named_buffers()) item.value().set_data(item.value().to(where));
}

struct Found {
  at::Tensor logits, loss;
  std::map<std::string, at::Tensor> gradients;
};

Found found_by(const Reference& reference, Reference::Compute compute, const at::Device& where) {
  const auto model = reference.text_model(compute);
  move_to(*model, where);
  const at::Tensor ids = reference.result("input_ids").to(where);
  const at::Tensor labels = nn::next_token_targets(reference.result("labels"));
  Found found;
  models::ModelInputs inputs;
  inputs.input_ids = ids;
  found.logits = model->forward(inputs).detach().cpu();
  inputs.targets = labels.to(where);
  const double kept = static_cast<double>(nn::count_kept(labels));
  const at::Tensor loss = model->forward(inputs) / kept;
  loss.backward();
  found.loss = loss.detach().cpu();
  for (const auto& [name, gradient] : models::gradients(*model, model->spec())) {
    found.gradients[name] = gradient.cpu();
  }
  return found;
}

Found found_as_on_device(const Reference& reference, Reference::Compute compute) {
  const test_hooks::Set as_on_device(test_hooks::kernels_of_devices, [] { return true; });
  return found_by(reference, compute, at::kCPU);
}

class ModelsOnDevices : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { comm::use_device(device(0)); }
};

class DenseModelsOnDevices : public ModelsOnDevices {};

TEST_P(ModelsOnDevices, AgreeWithTheReferenceInFloat32) {
  const Reference reference(GetParam());
  const Found found = found_by(reference, Reference::Compute::kFloat32, device(0));
  EXPECT_LT((found.logits - reference.result("logits")).abs().max().item<double>(), 1e-4);
  EXPECT_NEAR(found.loss.item<double>(), reference.result("loss").item<double>(), 5e-6);
  for (const auto& [name, gradient] : found.gradients) {
    EXPECT_LT(relative_error(gradient, reference.result("grad/" + name)), 5e-5) << name;
  }
}

TEST_P(DenseModelsOnDevices, HaveTheBitsOfTheCpuWithTheSameKernels) {
  const Reference reference(GetParam());
  for (const auto compute : {Reference::Compute::kFloat32, Reference::Compute::kBFloat16}) {
    const Found expected = found_as_on_device(reference, compute);
    const Found found = found_by(reference, compute, device(0));
    expect_same_bits(found.logits, expected.logits, "logits");
    expect_same_bits(found.loss, expected.loss, "loss");
    ASSERT_EQ(found.gradients.size(), expected.gradients.size());
    for (const auto& [name, gradient] : found.gradients) {
      expect_same_bits(gradient, expected.gradients.at(name), name);
    }
  }
}

std::string test_name(const ::testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  for (char& each : name) each = each == '-' ? '_' : each;
  return name;
}

const std::vector<std::string> kDense{
    "qwen3-fp32",       "qwen3-mixed",       "llama-fp32",        "llama-mixed", "qwen2-fp32",
    "qwen2-mixed",      "mistral-fp32",      "mistral-mixed",     "olmo2-fp32",  "olmo2-mixed",
    "gemma3-text-fp32", "gemma3-text-mixed", "gpt2-fp32",         "gpt2-mixed",  "granite-fp32",
    "granite-mixed",    "smollm3-fp32",      "smollm3-mixed",     "phi3-fp32",   "phi3-mixed",
    "phi4-mini-fp32",   "qwen3-5-text-fp32", "qwen3-5-text-mixed"};

const std::vector<std::string> kWithExperts{
    "qwen3-moe-fp32",   "qwen3-moe-mixed",   "gpt-oss-fp32",           "gpt-oss-mixed",
    "deepseek-v2-fp32", "deepseek-v2-mixed", "deepseek-v2-group-fp32", "deepseek-v2-group-mixed",
    "mixtral-fp32",     "mixtral-mixed",     "deepseek-v3-fp32",       "deepseek-v3-mixed",
    "glm4-moe-fp32",    "glm4-moe-mixed",    "llama4-text-fp32",       "llama4-text-mixed",
    "qwen3-next-fp32",  "qwen3-next-mixed",  "nemotron-h-fp32",        "nemotron-h-mixed"};

INSTANTIATE_TEST_SUITE_P(Experts, ModelsOnDevices, ::testing::ValuesIn(kWithExperts), test_name);
INSTANTIATE_TEST_SUITE_P(Dense, ModelsOnDevices, ::testing::ValuesIn(kDense), test_name);
INSTANTIATE_TEST_SUITE_P(Dense, DenseModelsOnDevices, ::testing::ValuesIn(kDense), test_name);

}  // namespace
}  // namespace tessera::sim::models_test
