// The auxiliary loss of routers and the loads of experts against transformers, in layouts of
// tensor, expert and data parallelism: for any distribution of rows and tokens, counts and means
// are those of the whole batch, each gradient once. In ./test --all a third of the layouts for each
// folder, all of them under `scripts/full golden`.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <nlohmann/json.hpp>

#include "golden/degrees.h"
#include "golden/model_folder.h"
#include "io/safetensors.h"
#include "proof.h"
#include "support/ranks.h"
#include "support/test.h"
#include "train/data/data.h"
#include "train/parallelize.h"
#include "unit/train/parallel_degrees.h"

namespace tessera::golden::router_layouts_test {
namespace {

std::vector<Degrees> layouts() {
  auto all = one_of_each_form(Experts::kSome);
  all.push_back({.shard = 3});  // one rank without rows
  all.push_back({.replicate = 2});
  all.push_back({.replicate = 2, .tp = 2, .sequence = false, .router = RouterTokens::kAll});
  all.push_back({.shard = 2, .tp = 2, .sequence = false});
  all.push_back({.shard = 2, .tp = 2, .ep = 2, .etp = 2, .sequence = false});
  return all;
}

class RouterLayouts : public ::testing::TestWithParam<std::string> {
 protected:
  const Reference& reference() const { return Reference::of(GetParam()); }
  std::vector<Degrees> layouts_in_turn() const {
    auto all = layouts();
    std::erase_if(all, [](const Degrees& each) { return heads_of(GetParam()) % each.tp != 0; });
    return test::in_turn(all, 3, kMoeFolders, GetParam());
  }
};

// 0.7 is no round number on purpose. The loss that is reported does not have it.
TEST_P(RouterLayouts, TheAuxiliaryLossIsThatOfTheWholeBatchInEveryLayout) {
  constexpr double kCoef = 0.7;
  const auto run = [&](const Degrees& degrees) {
    auto config = config_for(GetParam(), degrees);
    config.model.aux_loss_coef = kCoef;
    return run_gradients(config, layout_of(degrees), reference().batches());
  };
  const auto on_one_rank = run({});
  for (const Degrees& degrees : layouts_in_turn()) {
    SCOPED_TRACE(to_string(degrees));
    const auto found = run(degrees);
    EXPECT_NEAR(found.loss, reference().result("loss").item<double>(), kLossBound);
    ASSERT_EQ(found.by_name.size(), reference().gradients().size());
    std::int64_t compared = 0;
    for (const auto& [name, plain] : reference().gradients()) {
      const bool router =
          name.ends_with(".gate.weight") || name.find(".mlp.router.") != std::string::npos;
      if (router || name == "model.embed_tokens.weight") {
        const at::Tensor expected = plain + kCoef * reference().result("aux_grad/" + name);
        EXPECT_LT(relative_error(found.by_name.at(name), expected), kGradientBound) << name;
        ++compared;
      } else {  // reached through the inputs of later routers; not recorded
        EXPECT_LT(relative_error(found.by_name.at(name), on_one_rank.by_name.at(name)),
                  kGradientBound)
            << name;
      }
    }
    EXPECT_GE(compared, spec_of(GetParam()).num_hidden_layers + 1);
  }
}

/// The one batch of the reference as the first of training.
std::string batch_of_step_one(const Reference& reference) {
  const auto path = temporary_path("batch.safetensors").string();
  std::vector<TensorSpec> specs;
  std::vector<at::Tensor> tensors;
  std::vector<std::string> names{"input_ids", "labels"};
  const bool images = reference.name().starts_with("gemma4");
  if (images) names.emplace_back("mm_token_type_ids");
  for (const auto& name : names) {
    tensors.push_back(reference.result(name).unsqueeze(0));
    specs.push_back({"steps/" + name, DType::kInt64, tensors.back().sizes().vec()});
  }
  if (images) {  // these serve every step
    for (const auto& [name, dtype] : {std::pair{"image_position_ids", DType::kInt64},
                                      std::pair{"pixel_values", DType::kFloat32}}) {
      tensors.push_back(reference.result(name));
      specs.push_back({name, dtype, tensors.back().sizes().vec()});
    }
  }
  SafetensorsWriter writer(path, specs);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const auto* bytes = static_cast<const std::byte*>(tensors[i].const_data_ptr());
    writer.write(specs[i].name, {bytes, tensors[i].nbytes()});
  }
  writer.finish();
  return path;
}

/// Returns the metrics of the only step of a run, with the auxiliary loss at half; its loss is the
/// reference's.
nlohmann::json line_of_step_one(const Reference& reference, const std::string& batch,
                                const Degrees& degrees) {
  auto config = training_config(reference, OptimizerKind::kSgd, layout_of(degrees));
  train::set_parallelism(config, degrees);
  config.data.path = {batch};
  config.training.steps = 1;
  config.model.aux_loss_coef = 0.5;
  const auto run = run_training(config, layout_of(degrees));
  EXPECT_NEAR(run.losses.at(0), reference.result("loss").item<double>(), kLossBound);
  return nlohmann::json::parse(run.lines.at(0));
}

TEST_P(RouterLayouts, TrainingReportsTheReferencesAuxiliaryLossAndLoads) {
  const auto batch = batch_of_step_one(reference());
  for (const Degrees& degrees : layouts_in_turn()) {
    SCOPED_TRACE(to_string(degrees));
    const auto line = line_of_step_one(reference(), batch, degrees);
    EXPECT_NEAR(line.at("aux_loss").get<double>(), reference().result("aux_loss").item<double>(),
                kLossBound);
    for (const int layer : {0, 1}) {
      const auto chosen = reference().result(concat("router/", layer, "/indices")).flatten();
      const at::Tensor counts = chosen.bincount({}, 8).to(at::kDouble);
      const double load = (counts.max() / counts.mean()).item<double>();
      EXPECT_NEAR(line.at(concat("moe/load_max_over_mean/", layer)).get<double>(), load, 1e-9);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Folders, RouterLayouts, ::testing::ValuesIn(kMoeFolders), folder_name);

// transformers has no such loss for Gemma 4: it is the formula of the others over the probabilities
// and choices that transformers recorded of its routers.

const Reference& gemma() { return Reference::of("gemma4-fp32"); }
constexpr double kExperts = 8;
constexpr double kExpertsPerToken = 2;

/// In ./test --all another half for each of the two cases.
std::vector<Degrees> half_of_layouts(int number) {
  return test::in_turn(layouts(), 2, std::vector{0, 1}, number);
}

/// E * sum over experts of f * p. Both [E], sums over the tokens of all layers.
at::Tensor formula(const at::Tensor& counts, const at::Tensor& probabilities) {
  const double rows = counts.sum().item<double>() / kExpertsPerToken;
  return kExperts * (counts.detach() / rows * (probabilities / rows)).sum();
}

TEST(GemmaRouters, TrainingReportsTheFormulaOfTheRecordedRoutersInEveryLayout) {
  at::Tensor counts = at::zeros({8}, at::kDouble);
  at::Tensor probabilities = at::zeros({8}, at::kDouble);
  for (int layer = 0; layer < 4; ++layer) {
    const std::string router = concat("router/", layer, "/");
    counts += gemma().result(router + "indices").flatten().bincount({}, 8);
    probabilities += gemma().result(router + "probs").to(at::kDouble).sum(0);
  }
  const double expected = formula(counts, probabilities).item<double>();
  const auto batch = batch_of_step_one(gemma());
  for (const Degrees& degrees : half_of_layouts(0)) {
    SCOPED_TRACE(to_string(degrees));
    const auto line = line_of_step_one(gemma(), batch, degrees);
    EXPECT_NEAR(line.at("aux_loss").get<double>(), expected, kLossBound);
  }
}

/// Returns the gradients of the mean loss and `coef` times the formula, by autograd alone on one
/// rank.
Tensors gradients_of_formula(double coef) {
  Tensors found;
  test::ranks(1).run([&](World& world) {
    at::set_num_threads(1);
    const auto config = config_for(gemma().name(), {});
    const auto source = train::open_model(config.model);
    const auto dims = train::resolve_parallelism(config.parallelism, 1);
    const auto model = train::parallelize(source, config, world.mesh(train::mesh_shape(dims)));
    const auto batch =
        train::open_gradients_batch(gemma().batches(), train::vocabulary_of(source.spec, false),
                                    std::nullopt)
            ->load(1, {0, 2})
            .on(world.device(), *model->module());
    auto inputs = batch.inputs();
    inputs.router_statistics = models::RouterStatistics::kAndProbabilities;
    const auto output = model->call(&models::LanguageModel::forward_routed, inputs);
    at::Tensor counts = at::zeros({8}, at::TensorOptions(world.device()));
    at::Tensor probabilities = counts;
    for (const auto& load : output.loads) {
      counts = counts + load.counts;
      probabilities = probabilities + load.probabilities;
    }
    const auto kept = static_cast<double>(batch.unmasked_targets());
    (output.result / kept + coef * formula(counts, probabilities)).backward();
    model->visit_full_gradients([&](const std::string& name, const at::Tensor& gradient) {
      found[name] = gradient.detach().cpu().clone();
    });
  });
  return found;
}

TEST(GemmaRouters, GradientsAreThoseOfTheFormulaInEveryLayout) {
  constexpr double kCoef = 0.7;
  const Tensors expected = gradients_of_formula(kCoef);
  ASSERT_EQ(expected.size(), gemma().gradients().size());
  const std::string router = "model.language_model.layers.1.router.proj.weight";
  ASSERT_GT(relative_error(expected.at(router), gemma().gradients().at(router)), 0.01)
      << "the loss moves no router: nothing is compared";
  for (const Degrees& degrees : half_of_layouts(1)) {
    SCOPED_TRACE(to_string(degrees));
    auto config = config_for(gemma().name(), degrees);
    config.model.aux_loss_coef = kCoef;
    const auto found = run_gradients(config, layout_of(degrees), gemma().batches());
    EXPECT_NEAR(found.loss, gemma().result("loss").item<double>(), kLossBound);
    for (const auto& [name, gradient] : expected) {
      EXPECT_LT(relative_error(found.by_name.at(name), gradient), kGradientBound) << name;
    }
  }
}

}  // namespace
}  // namespace tessera::golden::router_layouts_test
