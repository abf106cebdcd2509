// Decoders with experts against transformers (tests/golden/data). Bounds: that data's README.
#include <ATen/ATen.h>

#include "models/adapters.h"
#include "nn/loss.h"
#include "support/tensors.h"
#include "support/test.h"
#include "unit/models/reference.h"

namespace tessera::models::moe_reference_test {
namespace {

constexpr double kGradientBound = 5e-5;
constexpr double kWeightBound = 1e-5;  // relative

ModelInputs inputs_of(const Reference& reference) {
  ModelInputs inputs;
  inputs.input_ids = reference.result("input_ids");
  return inputs;
}

std::vector<at::Tensor> recorded_routing(const Reference& reference) {
  std::vector<at::Tensor> layers;
  for (const std::int64_t layer : routed_experts(reference.spec()).layers) {
    layers.push_back(reference.result(concat("router/", layer, "/indices")));
  }
  return layers;
}

struct Case {
  const char* folder;
  double bf16_worst;  ///< recorded, with the same routing: worst 1 - cosine under bf16 compute
  double hidden_bound = 5e-5;
  double draws = 2;  ///< times the recorded worst, which is one draw (Reference::bfloat16_bound())
};

void PrintTo(const Case& value, std::ostream* out) { *out << value.folder; }

class MoeReference : public ::testing::TestWithParam<Case> {
 protected:
  /// Returns the mean loss.
  at::Tensor loss_of(Decoder& model, ModelInputs inputs) const {
    inputs.targets = nn::next_token_targets(reference_.result("labels"));
    return model.forward(inputs) / static_cast<double>(nn::count_kept(*inputs.targets));
  }
  Reference reference_{GetParam().folder};
};

TEST_P(MoeReference, EveryLayersOutputAgrees) {
  if (!reference_.has_result("hidden/embed")) GTEST_SKIP() << "the other dtype's folder has them";
  const at::NoGradGuard no_grad;
  const auto model = reference_.model(Reference::Compute::kFloat32);
  at::Tensor x = model->embedding()(reference_.result("input_ids"));
  EXPECT_LT(largest(x - reference_.result("hidden/embed")), GetParam().hidden_bound);
  for (std::size_t i = 0; i < model->layers().size(); ++i) {
    x = model->layers()[i](x, RoutingRequest{}, nn::Documents{}).x;
    EXPECT_LT(largest(x - reference_.result(concat("hidden/layer.", i))), GetParam().hidden_bound)
        << "layer " << i;
  }
  EXPECT_LT(
      largest(model->head().module()->norm()->forward(x) - reference_.result("hidden/final_norm")),
      GetParam().hidden_bound);
  EXPECT_LT(largest(model->head()(x, std::nullopt) - reference_.result("logits")),
            GetParam().hidden_bound);
}

TEST_P(MoeReference, LossAndAllGradientsAgree) {
  const auto model = reference_.model(Reference::Compute::kFloat32);
  const at::Tensor loss = loss_of(*model, inputs_of(reference_));
  EXPECT_NEAR(loss.item<double>(), reference_.result("loss").item<double>(), 5e-6);
  loss.backward();
  expect_gradients(*model, reference_, kGradientBound);
}

// The recorded choice is the model's own, so that imposing it changes nothing.
TEST_P(MoeReference, ImposedRoutingOfTheSameChoiceGivesTheSameBits) {
  const at::NoGradGuard no_grad;
  const auto model = reference_.model(Reference::Compute::kFloat32);
  ModelInputs inputs = inputs_of(reference_);
  const at::Tensor own = model->forward(inputs);
  inputs.imposed_routing = recorded_routing(reference_);
  EXPECT_TRUE(model->forward(inputs).equal(own));
  for (at::Tensor& layer : inputs.imposed_routing) layer = layer.flip(1);
  EXPECT_TRUE(model->forward(inputs).equal(own)) << "in another order";
  inputs.imposed_routing.back() =
      (inputs.imposed_routing.back() + 1) % reference_.spec().moe->num_experts;
  EXPECT_FALSE(model->forward(inputs).equal(own)) << "another choice";
  inputs.imposed_routing.pop_back();
  if (inputs.imposed_routing.empty()) return;  // of one layer: nothing is imposed
  EXPECT_THROW(model->forward(inputs), Error) << "a layer without";
}

TEST_P(MoeReference, BFloat16GradientsPointTheSameWayWithTheRecordedRouting) {
  const auto model = reference_.model(Reference::Compute::kBFloat16);
  ModelInputs inputs = inputs_of(reference_);
  inputs.imposed_routing = recorded_routing(reference_);
  const at::Tensor loss = loss_of(*model, inputs);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_NEAR(loss.item<double>(), reference_.result("loss").item<double>(), 0.02);
  loss.backward();
  expect_directions(*model, reference_, std::max(0.01, GetParam().draws * GetParam().bf16_worst));
}

// E * sum of f * p over the pooled layers, as transformers has it; only routers and what lies
// before them get a gradient.
TEST_P(MoeReference, AuxiliaryLossAndItsGradientsAgree) {
  if (!reference_.has_result("aux_loss")) GTEST_SKIP() << "transformers computes none here";
  const auto model = reference_.model(Reference::Compute::kFloat32);
  ModelInputs inputs = inputs_of(reference_);
  inputs.router_statistics = RouterStatistics::kAndProbabilities;
  const ModelOutput output = model->forward_routed(inputs);
  ASSERT_EQ(output.loads.size(), recorded_routing(reference_).size());
  at::Tensor counts = at::zeros({8}, at::kLong);
  at::Tensor probabilities = at::zeros({8});
  for (std::size_t i = 0; i < output.loads.size(); ++i) {
    const at::Tensor chosen = recorded_routing(reference_)[i].reshape({-1});
    EXPECT_TRUE(output.loads[i].counts.equal(at::bincount(chosen, {}, 8))) << "layer " << i;
    counts = counts + output.loads[i].counts;
    probabilities = probabilities + output.loads[i].probabilities;
  }
  const double rows =
      static_cast<double>(inputs.input_ids.numel()) * static_cast<double>(output.loads.size());
  const at::Tensor loss = (counts.to(at::kFloat) * probabilities).sum() * (8 / (rows * rows));
  EXPECT_NEAR(loss.item<double>(), reference_.result("aux_loss").item<double>(), 5e-6);
  loss.backward();
  std::int64_t compared = 0;
  for (const auto& item : model->named_parameters()) {
    if (!reference_.has_result("aux_grad/" + item.key())) continue;
    EXPECT_LT(
        test::relative_error(item.value().grad(), reference_.result("aux_grad/" + item.key())),
        kGradientBound)
        << item.key();
    ++compared;
  }
  EXPECT_GE(compared, reference_.spec().num_hidden_layers + 1);
}

TEST_P(MoeReference, RecomputationChangesNoBitAndCountsOnce) {
  for (const RecomputeMode mode : {RecomputeMode::kFull, RecomputeMode::kSelective}) {
    const auto gradients_of = [&](RecomputeMode each) {
      const auto model = reference_.model(Reference::Compute::kFloat32);
      model->set_recompute(each);
      ModelInputs inputs = inputs_of(reference_);
      inputs.router_statistics = RouterStatistics::kAndProbabilities;
      const ModelOutput output = model->forward_routed(inputs);
      at::Tensor root = output.result.sum();
      for (const RouterLoad& load : output.loads) {
        EXPECT_EQ(load.counts.sum().item<std::int64_t>(),
                  inputs.input_ids.numel() * reference_.spec().moe->experts_per_token);
        root = root + load.probabilities[0];
      }
      root.backward();
      return gradients(*model, model->spec());
    };
    const auto plain = gradients_of(RecomputeMode::kNone);
    for (const auto& [name, gradient] : gradients_of(mode)) {
      EXPECT_TRUE(gradient.equal(plain.at(name))) << name;
    }
  }
}

TEST_P(MoeReference, NoRowsGiveZeros) {
  const auto model = reference_.model(Reference::Compute::kFloat32);
  ModelInputs none;
  none.input_ids = at::empty({0, 5}, at::kLong);
  none.targets = none.input_ids;
  none.router_statistics = RouterStatistics::kAndProbabilities;
  const ModelOutput output = model->forward_routed(none);
  EXPECT_EQ(output.result.item<double>(), 0.0);
  EXPECT_EQ(output.loads.front().counts.sum().item<std::int64_t>(), 0);
  (output.result + output.loads.front().probabilities.sum()).backward();
  const auto found = gradients(*model, model->spec());
  EXPECT_EQ(found.size(), reference_.gradient_names().size());
  for (const auto& [name, gradient] : found) EXPECT_EQ(largest(gradient), 0.0) << name;
}

// A cache shorter than, as long as and longer than the window of sliding layers.
TEST_P(MoeReference, TokensOneByOneGiveTheLogitsOfAWholeForward) {
  const auto model = reference_.model(Reference::Compute::kFloat32);
  const at::Tensor ids = reference_.result("input_ids");
  const at::Tensor expected = reference_.result("logits");
  DecoderCache cache = model->make_cache(ids.size(1));
  for (std::int64_t t = 0; t < ids.size(1); ++t) {
    const at::Tensor found = model->decode(ids.narrow(1, t, 1), cache);
    EXPECT_LT(largest(found - expected.select(1, t)), GetParam().hidden_bound) << "position " << t;
    if (t % 8 != 0) continue;
    EXPECT_LT(largest(model->next_logits(ids.narrow(1, 0, t + 1)) - expected.select(1, t)),
              GetParam().hidden_bound);
  }
}

// Router weights as the reference recorded them.
TEST_P(MoeReference, RoutingWeightsAgree) {
  const at::NoGradGuard no_grad;
  const auto model = reference_.model(Reference::Compute::kFloat32);
  for (const std::int64_t layer : routed_experts(reference_.spec()).layers) {
    ExpertRouter router(reference_.spec(), layer);
    const at::Tensor scores = reference_.result(concat("router/", layer, "/logits"));
    for (auto& buffer : router.named_buffers()) {
      buffer.value().set_data(reference_.stored(
          concat(reference_.spec().mamba ? "backbone" : "model", ".layers.", layer,
                 reference_.spec().mamba ? ".mixer" : ".mlp", ".gate.", buffer.key())));
    }
    const moe::Routing routing = router.route(scores, std::nullopt);
    EXPECT_TRUE(routing.indices.equal(reference_.result(concat("router/", layer, "/indices"))));
    const at::Tensor expected = reference_.result(concat("router/", layer, "/weights"));
    EXPECT_LT(((routing.weights - expected) / expected).abs().max().item<double>(), kWeightBound);
  }
}

// A cache holds for a token the latent and the rotated part of the one key, for all heads.
TEST(LatentAttention, TheCacheHoldsTheLatentAlone) {
  for (const char* name : {"deepseek-v2-group-fp32", "deepseek-v3-fp32"}) {
    const Reference reference(name);
    const auto model = reference.model(Reference::Compute::kFloat32);
    const at::Tensor ids = reference.result("input_ids");
    const at::Tensor expected = reference.result("logits");
    for (const std::int64_t prompt : {1, 7, 20}) {
      DecoderCache cache = model->make_cache(ids.size(1));
      EXPECT_TRUE(model->decode(ids.narrow(1, 0, prompt), cache)
                      .equal(model->next_logits(ids.narrow(1, 0, prompt))))
          << name << ": the first call of a cache has a whole forward's bits";
      // Some at a time: each new one sees those before it.
      const at::Tensor found = model->decode(ids.narrow(1, prompt, 3), cache);
      EXPECT_LT(largest(found - expected.select(1, prompt + 2)), 1e-4) << name << " " << prompt;
      const MlaSpec& mla = *reference.spec().mla;
      EXPECT_EQ(cache.layers.front().keys().sizes(),
                at::IntArrayRef({2, 1, prompt + 3, mla.kv_lora_rank + mla.qk_rope_head_dim}));
    }
  }
}

TEST(LatentAttention, AnAdapterOfKeysAndValuesIsDecodedWithThem) {
  const Reference reference("deepseek-v2-fp32");
  const auto model = reference.model(Reference::Compute::kFloat32);
  const at::Tensor ids = reference.result("input_ids");
  const at::Tensor plain = model->next_logits(ids);
  add_adapters(*model, plan_lora(reference.spec(), {.rank = 4, .targets = {"kv_b_proj"}}));
  at::manual_seed(3);
  for (auto& item : model->named_parameters()) {
    if (is_adapter(item.key())) item.value().set_data(at::randn(item.value().sizes()) * 0.3);
  }
  const at::Tensor expected = model->next_logits(ids);
  EXPECT_GT(largest(expected - plain), 1e-2) << "the adapter counts";
  DecoderCache cache = model->make_cache(ids.size(1));
  model->decode(ids.narrow(1, 0, 9), cache);
  EXPECT_LT(largest(model->decode(ids.narrow(1, 9, ids.size(1) - 9), cache) - expected), 1e-4);
}

INSTANTIATE_TEST_SUITE_P(
    Folders, MoeReference,
    ::testing::Values(
        Case{"deepseek-v2-fp32", 0.0029}, Case{"deepseek-v2-group-fp32", 0.0051, 1e-4},
        Case{"deepseek-v2-group-mixed", 0.0076, 1e-4}, Case{"deepseek-v3-fp32", 0.0028},
        Case{"deepseek-v3-mixed", 0.0025}, Case{"kimi-k2-fp32", 0.0009},
        Case{"kimi-k2-mixed", 0.0008}, Case{"glm4-moe-fp32", 0.0019},
        Case{"glm4-moe-mixed", 0.0009}, Case{"gpt-oss-fp32", 0.0043}, Case{"gpt-oss-mixed", 0.0046},
        Case{"llama4-text-fp32", 0.0012}, Case{"llama4-text-mixed", 0.0007},
        Case{"qwen3-moe-fp32", 0.0026}, Case{"qwen3-moe-mixed", 0.0018},
        Case{"mixtral-fp32", 0.0012}, Case{"mixtral-mixed", 0.0012},
        Case{"qwen3-next-fp32", 0.0226, 5e-5, 3}, Case{"qwen3-next-mixed", 0.0415, 5e-5, 3},
        Case{"nemotron-h-fp32", 0.0031}, Case{"nemotron-h-mixed", 0.0307}));

}  // namespace
}  // namespace tessera::models::moe_reference_test
