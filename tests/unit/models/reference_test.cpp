// Dense models and GPT-2 against transformers (tests/golden/data). Bounds: that data's README.
#include "unit/models/reference.h"

#include <ATen/ATen.h>

#include "nn/loss.h"
#include "support/test.h"

namespace tessera::models::reference_test {
namespace {

struct Case {
  const char* folder;
  double bf16_worst;  ///< recorded: worst 1 - cosine of a gradient under bf16 compute
};

void PrintTo(const Case& value, std::ostream* out) { *out << value.folder; }

class DenseReference : public ::testing::TestWithParam<Case> {};

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
  expect_gradients(*model, reference, 5e-5);
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
  expect_gradients(*model, reference, 5e-5);
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
  expect_directions(*model, reference, std::max(0.01, 2 * GetParam().bf16_worst));
}

INSTANTIATE_TEST_SUITE_P(
    Folders, DenseReference,
    ::testing::Values(
        Case{"qwen3-fp32", 0.0016}, Case{"qwen3-mixed", 0.0010}, Case{"llama-fp32", 0.0007},
        Case{"llama-mixed", 0.0007}, Case{"qwen2-fp32", 0.0006}, Case{"qwen2-mixed", 0.0006},
        Case{"mistral-fp32", 0.0009}, Case{"mistral-mixed", 0.0006}, Case{"olmo2-fp32", 0.0012},
        Case{"olmo2-mixed", 0.0008}, Case{"gemma3-text-fp32", 0.0011},
        Case{"gemma3-text-mixed", 0.0010}, Case{"granite-fp32", 0.0001},
        Case{"granite-mixed", 0.0001}, Case{"smollm3-fp32", 0.0019}, Case{"smollm3-mixed", 0.0013},
        Case{"phi3-fp32", 0.0004}, Case{"phi3-mixed", 0.0003}, Case{"phi4-mini-fp32", 0.0005},
        Case{"qwen3-5-text-fp32", 0.0280}, Case{"qwen3-5-text-mixed", 0.0063}));

// GPT-2 against transformers (tests/golden/data). Bounds: that data's README.

class Gpt2Reference : public ::testing::TestWithParam<const char*> {
 protected:
  at::Tensor logits(LanguageModel& model) const {
    ModelInputs inputs;
    inputs.input_ids = reference_.result("input_ids");
    return model.forward(inputs);
  }
  /// Returns the mean loss.
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
  expect_gradients(*model, reference_, 5e-5);
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
  expect_directions(*model, reference_, 0.01);
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
}  // namespace tessera::models::reference_test
