// Gemma 4 under sharding: training against transformers, a frozen tower, images and routing of a
// batch file. Its gradients are in gradients_test.cpp, in bf16 in narrow_layouts_test.cpp. Runs
// have one half of the layouts for each of the two folders in ./test, all of them under
// `scripts/full golden`.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "golden/layouts.h"
#include "golden/model_folder.h"
#include "io/safetensors.h"
#include "models/language_model.h"
#include "proof.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "train/data/data.h"
#include "train/hf/hf_export.h"
#include "train/hf/weights.h"
#include "train/parallelize.h"

namespace tessera::golden::gemma4_test {
namespace {

class GoldenGemma4 : public ::testing::TestWithParam<std::string> {
 protected:
  const Reference& reference() const { return Reference::of(GetParam()); }
};

double norm_of_difference(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).norm().item<double>();
}

TEST_P(GoldenGemma4, TrainingIsThatOfTheReferenceAndTheTowerStays) {
  const std::vector<Layout> all{
      {.ranks = 1},
      {.ranks = 2},
      {.ranks = 3, .reshard_after_forward = false, .micro_batches = MicroBatches::kOneRowEachSync},
      {.ranks = 4, .replicas = 2}};
  for (const auto kind : {OptimizerKind::kSgd, OptimizerKind::kAdamW}) {
    const auto expected = reference().step_losses(to_string(kind));
    for (const auto& layout : test::in_turn(all, 2, kGemmaFolders, GetParam())) {
      SCOPED_TRACE(to_string(kind) + ", " + to_string(layout));
      const auto found = run_training(training_config(reference(), kind, layout), layout, {5});
      ASSERT_EQ(found.losses.size(), expected.size());
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_NEAR(found.losses[i], expected[i], kStepLossBound) << "step " << i + 1;
      }
      std::size_t frozen = 0;
      for (const auto& [name, after] : found.parameters.at(5)) {
        const at::Tensor& before = reference().parameters().at(name);
        if (reference().gradients().contains(name)) {
          const double wanted = reference().moved(name, to_string(kind));
          EXPECT_NEAR(norm_of_difference(after, before), wanted, kMovedBound * wanted) << name;
        } else {
          EXPECT_TRUE(after.equal(before)) << name;
          ++frozen;
        }
      }
      EXPECT_EQ(frozen, 28U);
    }
  }
}

TEST_P(GoldenGemma4, ATowerThatIsTrainedHasGradientsOnEveryLayout) {
  const Layout one{.ranks = 2};
  auto config = config_for(one);
  config.model.path = data_folder(GetParam());
  config.model.freeze = std::vector<std::string>{};
  const auto expected = run_gradients(config, one, reference().batches());
  EXPECT_EQ(expected.by_name.size(), reference().gradients().size() + 28U);
  for (const auto& [name, gradient] : reference().gradients()) {
    EXPECT_LT(relative_error(expected.by_name.at(name), gradient), kGradientBound) << name;
  }
  const Layout three{.ranks = 3};
  expect_same_bits(run_gradients(config, three, reference().batches()), expected);
}

// In the reference's model every bucket is small enough to move to the root. Here none does: each
// layer of the tower and of the text is gathered on its own.
TEST_P(GoldenGemma4, UnitsThatAreGatheredOnTheirOwnGiveTheSameGradients) {
  const int ranks = 2;
  Tensors found;
  test::ranks(ranks).run([&](World& world) {
    at::set_num_threads(1);
    train::ModelConfig config;
    config.path = data_folder(GetParam());
    const auto source = train::open_model(config);
    const auto plain = models::make_language_model(source.spec);
    for (auto& item : plain->named_parameters()) {
      if (item.key().starts_with("model.vision_tower.")) item.value().set_requires_grad(false);
    }
    const Mesh mesh = test::data_mesh(world);
    PrecisionPolicy policy;
    policy.cast_forward_inputs = false;
    ShardOptions root;
    root.divide_factor = 1.0;
    for (const models::ModelUnit& unit : plain->units()) {
      ShardOptions options;
      options.name = unit.name;
      options.divide_factor = 1.0;
      options.reshard_after_forward = true;
      options.canonical_name = [&plain, &unit](const std::string& path) {
        return plain->canonical_name(unit.name, path);
      };
      root.inner.push_back(unit.shard(mesh, policy, options));
    }
    Sharded<models::LanguageModel> model(plain, mesh, policy, root);
    train::load_weights(model, *source.folder);
    train::load_buffers(model, *source.folder);
    model.set_loaded();
    const auto batch = train::open_gradients_batch(
        reference().batches(), train::vocabulary_of(source.spec, false), std::nullopt);
    const train::RowRange row{world.rank(), world.rank() + 1};
    const double kept = static_cast<double>(batch->load(1, {0, ranks}).unmasked_targets());
    for (int i = 0; i < 2; ++i) {  // the second step follows the recorded order
      model.zero_grad();
      const at::Tensor loss =
          model.forward(batch->load(1, row).on(world.device(), *plain).inputs());
      (loss / kept).backward();
    }
    model.visit_full_gradients([&](const std::string& name, const at::Tensor& gradient) {
      if (world.rank() == 0) found[name] = gradient.detach().cpu().clone();
    });
  });
  ASSERT_EQ(found.size(), reference().gradients().size());
  for (const auto& [name, gradient] : reference().gradients()) {
    EXPECT_LT(relative_error(found.at(name), gradient), kGradientBound) << name;
  }
}

