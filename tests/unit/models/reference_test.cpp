// Dense models against transformers (tests/golden/data). Bounds: that data's README.
#include "unit/models/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "nn/loss.h"

namespace tessera::models::reference_test {
namespace {

struct Case {
  const char* folder;
  double bf16_worst;  ///< recorded: worst 1 - cosine of a gradient under bf16 compute
};

void PrintTo(const Case& value, std::ostream* out) { *out << value.folder; }

class DenseReference : public ::testing::TestWithParam<Case> {};

double relative_error(const at::Tensor& found, const at::Tensor& expected) {
  return ((found - expected).norm() / expected.norm()).item<double>();
}

TEST_P(DenseReference, Float32LogitsLossAndGradientsAgree) {
  const Reference reference(GetParam().folder);
  const auto model = reference.model(Reference::Compute::kFloat32);
  const at::Tensor ids = reference.result("input_ids");
  const at::Tensor labels = nn::next_token_targets(reference.result("labels"));

  const at::Tensor logits = model->logits(ids);
  EXPECT_LT((logits - reference.result("logits")).abs().max().item<double>(), 5e-5);

  const double kept = static_cast<double>(nn::count_kept(labels));
  const at::Tensor loss = model->loss_sum(ids, labels) / kept;
  EXPECT_NEAR(loss.item<double>(), reference.result("loss").item<double>(), 5e-6);

  loss.backward();
  const auto found = gradients(*model, model->spec());
  for (const auto& [name, gradient] : found) {
    const at::Tensor expected = reference.result("grad/" + name);
    ASSERT_EQ(gradient.sizes(), expected.sizes()) << name;
    EXPECT_LT(relative_error(gradient, expected), 5e-5) << name;
  }
}

TEST_P(DenseReference, GradientsThroughVisibleLogitsAgree) {
  const Reference reference(GetParam().folder);
  const auto model = reference.model(Reference::Compute::kFloat32);
  const at::Tensor labels = nn::next_token_targets(reference.result("labels"));
  const at::Tensor logits = model->logits(reference.result("input_ids"));
  const at::Tensor before = logits.detach().clone();
  const double kept = static_cast<double>(nn::count_kept(labels));
  (nn::cross_entropy_sum(logits, labels) / kept).backward();
  EXPECT_TRUE(logits.equal(before)) << "backward wrote over logits that are still visible";
  for (const auto& [name, gradient] : gradients(*model, model->spec())) {
    EXPECT_LT(relative_error(gradient, reference.result("grad/" + name)), 5e-5) << name;
  }
}

TEST_P(DenseReference, BFloat16GradientsPointTheSameWay) {
  const Reference reference(GetParam().folder);
  const auto model = reference.model(Reference::Compute::kBFloat16);
  const at::Tensor labels = nn::next_token_targets(reference.result("labels"));
  const double kept = static_cast<double>(nn::count_kept(labels));
  const at::Tensor loss = model->loss_sum(reference.result("input_ids"), labels) / kept;
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  // bf16 has 8 bits: 2^-8 of a loss of about 4.9, and rounding errors average out.
  EXPECT_NEAR(loss.item<double>(), reference.result("loss").item<double>(), 0.02);
  loss.backward();
  const double bound = std::max(0.01, 2 * GetParam().bf16_worst);
  for (const auto& [name, gradient] : gradients(*model, model->spec())) {
    const at::Tensor expected = reference.result("grad/" + name);
    const double cosine =
        ((gradient * expected).sum() / (gradient.norm() * expected.norm())).item<double>();
    EXPECT_LT(1 - cosine, bound) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Folders, DenseReference,
                         ::testing::Values(Case{"qwen3-fp32", 0.0016}, Case{"qwen3-mixed", 0.0010},
                                           Case{"llama-fp32", 0.0007}, Case{"llama-mixed", 0.0007},
                                           Case{"qwen2-fp32", 0.0006}, Case{"qwen2-mixed", 0.0006},
                                           Case{"mistral-fp32", 0.0009},
                                           Case{"mistral-mixed", 0.0006},
                                           Case{"olmo2-fp32", 0.0012}, Case{"olmo2-mixed", 0.0008},
                                           Case{"gemma3-text-fp32", 0.0011},
                                           Case{"gemma3-text-mixed", 0.0010}));

}  // namespace
}  // namespace tessera::models::reference_test
