// GPT-2 against transformers (tests/golden/data). Bounds: that data's README.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "nn/loss.h"
#include "tessera/error.h"
#include "unit/models/reference.h"

namespace tessera::models::gpt2_reference_test {
namespace {

double largest(const at::Tensor& difference) { return difference.abs().max().item<double>(); }

class Gpt2Reference : public ::testing::TestWithParam<const char*> {
 protected:
  at::Tensor logits(LanguageModel& model) const {
    ModelInputs inputs;
    inputs.input_ids = reference_.result("input_ids");
    return model.forward(inputs);
  }
  /// Of the mean loss.
  at::Tensor loss(LanguageModel& model) const {
    ModelInputs inputs;
    inputs.input_ids = reference_.result("input_ids");
    inputs.targets = nn::next_token_targets(reference_.result("labels"));
    return model.forward(inputs) / static_cast<double>(nn::count_kept(*inputs.targets));
  }
  Reference reference_{GetParam()};
};

TEST_P(Gpt2Reference, LogitsLossAndAllGradientsAgree) {
  const auto model = reference_.gpt2(Reference::Compute::kFloat32);
  EXPECT_LT(largest(logits(*model) - reference_.result("logits")), 5e-5);
  const at::Tensor mean = loss(*model);
  EXPECT_NEAR(mean.item<double>(), reference_.result("loss").item<double>(), 5e-6);
  mean.backward();
  const auto found = gradients(*model, model->spec());
  EXPECT_EQ(found.size(), reference_.gradient_names().size());
  for (const auto& [name, gradient] : found) {
    const at::Tensor expected = reference_.result("grad/" + name);
    ASSERT_EQ(gradient.sizes(), expected.sizes()) << name;
    EXPECT_LT(((gradient - expected).norm() / expected.norm()).item<double>(), 5e-5) << name;
  }
}

TEST_P(Gpt2Reference, RecomputationChangesNoBit) {
  const auto plain = reference_.gpt2(Reference::Compute::kFloat32);
  loss(*plain).backward();
  const auto expected = gradients(*plain, plain->spec());
  for (const RecomputeMode mode : {RecomputeMode::kFull, RecomputeMode::kSelective}) {
    const auto model = reference_.gpt2(Reference::Compute::kFloat32);
    model->set_recompute(mode);
    loss(*model).backward();
    for (const auto& [name, gradient] : gradients(*model, model->spec())) {
      EXPECT_TRUE(gradient.equal(expected.at(name))) << name;
    }
  }
}

TEST_P(Gpt2Reference, BFloat16GradientsPointTheSameWay) {
  const auto model = reference_.gpt2(Reference::Compute::kBFloat16);
  const at::Tensor mean = loss(*model);
  EXPECT_NEAR(mean.item<double>(), reference_.result("loss").item<double>(), 0.02);
  mean.backward();
  for (const auto& [name, gradient] : gradients(*model, model->spec())) {
    const at::Tensor expected = reference_.result("grad/" + name);
    const double cosine =
        ((gradient * expected).sum() / (gradient.norm() * expected.norm())).item<double>();
    EXPECT_LT(1 - cosine, 0.01) << name;
  }
}

TEST_P(Gpt2Reference, TokensOneByOneGiveTheLogitsOfAWholeForward) {
  const auto model = reference_.gpt2(Reference::Compute::kFloat32);
  WritesText& writer = *model->writer();
  const at::Tensor ids = reference_.result("input_ids");
  const at::Tensor expected = reference_.result("logits");
  DecoderCache cache = writer.make_cache(ids.size(1));
  EXPECT_LT(largest(writer.decode(ids.narrow(1, 0, 5), cache) - expected.select(1, 4)), 5e-5);
  for (std::int64_t t = 5; t < ids.size(1); ++t) {
    const at::Tensor found = writer.decode(ids.narrow(1, t, 1), cache);
    EXPECT_LT(largest(found - expected.select(1, t)), 5e-5) << "position " << t;
  }
  EXPECT_LT(largest(writer.next_logits(ids.narrow(1, 0, 9)) - expected.select(1, 8)), 5e-5);
}

TEST_P(Gpt2Reference, NoRowsGiveZeros) {
  const auto model = reference_.gpt2(Reference::Compute::kFloat32);
  ModelInputs none;
  none.input_ids = at::empty({0, 5}, at::kLong);
  none.targets = none.input_ids;
  const at::Tensor sum = model->forward(none);
  EXPECT_EQ(sum.item<double>(), 0.0);
  sum.backward();
  const auto found = gradients(*model, model->spec());
  EXPECT_EQ(found.size(), reference_.gradient_names().size());
  for (const auto& [name, gradient] : found) EXPECT_EQ(largest(gradient), 0.0) << name;
}

TEST_P(Gpt2Reference, MorePositionsThanWereLearnedAreRefused) {
  const auto model = reference_.gpt2(Reference::Compute::kFloat32);
  ModelInputs inputs;
  inputs.input_ids = at::zeros({1, 33}, at::kLong);
  EXPECT_THROW(model->forward(inputs), Error);
}

INSTANTIATE_TEST_SUITE_P(Folders, Gpt2Reference, ::testing::Values("gpt2-fp32", "gpt2-mixed"));

}  // namespace
}  // namespace tessera::models::gpt2_reference_test
