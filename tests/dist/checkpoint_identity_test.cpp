// A run resumes only from its own checkpoint: another model, seed, data, optimizer or step is
// refused before the first step, and differences that do not matter are not.

#include <fstream>

#include "dist/training_run.h"
#include "io/checkpoint_folder.h"
#include "support/test.h"

namespace tessera::test::checkpoint_identity_test {
namespace {

namespace fs = std::filesystem;

struct Change {
  std::string says;
  std::function<void(train::Config&)> set;
};

TEST(ResumedRun, AnotherModelSeedOrDataIsRefusedWithBothValues) {
  const TemporaryFolder folder;
  const auto config = small_run(folder);
  train_on({2, 1}, with_steps(config, 2), folder / "run");
  const auto metrics = read_file(folder / "run/metrics/metrics.jsonl");
  const auto model = read_file(folder / "model.json");
  const auto other_model = [&](const std::string& from, const std::string& to) {
    auto text = model;
    return folder.write("other.json", text.replace(text.find(from), from.size(), to)).string();
  };
  const Change changes[] = {
      {"debug.seed: found 7, expected 42", [](auto& c) { c.debug.seed = 7; }},
      {"model: found intermediate_size 32, expected 24",
       [&](auto& c) {
         c.model.config = other_model("\"intermediate_size\": 24", "\"intermediate_size\": 32");
       }},
      {"model: found rope_theta 500.0, expected 10000.0",
       [&](auto& c) { c.model.config = other_model("10000.0", "500.0"); }},
      {"training.seq_len: found 13, expected 12", [](auto& c) { c.training.seq_len = 13; }},
      {"training.global_batch_size: found 24, expected 12",
       [](auto& c) { c.training.global_batch_size = 24; }},
      {"data.path: found ",
       [&](auto& c) {
         auto text = read_file(folder / "page.txt");
         text[100] = '!';
         c.data.path = {folder.write("other.txt", text)};
       }},
      {"optimizer.name: found 'SGD', expected 'AdamW'",
       [](auto& c) { c.optimizer.name = train::OptimizerName::kSgd; }},
      {"checkpoint.load_step: found 0 and ", [](auto& c) { c.checkpoint.load_step = 0; }},
      {"checkpoint.load_step: found 1, expected a step with a checkpoint",
       [](auto& c) { c.checkpoint.load_step = 1; }},
  };
  for (const auto& change : changes) {
    auto changed = with_steps(config, 4);
    change.set(changed);
    EXPECT_REFUSED(kConfig, train_on({2, 1}, changed, folder / "run"), change.says);
  }
  EXPECT_EQ(read_file(folder / "run/metrics/metrics.jsonl"), metrics) << "nothing was changed";
}

/// As a checkpoint of before manifests named the optimizer.
void forget_optimizer(const fs::path& step) {
  auto manifest = CheckpointFolder::open(step).manifest();
  EXPECT_NE(manifest.optimizer, "");
  manifest.optimizer.clear();
  std::ofstream(step / kManifestFile, std::ios::binary) << to_json(manifest);
}

// SGD without momentum keeps nothing by which AdamW could tell; its moments would begin at zero
// with the bias correction of step 3.
TEST(ResumedRun, AnotherOptimizerIsRefusedHoweverLittleTheOldOneKept) {
  for (const double momentum : {0.0, 0.9}) {
    SCOPED_TRACE(momentum);
    const TemporaryFolder folder;
    const auto config = with_steps(small_run(folder), 2);
    auto sgd = config;
    sgd.optimizer.name = train::OptimizerName::kSgd;
    sgd.optimizer.momentum = momentum;
    train_on({2, 1}, sgd, folder / "sgd");
    train_on({2, 1}, config, folder / "adamw");
    const auto refused = [&](train::Config changed, const std::string& run) {
      changed.training.steps = 4;
      return error_of(ErrorKind::kConfig, [&] { train_on({2, 1}, changed, folder / run); });
    };
    EXPECT_THAT(refused(config, "sgd"), Says("optimizer.name: found 'AdamW', expected 'SGD'"));
    EXPECT_THAT(refused(sgd, "adamw"), Says("optimizer.name: found 'SGD', expected 'AdamW'"));
    forget_optimizer(folder / "sgd/checkpoint/step-2");
    forget_optimizer(folder / "adamw/checkpoint/step-2");
    EXPECT_THAT(refused(config, "sgd"), Says("optimizer.name: found "));
    EXPECT_THAT(refused(sgd, "adamw"), Says("optimizer.name: found an optimizer that keeps"));
    // The same one resumes.
    sgd.training.steps = 3;
    EXPECT_EQ(train_on({2, 1}, sgd, folder / "sgd").losses.size(), 1U);
  }
}

// A folder that was renamed is not the step that was asked for.
TEST(ResumedRun, AFolderWithAnotherStepThanItsNameSaysIsRefused) {
  const TemporaryFolder folder;
  auto config = with_steps(small_run(folder), 2);
  train_on({2, 1}, config, folder / "run");
  fs::rename(folder / "run/checkpoint/step-2", folder / "run/checkpoint/step-9");
  config.training.steps = 12;
  config.checkpoint.load_step = 9;
  EXPECT_REFUSED(kFormat, train_on({2, 1}, config, folder / "run"), "found step 2, expected 9");
  EXPECT_EQ(read_file(folder / "run/checkpoint/latest"), "step-2") << "nothing was changed";
}

// By default a batch is what the ranks have together: a resumed run keeps the checkpoint's number.
TEST(ResumedRun, TheBatchStaysOnAnotherNumberOfRanksWhereNoOneSetIt) {
  const TemporaryFolder folder;
  auto config = small_run(folder);
  config.training.global_batch_size = -1;
  const auto whole = train_on({4, 1}, with_steps(config, 8), folder / "whole");
  train_on({4, 1}, with_steps(config, 3), folder / "start");
  for (const RanksOfRun& layout : {RanksOfRun{1, 1}, RanksOfRun{2, 1}, RanksOfRun{4, 2}}) {
    SCOPED_TRACE(layout.ranks);
    const auto run =
        folder / ("on " + std::to_string(layout.ranks) + " in " + std::to_string(layout.replicas));
    fs::copy(folder / "start", run, fs::copy_options::recursive);
    const auto rest = train_on(layout, with_steps(config, 8), run);
    ASSERT_EQ(rest.losses.size(), 5U);
    // Other rows would differ in the first digits: as OnOtherLayoutsHasTheLossesWithinRounding.
    for (std::size_t i = 0; i < rest.losses.size(); ++i) {
      EXPECT_NEAR(rest.losses[i], whole.losses[i + 3], 5e-6);
    }
    EXPECT_EQ(CheckpointFolder::open(run / "checkpoint").manifest().data.global_batch_size, 4);
  }
  EXPECT_REFUSED(kConfig, train_on({3, 1}, with_steps(config, 8), folder / "start"),
                 "found -1, which keeps the 4 rows of the checkpoint",
                 "expected a multiple of 3 (local_batch_size 1 x 3 data rank(s))");
}

TEST(ResumedRun, MovedDataOtherStepsAndAnotherScheduleAreFine) {
  const TemporaryFolder folder;
  auto config = small_run(folder);
  train_on({2, 1}, with_steps(config, 2), folder / "run");
  fs::rename(folder / "page.txt", folder / "moved.txt");
  config.data.path = {(folder / "moved.txt").string()};
  config.optimizer.lr = 0.002;
  config.lr_scheduler.decay = train::LrDecay::kLinear;
  config.training.local_batch_size = 2;
  const auto rest = train_on({2, 1}, with_steps(config, 5), folder / "run");
  EXPECT_EQ(rest.losses.size(), 3U);
  EXPECT_EQ(rest.result.steps, 5);
  const auto none = train_on({2, 1}, with_steps(config, 5), folder / "run");
  EXPECT_EQ(none.losses.size(), 0U) << "it was done";
  EXPECT_EQ(none.result.steps, 5);
}

}  // namespace
}  // namespace tessera::test::checkpoint_identity_test
