// Gemma4Model: names, units, and inputs that do not fit.
#include "models/gemma4/gemma4_model.h"

#include <ATen/ATen.h>

#include "models/description.h"
#include "models/patch_grid.h"
#include "nn/parameter.h"
#include "support/test.h"

namespace tessera::models::gemma4_model_test {
namespace {

using Shapes = std::map<std::string, std::vector<std::int64_t>>;

constexpr std::int64_t kImageToken = 60;

ModelSpec small() {
  ModelSpec spec;
  spec.family = Family::kGemma4;
  spec.vocab_size = 64;
  spec.hidden_size = 16;
  spec.num_hidden_layers = 2;
  spec.num_attention_heads = 4;
  spec.num_key_value_heads = 2;
  spec.head_dim = 4;
  spec.intermediate_size = 24;
  spec.tie_word_embeddings = true;
  spec.pad_token_id = 0;
  Gemma4Spec& gemma = spec.gemma4.emplace();
  gemma.layers = {{.type = LayerType::kSliding, .head_dim = 4, .num_key_value_heads = 2},
                  {.head_dim = 8, .num_key_value_heads = 1, .key_is_value = true}};
  gemma.layers[1].type = LayerType::kFull;
  gemma.attention_k_eq_v = true;
  gemma.sliding_window = 4;
  gemma.full_rope = {
      .theta = 1e6, .type = nn::RopeType::kProportional, .partial_rotary_factor = 0.5};
  gemma.final_logit_softcapping = 30.0;
  spec.moe = MoeSpec{.num_experts = 4,
                     .experts_per_token = 2,
                     .moe_intermediate_size = 6,
                     .norm_topk_prob = true,
                     .activation = ExpertActivation::kGeglu,
                     .layout = ExpertLayout::kOutInAsOne};
  gemma.vision = Gemma4Vision{.hidden_size = 8,
                              .intermediate_size = 12,
                              .num_hidden_layers = 2,
                              .num_attention_heads = 2,
                              .num_key_value_heads = 1,
                              .head_dim = 4,
                              .patch_size = 2,
                              .pooling_kernel_size = 2,
                              .position_embedding_size = 8,
                              .standardize = true};
  gemma.image_token_id = kImageToken;
  return spec;
}

ModelSpec untied_text() {
  ModelSpec spec = small();
  spec.tie_word_embeddings = false;
  spec.gemma4->vision.reset();
  spec.moe.reset();
  spec.gemma4->final_logit_softcapping.reset();
  return spec;
}

Shapes shapes_of(const torch::OrderedDict<std::string, at::Tensor>& tensors) {
  Shapes shapes;
  for (const auto& item : tensors) shapes[item.key()] = item.value().sizes().vec();
  return shapes;
}

std::shared_ptr<Gemma4Model> drawn(const ModelSpec& spec) {
  at::manual_seed(3);
  auto model = std::make_shared<Gemma4Model>(spec);
  nn::materialize(*model);
  const at::NoGradGuard no_grad;
  for (auto& item : model->named_parameters()) item.value().normal_(0.0, 0.2);
  return model;
}

/// One 2 by 2 image, two positions in front of its token.
ModelInputs one_image() {
  ModelInputs inputs;
  inputs.input_ids =
      at::tensor({5, 6, static_cast<int>(kImageToken), 7, 8, 9}, at::kLong).view({1, 6});
  inputs.token_types = inputs.input_ids.eq(kImageToken).to(at::kLong);
  inputs.images =
      Images{at::rand({1, 4, 12}), at::tensor({0, 0, 1, 0, 0, 1, 1, 1}, at::kLong).view({1, 4, 2})};
  return inputs;
}

std::string refusal(Gemma4Model& model, const ModelInputs& inputs) {
  const at::NoGradGuard no_grad;
  return refusal_of(ErrorKind::kFormat, [&] { model.forward(inputs); });
}

TEST(Gemma4Model, ParametersAndBuffersAreThoseOfTheTables) {
  for (const ModelSpec& spec : {small(), untied_text()}) {
    const Gemma4Model model(spec);
    Shapes parameters;
    std::vector<std::string> in_order;
    for (const ParameterSpec& row : describe(spec).parameters) {
      parameters[row.name] = row.shape;
      in_order.push_back(row.name);
    }
    EXPECT_EQ(model.named_parameters().keys(), in_order) << "plans are made from the table";
    Shapes buffers;
    for (const BufferSpec& row : describe(spec).buffers) buffers[row.name] = row.shape;
    EXPECT_EQ(shapes_of(model.named_parameters()), parameters);
    EXPECT_EQ(shapes_of(model.named_buffers()), buffers);
  }
}

TEST(Gemma4Model, UnitsAreThoseOfTheTableInTheOrderOfForward) {
  const auto names = [](const ModelSpec& spec) {
    Gemma4Model model(spec);
    std::vector<std::string> result;
    for (const ModelUnit& unit : model.units()) result.push_back(unit.name);
    return result;
  };
  EXPECT_THAT(
      names(small()),
      ElementsAre("model.vision_tower.patch_embedder", "model.vision_tower.encoder.layers.0",
                  "model.vision_tower.encoder.layers.1", "model.language_model.layers.0",
                  "model.language_model.layers.1"));
  EXPECT_THAT(names(untied_text()),
              ElementsAre("model.language_model.embed_tokens", "model.language_model.layers.0",
                          "model.language_model.layers.1", "head"));
  EXPECT_EQ(names(small()), describe(small()).units);
  EXPECT_EQ(names(untied_text()), describe(untied_text()).units);
  const Gemma4Model model(small());
  EXPECT_EQ(model.canonical_name("head", "norm.weight"), "model.language_model.norm.weight");
  EXPECT_EQ(model.canonical_name("head", "lm_head.weight"), "lm_head.weight");
  EXPECT_EQ(model.canonical_name("model.language_model.layers.1", "router.scale"),
            "model.language_model.layers.1.router.scale");
}

TEST(Gemma4Model, ImagesMayAttendBothWaysAndTextNever) {
  ModelSpec spec = small();
  spec.gemma4->image_attention = ImageAttention::kBothWays;
  ModelInputs inputs;
  const auto id = static_cast<int>(kImageToken);
  inputs.input_ids = at::tensor({5, id, id, 7, id, 9}, at::kLong).view({1, 6});
  inputs.token_types = inputs.input_ids.eq(kImageToken).to(at::kLong);
  const Gemma4Model model(spec);
  EXPECT_TRUE(model.seen(inputs).ends.equal(at::tensor({1, 3, 3, 4, 5, 6}, at::kLong).view({1, 6})))
      << "a token of an image sees the last one of it, text itself";
  spec.gemma4->image_attention = ImageAttention::kCausal;
  EXPECT_FALSE(Gemma4Model(spec).seen(inputs).ends.defined());
}

TEST(Gemma4Model, EveryTokenIsCountedAtItsExpertsInEveryLayer) {
  const at::NoGradGuard no_grad;
  const auto model = drawn(small());
  ModelInputs inputs;
  inputs.input_ids = at::tensor({5, 6, 7}, at::kLong).view({1, 3});
  EXPECT_TRUE(model->forward_routed(inputs).loads.empty()) << "not asked for";
  inputs.router_statistics = RouterStatistics::kAndProbabilities;
  inputs.imposed_routing.assign(2, at::tensor({0, 1, 0, 1, 0, 3}, at::kLong).view({3, 2}));
  const ModelOutput output = model->forward_routed(inputs);
  ASSERT_EQ(output.loads.size(), 2U);
  for (const RouterLoad& load : output.loads) {
    EXPECT_TRUE(load.counts.equal(at::tensor({3, 2, 0, 1}, at::kLong))) << load.counts;
    EXPECT_NEAR(load.probabilities.sum().item<double>(), 3.0, 1e-5);
  }
  EXPECT_TRUE(output.result.equal(model->forward(inputs))) << "counting changes no bit";
}

TEST(Gemma4Model, TheRouterComputesInFloat32) {
  const at::NoGradGuard no_grad;
  at::manual_seed(3);
  const ModelSpec spec = small();
  Gemma4Router router(spec, 0, {});
  nn::materialize(router);
  for (at::Tensor parameter : router.parameters()) {
    parameter.normal_();
    parameter.set_data(parameter.to(at::kBFloat16));
  }
  const at::Tensor x = at::randn({8, 16}).to(at::kBFloat16);
  EXPECT_EQ(router.forward(x, std::nullopt).probabilities.scalar_type(), at::kFloat);
}

TEST(Gemma4Model, TextWithoutImagesNeedsNoTower) {
  const at::NoGradGuard no_grad;
  const auto model = drawn(small());
  ModelInputs inputs;
  inputs.input_ids = at::tensor({5, 6, 7}, at::kLong).view({1, 3});
  const at::Tensor logits = model->forward(inputs);
  EXPECT_EQ(logits.sizes(), (std::vector<std::int64_t>{1, 3, 64}));
  EXPECT_LT(logits.abs().max().item<double>(), 30.0);
  const auto text = drawn(untied_text());
  EXPECT_EQ(text->forward(inputs).sizes(), logits.sizes());
}

// The row of the padding token takes part in the tied head, and nowhere else.
TEST(Gemma4Model, ImageTokensGiveTheEmbeddingNoGradient) {
  const auto model = drawn(small());
  ModelInputs inputs = one_image();
  model->embed(inputs).sum().backward();
  const at::Tensor grad = model->embedding().module()->weight.grad().abs().sum(1);
  EXPECT_EQ(grad[kImageToken].item<double>(), 0.0);
  EXPECT_EQ(grad[0].item<double>(), 0.0);
  EXPECT_GT(grad[5].item<double>(), 0.0);
  for (const auto& item : model->projector()->named_parameters()) {
    EXPECT_GT(item.value().grad().abs().sum().item<double>(), 0.0);
  }
}

TEST(Gemma4Model, ATrainableTowerGetsGradients) {
  const auto model = drawn(small());
  ModelInputs inputs = one_image();
  inputs.targets = at::tensor({6, -100, 7, 8, 9, 1}, at::kLong).view({1, 6});
  model->forward(inputs).backward();
  for (const auto& item : model->named_parameters()) {
    EXPECT_TRUE(item.value().grad().defined()) << item.key();
  }
}

TEST(Gemma4Model, InputsThatDoNotFitAreRefused) {
  const auto model = drawn(small());
  ModelInputs inputs = one_image();
  EXPECT_EQ(refusal(*model, inputs), "");
  inputs.images.reset();
  EXPECT_THAT(refusal(*model, inputs), Says("without pixel_values"));
  inputs = one_image();
  inputs.token_types = at::zeros_like(*inputs.token_types);
  EXPECT_THAT(refusal(*model, inputs), Says("mm_token_type_ids"));
  inputs = one_image();
  inputs.input_ids[0][3] = kImageToken;
  inputs.token_types.reset();
  EXPECT_THAT(refusal(*model, inputs), Says("found 2 image tokens"));
  inputs = one_image();
  inputs.images->pixel_values = at::rand({1, 4, 11});
  EXPECT_THAT(refusal(*model, inputs), Says("pixel_values: found [1, 4, 11]"));
  inputs = one_image();
  inputs.imposed_routing = {at::zeros({6, 2}, at::kLong)};
  EXPECT_THAT(refusal(*model, inputs), Says("found 1 layers"));
  ModelSpec text = small();
  text.gemma4->vision.reset();
  EXPECT_THAT(refusal(*drawn(text), one_image()), Says("without vision_config"));
}

ImagePatches patches(std::int64_t kernel) {
  return {.patch_size = 16, .pooling_kernel_size = kernel, .position_embedding_size = 8};
}

/// One image a list of x, y, x, y, ...
at::Tensor positions(const std::vector<std::vector<std::int64_t>>& images) {
  std::vector<at::Tensor> rows;
  for (const auto& image : images) rows.push_back(at::tensor(image, at::kLong).view({-1, 2}));
  return at::stack(rows);
}

std::vector<std::int64_t> flat(const at::Tensor& tensor) {
  const at::Tensor one = tensor.contiguous();
  const auto* data = one.const_data_ptr<std::int64_t>();
  return {data, data + one.numel()};
}

std::string grid_refusal(const at::Tensor& ids, std::int64_t kernel) {
  return refusal_of(ErrorKind::kFormat, [&] { patch_grid(ids, patches(kernel)); });
}

TEST(PatchGrid, CellsAreRowMajorInAnyOrderOfPatches) {
  // 4 by 2 patches, columns first, padding in between; then a 2 by 2 image.
  const auto ids = positions(
      {{0, 0, 0, 1, 1, 0, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1, 2, 0, 2, 1, 3, 0, 3, 1},
       {1, 1, 0, 1, 1, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1}});
  const PatchGrid grid = patch_grid(ids, patches(2));
  EXPECT_THAT(grid.tokens, ElementsAre(2, 1));
  EXPECT_THAT(flat(grid.patches), ElementsAre(0, 2, 1, 3, 8, 10, 9, 11, 15, 14, 13, 12));
}

TEST(PatchGrid, WithoutPoolingPatchesStayAsTheyCome) {
  const PatchGrid grid = patch_grid(positions({{1, 0, -1, -1, 0, 0}}), patches(1));
  EXPECT_THAT(grid.tokens, ElementsAre(2));
  EXPECT_THAT(flat(grid.patches), ElementsAre(0, 2));
}

TEST(PatchGrid, NoImagesMakeNoTokens) {
  const PatchGrid grid = patch_grid(at::empty({0, 4, 2}, at::kLong), patches(2));
  EXPECT_TRUE(grid.tokens.empty());
  EXPECT_EQ(grid.patches.sizes(), (std::vector<std::int64_t>{0, 4}));
}

TEST(PatchGrid, WrongImagesAreRefusedWithTheirNumber) {
  const std::vector<std::int64_t> good{0, 0, 1, 0, 0, 1, 1, 1};
  EXPECT_EQ(grid_refusal(positions({good}), 2), "");
  EXPECT_THAT(grid_refusal(positions({good, {0, 0, 1, 0, 0, 1, -1, -1}}), 2),
              Says("image 1: found 3 patches within 2 by 2"));
  EXPECT_THAT(grid_refusal(positions({{0, 0, 1, 0, 2, 0, 3, 0}}), 2), Says("within 4 by 1"));
  EXPECT_THAT(grid_refusal(positions({{1, 1, 1, 0, 0, 1, 0, 1}}), 2), Says("(0, 1) twice"));
  EXPECT_THAT(grid_refusal(positions({good, {-1, -1, -1, -1, -1, -1, -1, -1}}), 2),
              Says("image 1: found only padding"));
  EXPECT_THAT(grid_refusal(positions({{0, 0, 1, 0, 0, 1, 1, -1}}), 2), Says("(1, -1) at patch 3"));
  EXPECT_THAT(grid_refusal(positions({{0, 0, 1, 0, 0, 1, 8, 1}}), 2), Says("0 to 7"));
  EXPECT_THAT(grid_refusal(positions({{0, 0, 1, 0}}), 2), Says("multiple of pooling_kernel_size"));
  EXPECT_THAT(grid_refusal(positions({good}).to(at::kInt), 2), Says("expected int64"));
}

}  // namespace
}  // namespace tessera::models::gemma4_model_test
