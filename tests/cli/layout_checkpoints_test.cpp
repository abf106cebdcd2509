// Checkpoints of models with experts go from one layout to another through the program: six steps
// that three layouts made two each of are those of one rank without interruption, and so is what
// `convert` makes of each checkpoint.
//
// Two key-value heads on four ranks: tp 4 keeps each head twice, a checkpoint has it once.
#include <ATen/ATen.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/layout_run.h"
#include "cli/program.h"
#include "cli/same_bits.h"
#include "golden/model_folder.h"
#include "golden/reference.h"
#include "proof.h"
#include "support/test.h"

namespace tessera::cli::layout_checkpoints_test {
namespace {

using golden::kMovedBound;
using golden::kStepLossBound;
using golden::Reference;
using golden::Tensors;

constexpr int kSteps = 6;  // five batches, then the first again
constexpr ProcessLayout kOneRank{};
constexpr ProcessLayout kTensor{.tp = 4};
constexpr ProcessLayout kExperts{.shard = 4, .ep = 4};

/// The reference's own.
const std::string kAdamW = "lr = 0.001\n";
/// Its update is linear in the gradient: DeepSeek V2 has an element whose first gradient, 2e-8, is
/// half rounding, and AdamW divides by it.
const std::string kMomentum = "name = \"SGD\"\nlr = 0.02\nmomentum = 0.9\n";

struct Journey {
  std::string folder;
  std::string optimizer;
  std::vector<ProcessLayout> legs;  ///< of two steps each
};

void PrintTo(const Journey& journey, std::ostream* out) { *out << journey.folder; }

const std::vector<Journey> kJourneys{
    {"qwen3-moe-fp32", kAdamW, {kTensor, kExperts, kOneRank}},
    {"gpt-oss-fp32", kAdamW, {kTensor, kExperts, kOneRank}},
    {"deepseek-v2-fp32",
     kMomentum,
     {{.shard = 2, .tp = 2, .ep = 2, .etp = 2}, kOneRank, {.replicate = 2, .tp = 2}}},
    // Two key heads of its layers with a state: tp 4 has none for each rank.
    {"qwen3-next-fp32", kMomentum, {{.tp = 2, .ep = 2}, kExperts, {.replicate = 2, .tp = 2}}},
    // And two groups of heads.
    {"nemotron-h-fp32", kMomentum, {kExperts, {.tp = 2, .ep = 2}, {.replicate = 2, .tp = 2}}},
    // Positions of the same rows, and those of other ranks behind the checkpoint.
    {"mixtral-fp32", kAdamW, {{.ep = 2, .cp = 2}, kOneRank, {.tp = 2, .cp = 2}}}};

/// The last ones of legs, whose exports are compared: in ./test --all of each journey another
/// leg's.
std::vector<int> steps_of(const Journey& journey) {
  const auto is_it = [&](const Journey& one) { return one.folder == journey.folder; };
  const auto number = std::ranges::find_if(kJourneys, is_it) - kJourneys.begin();
  return test::in_turn(std::vector{2, 4, 6}, 3, std::vector{0L, 1L, 2L, 3L, 4L, 5L}, number);
}

class LayoutCheckpoints : public ::testing::TestWithParam<Journey> {
 protected:
  void SetUp() override {
    const std::string data = golden::data_folder(name()).string();
    folder_.write("run.toml", concat("[model]\npath = \"", data, "\"\n[data]\npath = \"", data,
                                     "/reference.safetensors\"\n[training]\nlocal_batch_size = 2\n"
                                     "max_norm = 0.0\n[precision]\nparam_dtype = \"float32\"\n"
                                     "[checkpoint]\ninterval = 1\n[optimizer]\n",
                                     GetParam().optimizer));
  }

  const std::string& name() const { return GetParam().folder; }
  const Reference& reference() const { return Reference::of(name()); }

  /// The steps behind `from`, which the folder's checkpoint has, up to `to`.
  void train(const std::string& run, const ProcessLayout& layout, int from, int to) const {
    const Outcome outcome =
        run_program(folder_, in_layout(layout, {"train", "run.toml", "--job.dump_folder", run,
                                                "--training.steps", std::to_string(to)}));
    ASSERT_EQ(outcome.code, 0) << to_string(layout) << ": " << outcome.err;
    ASSERT_EQ(store_of(folder_, run).latest(), to);
    // All steps again would give the same numbers.
    const std::string resumed = concat("checkpoint/step-", from, ", written by");
    EXPECT_EQ(outcome.err.find(resumed) != std::string::npos, from > 0) << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(Says(concat("checkpoint of step ", from + 1, ":")),
                                   Not(Says(concat("checkpoint of step ", from, ":")))));
  }