// Property: how the tower is kept changes no bit, in fp32 and in bf16, where its buffers are cast.
TEST_P(GoldenGemma4, AWholeTowerOnEveryRankGivesTheBitsOfAShardedOne) {
  for (const Layout& layout : {Layout{.ranks = 1}, Layout{.ranks = 3},
                               Layout{.ranks = 4, .replicas = 2, .reshard_after_forward = false}}) {
    for (const bool narrow : {false, true}) {
      SCOPED_TRACE(to_string(layout) + (narrow ? ", bf16" : ", fp32"));
      auto config = config_for(layout);
      config.model.path = data_folder(GetParam());
      if (narrow) config.precision = {};
      const auto sharded = run_gradients(config, layout, reference().batches(), Routing::kImposed);
      config.model.frozen = FrozenAs::kReplicate;
      expect_same_bits(run_gradients(config, layout, reference().batches(), Routing::kImposed),
                       sharded);
    }
  }
}

// Property: a run that is interrupted resumes bit for bit, buffers and a whole tower included.
TEST_P(GoldenGemma4, ARunResumesFromItsCheckpoint) {
  for (const auto frozen : {FrozenAs::kShard, FrozenAs::kReplicate}) {
    const std::vector<Layout> layouts{{.ranks = 1}, {.ranks = 4, .replicas = 2}};
    for (const Layout& layout : test::in_turn(layouts, 2, kGemmaFolders, GetParam())) {
      SCOPED_TRACE(concat(to_string(frozen), ", ", to_string(layout)));
      const TemporaryFolder folder;
      auto config = training_config(reference(), OptimizerKind::kAdamW, layout);
      config.precision = {};  // bf16: the tower's buffers are cast
      config.model.frozen = frozen;
      const auto whole = run_training(config, layout);
      config.checkpoint.folder = folder / "checkpoint";
      auto first = config;
      first.training.steps = 2;
      auto losses = run_training(first, layout).losses;
      const auto rest = run_training(config, layout).losses;
      losses.insert(losses.end(), rest.begin(), rest.end());
      EXPECT_EQ(losses, whole.losses);
    }
  }
}

/// The bits of the buffers of a folder or checkpoint, which are float32 there.
std::map<std::string, at::Tensor> buffers_of(const std::filesystem::path& folder) {
  train::ModelConfig config;
  config.path = folder.string();
  const auto source = train::open_model(config);
  std::map<std::string, at::Tensor> found;
  for (const auto& row : models::describe(source.spec).buffers) {
    found[row.name] =
        train::read_elements(*source.folder, row.name, 0, source.folder->find(row.name)->numel());
  }
  return found;
}

void expect_same_buffers(const std::filesystem::path& folder,
                         const std::map<std::string, at::Tensor>& expected) {
  const auto found = buffers_of(folder);
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, values] : expected) {
    EXPECT_EQ(found.at(name).scalar_type(), values.scalar_type()) << name;
    EXPECT_TRUE(found.at(name).equal(values)) << folder << ": " << name;
  }
}

