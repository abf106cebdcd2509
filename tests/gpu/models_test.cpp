// Whole models on a card, compared with transformers (tests/golden/data).

#include "comm/device.h"
#include "nn/loss.h"
#include "support/tensors.h"
#include "support/test.h"
#include "unit/models/reference.h"

namespace tessera::gpu_models_test {
namespace {

using models::Reference;
using test::relative_error;

const at::Device kCard(at::kCUDA, 0);

struct Found {
  double loss = 0;
  std::map<std::string, at::Tensor> gradients;
};

Found found_by(const Reference& reference, Reference::Compute compute, const at::Device& where) {
  comm::use_device(kCard);
  const auto model = reference.text_model(compute);
  {
    const at::NoGradGuard no_grad;
    for (auto& item : model->named_parameters()) item.value().set_data(item.value().to(where));
    for (auto& item : model->named_buffers()) item.value().set_data(item.value().to(where));
  }
  const at::Tensor labels = nn::next_token_targets(reference.result("labels"));
  models::ModelInputs inputs;
  inputs.input_ids = reference.result("input_ids").to(where);
  inputs.targets = labels.to(where);
  const at::Tensor loss = model->forward(inputs) / static_cast<double>(nn::count_kept(labels));
  loss.backward();
  Found found{loss.item<double>(), {}};
  for (const auto& [name, gradient] : models::gradients(*model, model->spec())) {
    found.gradients[name] = gradient.cpu();
  }
  return found;
}

class ModelsOnCard : public testing::TestWithParam<std::string> {};

TEST_P(ModelsOnCard, AgreeWithTheReferenceInFloat32) {
  const Reference reference(GetParam());
  const Found found = found_by(reference, Reference::Compute::kFloat32, kCard);
  EXPECT_NEAR(found.loss, reference.result("loss").item<double>(), 5e-6);
  for (const auto& [name, gradient] : found.gradients) {
    EXPECT_LT(relative_error(gradient, reference.result("grad/" + name)), 5e-5) << name;
  }
}

/// Other kernels round elsewhere: as far from fp32 as the CPU's are, and no more.
TEST_P(ModelsOnCard, AreInBfloat16AsNearToTheReferenceAsTheCpuIs) {
  const Reference reference(GetParam());
  const Found found = found_by(reference, Reference::Compute::kBFloat16, kCard);
  const Found on_cpu = found_by(reference, Reference::Compute::kBFloat16, at::kCPU);
  EXPECT_NEAR(found.loss, reference.result("loss").item<double>(), 2e-2);
  for (const auto& [name, gradient] : found.gradients) {
    const at::Tensor expected = reference.result("grad/" + name);
    EXPECT_LT(relative_error(gradient, expected),
              2 * relative_error(on_cpu.gradients.at(name), expected) + 5e-3)
        << name;
  }
}

std::string test_name(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  for (char& each : name) each = each == '-' ? '_' : each;
  return name;
}

INSTANTIATE_TEST_SUITE_P(Families, ModelsOnCard,
                         testing::Values("qwen3-fp32", "llama-fp32", "qwen2-fp32", "mistral-fp32",
                                         "qwen3-moe-fp32", "gpt-oss-fp32", "deepseek-v2-fp32",
                                         "deepseek-v2-group-fp32", "mixtral-fp32", "olmo2-fp32",
                                         "gemma3-text-fp32", "gpt2-fp32", "deepseek-v3-fp32",
                                         "glm4-moe-fp32", "llama4-text-fp32", "granite-fp32",
                                         "smollm3-fp32", "phi3-fp32", "phi4-mini-fp32",
                                         "qwen3-next-fp32", "qwen3-5-text-fp32", "nemotron-h-fp32"),
                         test_name);

}  // namespace
}  // namespace tessera::gpu_models_test