  std::vector<double> loss_of_steps(const std::string& run) const {
    std::istringstream text(read_file(folder_ / (run + "/metrics/metrics.jsonl")));
    std::vector<double> losses;
    for (std::string line; std::getline(text, line);) {
      losses.push_back(nlohmann::json::parse(line).at("loss").get<double>());
    }
    return losses;
  }

  /// The output of `convert` for a step, by the names of the model's files.
  Tensors exported(const std::string& run, int step) const {
    const std::string out = concat(run, "-", step);
    const Outcome outcome = succeeded(run_program(
        folder_, {"convert", concat(run, "/checkpoint/step-", step), out, "--dtype", "auto"}));
    Tensors tensors;
    if (outcome.code != 0) return tensors;
    const SafetensorsFile file(folder_ / (out + "/model.safetensors"));
    for (const TensorInfo& info : file.header().tensors) {
      if (info.name.ends_with(".e_score_correction_bias")) continue;  // is no parameter
      tensors[info.name] = golden::read_tensor(file, info.name);
      EXPECT_EQ(tensors[info.name].scalar_type(), at::kFloat) << info.name;
    }
    return tensors;
  }

  /// Apart by at most the bound of how far they went.
  void expect_near(const Tensors& found, const Tensors& expected) const {
    ASSERT_EQ(found.size(), reference().parameters().size());
    ASSERT_EQ(expected.size(), found.size());
    for (const auto& [parameter, before] : reference().parameters()) {
      const at::Tensor& after = expected.at(parameter);
      ASSERT_EQ(found.at(parameter).sizes(), before.sizes()) << parameter;
      const double moved = (after - before).to(at::kDouble).norm().item<double>();
      const double apart = (found.at(parameter).to(at::kDouble) - after).norm().item<double>();
      EXPECT_GT(moved, 0) << parameter;
      EXPECT_LE(apart, kMovedBound * moved) << parameter;
    }
  }

  /// transformers and torch.optim after five steps.
  void expect_moved_as_the_reference(const Tensors& found) const {
    for (const auto& [parameter, before] : reference().parameters()) {
      const double moved = (found.at(parameter) - before).to(at::kDouble).norm().item<double>();
      const double wanted = reference().moved(parameter, "adamw");
      EXPECT_NEAR(moved, wanted, kMovedBound * wanted) << parameter;
    }
  }

  const TemporaryFolder folder_;
};

TEST_P(LayoutCheckpoints, SixStepsInThreeLayoutsAreThoseOfOneRank) {
  ASSERT_NO_FATAL_FAILURE(train("whole", kOneRank, 0, kSteps));
  int steps = 0;
  for (const ProcessLayout& leg : GetParam().legs) {
    ASSERT_NO_FATAL_FAILURE(train("moved", leg, steps, steps + 2));
    steps += 2;
  }
  ASSERT_EQ(steps, kSteps);

  const auto expected = loss_of_steps("whole");
  const auto found = loss_of_steps("moved");
  ASSERT_EQ(expected.size(), kSteps);
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(found[i], expected[i], kStepLossBound) << "step " << i + 1;
  }
  for (const int step : steps_of(GetParam())) {
    SCOPED_TRACE(concat("step ", step, ", written by ",
                        to_string(GetParam().legs.at(static_cast<std::size_t>(step / 2 - 1)))));
    expect_near(exported("moved", step), exported("whole", step));
  }
  if (GetParam().optimizer == kAdamW) {
    const auto recorded = reference().step_losses("adamw");
    for (std::size_t i = 0; i < recorded.size(); ++i) {
      EXPECT_NEAR(found.at(i), recorded[i], kStepLossBound) << "step " << i + 1;
    }
    expect_moved_as_the_reference(exported("moved", kSteps - 1));
  }
}

// Bit for bit, optimizer state included: the files of every rank.
TEST_P(LayoutCheckpoints, AResumedRunOfTheSameLayoutHasItsBits) {
  const ProcessLayout& layout = GetParam().legs.front();
  ASSERT_NO_FATAL_FAILURE(train("whole", layout, 0, 4));
  std::filesystem::copy(folder_ / "whole", folder_ / "resumed",
                        std::filesystem::copy_options::recursive);
  for (const int step : {3, 4}) {
    std::filesystem::remove_all(folder_ / concat("resumed/checkpoint/step-", step));
  }
  folder_.write("resumed/checkpoint/latest", "step-2");
  ASSERT_NO_FATAL_FAILURE(train("resumed", layout, 2, 4));
  expect_same_bits(store_of(folder_, "resumed"), store_of(folder_, "whole"), 4, layout.ranks());
  EXPECT_EQ(losses(folder_ / "resumed"), losses(folder_ / "whole"));
}

INSTANTIATE_TEST_SUITE_P(Families, LayoutCheckpoints, ::testing::ValuesIn(kJourneys),
                         [](const auto& each) { return golden::test_name(each.param.folder); });

}  // namespace
}  // namespace tessera::cli::layout_checkpoints_test
