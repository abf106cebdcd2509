// `tessera train` against the losses of transformers and torch.optim over five steps, under any
// layout: half of a pairwise part of folder x optimizer x layout in ./test, all of it under
// `scripts/full golden`.
#include <ATen/ATen.h>

#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>

#include "golden/layouts.h"
#include "golden/model_folder.h"
#include "grad/torch_dtype.h"
#include "proof.h"
#include "support/test.h"

namespace tessera::golden::training_test {
namespace {

using Case = std::tuple<std::string, OptimizerKind>;

class GoldenTraining : public ::testing::TestWithParam<Case> {
 protected:
  const Reference& reference() const { return Reference::of(std::get<0>(GetParam())); }
  OptimizerKind kind() const { return std::get<1>(GetParam()); }
  TrainingRun run(const Layout& layout, const std::set<std::int64_t>& keep = {}) const {
    return run_training(training_config(reference(), kind(), layout), layout, keep);
  }
};

double norm_of_difference(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).norm().item<double>();
}

constexpr Layout kLayouts[] = {
    {.ranks = 1},
    {.ranks = 1, .micro_batches = MicroBatches::kOneRow},
    {.ranks = 2},
    {.ranks = 2, .reshard_after_forward = false, .micro_batches = MicroBatches::kOneRowEachSync},
    {.ranks = 3},
    {.ranks = 4, .reshard_after_forward = false},
    {.ranks = 2, .replicas = 2, .micro_batches = MicroBatches::kOneRow},
    {.ranks = 4, .replicas = 2},
    {.ranks = 2, .backend = ThreadBackend::kGloo},
};
/// Whether a layout of kLayouts is run a second time.
constexpr bool is_repeated(std::size_t layout) { return layout == 4 || layout == 7; }
constexpr OptimizerKind kKinds[] = {OptimizerKind::kSgd, OptimizerKind::kAdamW};

/// Each folder is trained by every optimizer, under every second of the layouts with which pairs of
/// all three would be complete.
std::vector<std::size_t> layouts_of(const Case& of) {
  const auto& folders = all_folders();
  const auto& gemma = kGemmaFolders;  // gemma4_test.cpp
  const auto is_trained = [&](const test::Choice& choice) {
    return std::ranges::find(gemma, folders[choice[0]]) == gemma.end();
  };
  constexpr std::uint32_t kSeed = 1;
  std::vector<std::size_t> layouts;
  for (const auto& choice :
       test::cases({folders.size(), std::size(kKinds), std::size(kLayouts)}, is_trained, kSeed)) {
    if (Case{folders[choice[0]], kKinds[choice[1]]} == of) layouts.push_back(choice[2]);
  }
  return layouts.size() == 1 ? layouts : test::in_turn(layouts, 2, folders, std::get<0>(of));
}

void expect_reported(const TrainingRun& found) {
  ASSERT_EQ(found.lines.size(), 6U);
  for (std::size_t i = 0; i < found.lines.size(); ++i) {
    const auto line = nlohmann::json::parse(found.lines[i]);
    EXPECT_EQ(line.at("step"), i + 1);
    // The file has as many digits as a float64 needs, or a few less.
    EXPECT_NEAR(line.at("loss").get<double>(), found.losses[i], 1e-9 * found.losses[i]);
    EXPECT_NEAR(line.at("grad_norm").get<double>(), found.norms[i], 1e-9 * found.norms[i]);
  }
  EXPECT_EQ(found.result.steps, 6);
  EXPECT_EQ(found.result.last_loss, found.losses.back());
}

void expect_same_run(const TrainingRun& found, const TrainingRun& expected) {
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_EQ(found.norms, expected.norms);
  expect_same_bits(found.parameters.at(6), expected.parameters.at(6));
}

TEST_P(GoldenTraining, LossesAndDistancesAreThoseOfTheReferenceAsReportedAndInASecondRun) {
  const auto expected = reference().step_losses(to_string(kind()));
  ASSERT_EQ(expected.size(), 6U);
  const auto layouts = layouts_of(GetParam());
  EXPECT_FALSE(layouts.empty());
  for (const std::size_t index : layouts) {
    const Layout& layout = kLayouts[index];
    SCOPED_TRACE(to_string(layout));
    const auto found = run(layout, {5, 6});
    ASSERT_EQ(found.losses.size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(found.losses[i], expected[i], kStepLossBound) << "step " << i + 1;
    }
    const auto& after = found.parameters.at(5);
    ASSERT_EQ(after.size(), reference().parameters().size());
    for (const auto& [name, before] : reference().parameters()) {
      const double moved = norm_of_difference(after.at(name), before);
      const double wanted = reference().moved(name, to_string(kind()));
      EXPECT_NEAR(moved, wanted, reference().moved_bound(name, to_string(kind()))) << name;
    }
    expect_reported(found);
    if (is_repeated(index)) expect_same_run(run(layout, {6}), found);
  }
}

// A tensor stored in fp64 keeps its precision through the optimizer; the run is the same otherwise.
TEST_P(GoldenTraining, AWiderTensorOfTheFileTrainsInItsDtype) {
  const std::string name = reference().name().starts_with("gpt2") ? "ln_f.weight"
                           : is_nemotron(reference().name())      ? "backbone.norm_f.weight"
                                                                  : "model.norm.weight";
  const auto folder = changed_folder(reference().name(), [&](std::vector<StoredTensor>& tensors) {
    StoredTensor& norm =
        *std::ranges::find(tensors, name, [](const auto& tensor) { return tensor.spec.name; });
    const at::Tensor wide =
        at::from_blob(norm.bytes.data(), norm.spec.shape, to_scalar_type(norm.spec.dtype))
            .to(at::kDouble);
    const auto* bytes = static_cast<const std::byte*>(wide.const_data_ptr());
    norm.bytes.assign(bytes, bytes + wide.nbytes());
    norm.spec.dtype = DType::kFloat64;
  });
  const Layout layout{.ranks = 2};
  auto config = training_config(reference(), kind(), layout);
  config.model.path = folder;
  const auto found = run_training(config, layout, {5});
  EXPECT_EQ(found.parameters.at(5).at(name).scalar_type(), at::kDouble);
  const auto expected = reference().step_losses(to_string(kind()));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(found.losses[i], expected[i], kStepLossBound) << "step " << i + 1;
  }
}

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  return test_name(std::get<0>(info.param)) + "_" + to_string(std::get<1>(info.param));
}