// Naive: a frozen tower computes with bfloat16 buffers, and a checkpoint holds those, as float32.
TEST_P(GoldenGemma4, SavedAndExportedBuffersHaveTheBitsOfTheFileAlsoAfterAResumption) {
  const auto expected = buffers_of(data_folder(GetParam()));
  const auto loses = [](const auto& item) {
    return !item.second.to(at::kBFloat16).to(item.second.scalar_type()).equal(item.second);
  };
  if (GetParam() == "gemma4-fp32") {
    ASSERT_TRUE(std::ranges::any_of(expected, loses)) << "nothing to lose in this folder";
  }
  const TemporaryFolder folder;
  for (const int step : {1, 2}) {  // the second run resumes, on other ranks
    const Layout layout{.ranks = step};
    auto config = training_config(reference(), OptimizerKind::kSgd, layout);
    config.precision = {};  // bf16: the tower's buffers are cast
    config.checkpoint.folder = folder / "checkpoint";
    config.training.steps = step;
    run_training(config, layout);
    const auto checkpoint = folder / concat("checkpoint/step-", step);
    expect_same_buffers(checkpoint, expected);
    train::ModelConfig model;
    model.path = checkpoint.string();
    const auto source = train::open_model(model);
    const auto exported = folder / concat("exported ", step);
    std::filesystem::create_directory(exported);
    train::write_export(train::plan_export(source, {}), exported);
    expect_same_buffers(exported, expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Folders, GoldenGemma4, ::testing::ValuesIn(kGemmaFolders), folder_name);

// Batches that do not fit.

/// The reference's batch with one tensor changed, or taken out where `change` gives an undefined
/// one.
std::string batch_with(const std::string& name,
                       const std::function<at::Tensor(const at::Tensor&)>& change) {
  const auto& reference = Reference::of("gemma4-fp32");
  std::map<std::string, at::Tensor> tensors;
  for (const char* each :
       {"input_ids", "labels", "mm_token_type_ids", "pixel_values", "image_position_ids",
        "router/0/indices", "router/1/indices", "router/2/indices", "router/3/indices"}) {
    tensors[each] = reference.result(each);
  }
  tensors[name] = change(tensors.at(name).clone());
  if (!tensors[name].defined()) tensors.erase(name);
  std::vector<TensorSpec> specs;
  for (auto& [each, tensor] : tensors) {
    tensor = tensor.contiguous();
    const auto dtype = tensor.scalar_type() == at::kFloat ? DType::kFloat32 : DType::kInt64;
    specs.push_back({each, dtype, tensor.sizes().vec()});
  }
  const std::string path = temporary_path("batch.safetensors");
  SafetensorsWriter writer(path, specs);
  for (const auto& [each, tensor] : tensors) {
    writer.write(each, {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()});
  }
  writer.finish();
  return path;
}

std::string refusal(const std::string& batch) {
  const Layout layout{.ranks = 2};
  auto config = config_for(layout);
  config.model.path = data_folder("gemma4-fp32");
  return error_of(ErrorKind::kFormat,
                  [&] { run_gradients(config, layout, batch, Routing::kImposed); });
}

TEST(GoldenGemma4Batch, ImagesThatDoNotFitTheTokensAreRefused) {
  const auto none = [](const at::Tensor&) { return at::Tensor(); };
  EXPECT_THAT(refusal(batch_with("mm_token_type_ids", none)), Says("mm_token_type_ids"));
  EXPECT_THAT(refusal(batch_with("image_position_ids", none)), Says("image_position_ids"));
  EXPECT_THAT(refusal(batch_with("pixel_values", none)), Says("without pixel_values"));
  EXPECT_THAT(refusal(batch_with("mm_token_type_ids",
                                 [](const at::Tensor& types) { return at::zeros_like(types); })),
              Says("found type 0", "token id 120"));
  EXPECT_THAT(refusal(batch_with("pixel_values",
                                 [](const at::Tensor& pixels) { return pixels.narrow(0, 0, 1); })),
              Says("image_position_ids [2, 36, 2]"));
  EXPECT_THAT(refusal(batch_with("image_position_ids",
                                 [](const at::Tensor& places) { return places.flip(0); })),
              Says("found a run of 4 image tokens", "2 as image 0 makes"));
  EXPECT_THAT(refusal(batch_with("image_position_ids",
                                 [](at::Tensor places) {
                                   places[1][0][0] = 15;
                                   return places;
                                 })),
              Says("image 1"));
}

TEST(GoldenGemma4Batch, RoutingThatIsMissingOrImpossibleIsRefused) {
  EXPECT_THAT(
      refusal(batch_with("router/2/indices", [](const at::Tensor&) { return at::Tensor(); })),
      Says("router/2/indices"));
  EXPECT_THAT(refusal(batch_with("router/2/indices",
                                 [](const at::Tensor& all) { return all.narrow(1, 0, 1); })),
              Says("[48, 1]"));
  EXPECT_THAT(
      refusal(batch_with("router/2/indices", [](const at::Tensor& all) { return all + 100; })),
      Says("expected 0 to 7"));
}

}  // namespace
}  // namespace tessera::golden::gemma4_test
