// Gemma 4 against transformers (tests/golden/data). Bounds: that data's README.
#include <ATen/ATen.h>

#include "nn/attention/masked_attention.h"
#include "nn/loss.h"
#include "support/test.h"
#include "unit/models/reference.h"

namespace tessera::models::gemma4_reference_test {
namespace {

constexpr double kHiddenBound = 5e-5;
constexpr double kGradientBound = 5e-5;

ModelInputs inputs_of(const Reference& reference) {
  ModelInputs inputs;
  inputs.input_ids = reference.result("input_ids");
  inputs.images = Images{reference.result("pixel_values"), reference.result("image_position_ids")};
  inputs.token_types = reference.result("mm_token_type_ids");
  return inputs;
}

std::vector<at::Tensor> recorded_routing(const Reference& reference) {
  std::vector<at::Tensor> layers;
  for (std::int64_t i = 0; i < reference.spec().num_hidden_layers; ++i) {
    layers.push_back(reference.result("router/" + std::to_string(i) + "/indices"));
  }
  return layers;
}

class Gemma4Reference : public ::testing::TestWithParam<const char*> {
 protected:
  Reference reference_{GetParam()};
};

TEST_P(Gemma4Reference, TowerAndProjectorAgree) {
  const at::NoGradGuard no_grad;
  const auto model = reference_.gemma4(Reference::Compute::kFloat32);
  const at::Tensor soft = model->soft_tokens(*inputs_of(reference_).images);
  EXPECT_LT(largest(soft - reference_.result("vision/tower_output")), kHiddenBound);
  EXPECT_LT(largest(model->projector()->forward(soft) - reference_.result("vision/soft_tokens")),
            kHiddenBound);
}

TEST_P(Gemma4Reference, EveryLayersOutputAgrees) {
  const at::NoGradGuard no_grad;
  const auto model = reference_.gemma4(Reference::Compute::kFloat32);
  const ModelInputs inputs = inputs_of(reference_);
  at::Tensor x = model->embed(inputs);
  EXPECT_LT(largest(x - reference_.result("hidden/embed")), kHiddenBound);
  for (std::size_t i = 0; i < model->layers().size(); ++i) {
    x = model->layers()[i](x, model->seen(inputs), RoutingRequest{}).x;
    EXPECT_LT(largest(x - reference_.result("hidden/layer." + std::to_string(i))), kHiddenBound)
        << "layer " << i;
  }
  EXPECT_LT(
      largest(model->head().module()->norm()->forward(x) - reference_.result("hidden/final_norm")),
      kHiddenBound);
  EXPECT_LT(largest((*model).head()(x, std::nullopt) - reference_.result("logits")), kHiddenBound);
}

// Text alone, beyond the window of 6. The bound is that of a second fp32 implementation: only the
// order of sums differs.
TEST_P(Gemma4Reference, LogitsOverACacheAreThoseOfTheWholeText) {
  const at::NoGradGuard no_grad;
  const auto model = reference_.gemma4(Reference::Compute::kFloat32);
  ModelInputs text;
  const at::Tensor ids = reference_.result("input_ids");
  text.input_ids = ids.masked_fill(ids.ge(100), 7);
  const std::int64_t positions = text.input_ids.size(1);
  ASSERT_GT(positions, reference_.spec().gemma4->sliding_window + 2);
  const at::Tensor expected = model->forward(text);
  EXPECT_LT(largest(model->next_logits(text.input_ids) - expected.select(1, positions - 1)),
            kHiddenBound);
  for (const std::int64_t prompt : {std::int64_t{1}, std::int64_t{5}, positions - 2}) {
    SCOPED_TRACE(prompt);
    DecoderCache cache = model->make_cache(positions);
    at::Tensor found = model->decode(text.input_ids.narrow(1, 0, prompt), cache);
    for (std::int64_t t = prompt;; ++t) {
      EXPECT_LT(largest(found - expected.select(1, t - 1)), kHiddenBound) << t;
      if (t == positions) break;
      found = model->decode(text.input_ids.narrow(1, t, 1), cache);
    }
    EXPECT_EQ(cache.length(), positions);
  }
}

TEST_P(Gemma4Reference, ImagesInAPromptAreRefused) {
  const auto model = reference_.gemma4(Reference::Compute::kFloat32);
  DecoderCache cache = model->make_cache(64);
  const at::Tensor ids = at::full({1, 3}, reference_.spec().gemma4->image_token_id, at::kLong);
  EXPECT_THROW(model->decode(ids, cache), Error);
}

TEST_P(Gemma4Reference, LossAndAllGradientsAgree) {
  const auto model = reference_.gemma4(Reference::Compute::kFloat32);
  ModelInputs inputs = inputs_of(reference_);
  inputs.targets = nn::next_token_targets(reference_.result("labels"));
  const at::Tensor loss =
      model->forward(inputs) / static_cast<double>(nn::count_kept(*inputs.targets));
  EXPECT_NEAR(loss.item<double>(), reference_.result("loss").item<double>(), 5e-6);
  loss.backward();
  EXPECT_EQ(gradients(*model, model->spec()).size(), 86u);
  expect_gradients(*model, reference_, kGradientBound);
  for (const auto& item : model->named_parameters()) {
    if (item.value().requires_grad()) continue;
    EXPECT_FALSE(item.value().grad().defined()) << item.key();
  }
}

// The recorded choice is the model's own, so that imposing it changes nothing.
TEST_P(Gemma4Reference, ImposedRoutingOfTheSameChoiceGivesTheSameBits) {
  const at::NoGradGuard no_grad;
  const auto model = reference_.gemma4(Reference::Compute::kFloat32);
  ModelInputs inputs = inputs_of(reference_);
  const at::Tensor own = model->forward(inputs);
  inputs.imposed_routing = recorded_routing(reference_);
  EXPECT_TRUE(model->forward(inputs).equal(own));
  for (at::Tensor& layer : inputs.imposed_routing) layer = layer.flip(1);
  EXPECT_TRUE(model->forward(inputs).equal(own)) << "in another order";
  inputs.imposed_routing.back() = (inputs.imposed_routing.back() + 1) % 8;
  EXPECT_FALSE(model->forward(inputs).equal(own)) << "another choice";
}

TEST_P(Gemma4Reference, BFloat16GradientsPointTheSameWayWithTheRecordedRouting) {
  const auto model = reference_.gemma4(Reference::Compute::kBFloat16);
  ModelInputs inputs = inputs_of(reference_);
  inputs.targets = nn::next_token_targets(reference_.result("labels"));
  inputs.imposed_routing = recorded_routing(reference_);
  const at::Tensor loss =
      model->forward(inputs) / static_cast<double>(nn::count_kept(*inputs.targets));
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_NEAR(loss.item<double>(), reference_.result("loss").item<double>(), 0.02);
  loss.backward();
  // Twice the worst that transformers' own bf16 has (reference.json, same routing).
  const double bound = std::string(GetParam()) == "gemma4-fp32" ? 0.0254 : 0.0100;
  expect_directions(*model, reference_, bound);
}

// A row alone, with its own images, is what it is in the batch: nothing leaks between rows.
TEST_P(Gemma4Reference, RowsDoNotSeeEachOther) {
  const at::NoGradGuard no_grad;
  const auto model = reference_.gemma4(Reference::Compute::kFloat32);
  const ModelInputs inputs = inputs_of(reference_);
  const at::Tensor logits = model->forward(inputs);
  // A run of image tokens is an image.
  const at::Tensor flags = inputs.token_types->eq(1).to(at::kLong);
  const at::Tensor begins = at::constant_pad_nd(flags, {1, 0}).diff(1, 1).eq(1);
  const at::Tensor images_of_row = begins.sum(1).cumsum(0);
  std::int64_t begin = 0;
  for (std::int64_t row = 0; row < 2; ++row) {
    const std::int64_t end = images_of_row[row].item<std::int64_t>();
    ModelInputs one;
    one.input_ids = inputs.input_ids.narrow(0, row, 1);
    one.token_types = inputs.token_types->narrow(0, row, 1);
    one.images = Images{inputs.images->pixel_values.narrow(0, begin, end - begin),
                        inputs.images->position_ids.narrow(0, begin, end - begin)};
    EXPECT_LT(largest(model->forward(one) - logits.narrow(0, row, 1)), 1e-5) << "row " << row;
    begin = end;
  }
  EXPECT_EQ(begin, 2);
}

TEST_P(Gemma4Reference, ARankWithoutRowsOrImagesRunsAndGivesZeros) {
  const auto model = reference_.gemma4(Reference::Compute::kFloat32);
  const ModelInputs whole = inputs_of(reference_);
  ModelInputs none;
  none.input_ids = whole.input_ids.narrow(0, 0, 0);
  none.targets = none.input_ids;
  none.token_types = none.input_ids;
  none.images = Images{whole.images->pixel_values.narrow(0, 0, 0),
                       whole.images->position_ids.narrow(0, 0, 0)};
  const at::Tensor loss = model->forward(none);
  EXPECT_EQ(loss.item<double>(), 0.0);
  loss.backward();
  const auto found = gradients(*model, model->spec());
  EXPECT_EQ(found.size(), 86u);
  for (const auto& [name, gradient] : found) EXPECT_EQ(largest(gradient), 0.0) << name;
}

INSTANTIATE_TEST_SUITE_P(Folders, Gemma4Reference,
                         ::testing::Values("gemma4-fp32", "gemma4-mixed"));

}  // namespace
}  // namespace tessera::models::gemma4_reference_test