/// Gemma 4 is trained in gemma4_test.cpp.
std::vector<std::string> trained_folders() {
  auto folders = all_folders();
  std::erase_if(folders, [](const auto& folder) { return folder.starts_with("gemma4"); });
  return folders;
}

INSTANTIATE_TEST_SUITE_P(Folders, GoldenTraining,
                         ::testing::Combine(::testing::ValuesIn(trained_folders()),
                                            ::testing::Values(OptimizerKind::kSgd,
                                                              OptimizerKind::kAdamW)),
                         case_name);

// SGD's first update is lr x clipped gradient, so its length is lr x min(norm, max_norm): it ties
// the norm that is reported and the clip to what parameters do, on every layout.
TEST(GoldenClipping, TheFirstUpdateIsAsLongAsTheClippedNorm) {
  const auto& reference = Reference::of("llama-fp32");
  const auto batch = run_gradients(data_folder("llama-fp32"), {.ranks = 1}, reference.batches());
  for (const Layout& layout :
       {Layout{.ranks = 1}, Layout{.ranks = 3}, Layout{.ranks = 2, .replicas = 2},
        Layout{.ranks = 4, .replicas = 2}}) {
    for (const double max_norm : {0.0, 0.25, 1e6}) {
      SCOPED_TRACE(concat(to_string(layout), ", max_norm ", max_norm));
      auto config = training_config(reference, OptimizerKind::kSgd, layout);
      config.training.steps = 1;
      config.training.max_norm = max_norm;
      const auto run = run_training(config, layout, {1});
      double squares = 0;
      for (const auto& [name, before] : reference.parameters()) {
        const double moved = norm_of_difference(run.parameters.at(1).at(name), before);
        squares += moved * moved;
      }
      const double norm = run.norms.front();
      EXPECT_GT(norm, 0.25);  // else nothing is clipped
      const double expected = max_norm == 0.25 ? 0.05 * max_norm : 0.05 * norm;
      // Parameters near 1 are rounded to 2^-24 each: 1e-4 of an update of 1e-3 a element at most.
      EXPECT_NEAR(std::sqrt(squares), expected, 1e-4 * expected);
    }
  }
}

}  // namespace
}  // namespace tessera::golden::training_test
