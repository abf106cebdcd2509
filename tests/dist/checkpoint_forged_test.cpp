// Checkpoints that were altered and signed again: every hash is right, and what they say of the
// optimizer cannot be. A run refuses them by name before its first step.

#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "dist/training_run.h"
#include "io/checkpoint_folder.h"
#include "support/ranks.h"
#include "support/test.h"

namespace tessera::test::checkpoint_forged_test {
namespace {

namespace fs = std::filesystem;

/// Gives a checkpoint another manifest, with its own hash.
void alter(const fs::path& step, const std::function<void(CheckpointManifest&)>& change) {
  const auto checkpoint = CheckpointFolder::open(step);
  auto manifest = checkpoint.manifest();
  manifest.tensors = checkpoint.tensors();
  change(manifest);
  write_manifest(step, std::move(manifest));
}

/// Drops the tensors whose names begin with one of `prefixes`.
void drop(const fs::path& step, const std::vector<std::string>& prefixes) {
  std::size_t dropped = 0;
  alter(step, [&](CheckpointManifest& manifest) {
    dropped = std::erase_if(manifest.tensors, [&](const auto& tensor) {
      return std::ranges::any_of(
          prefixes, [&](const auto& prefix) { return tensor.first.starts_with(prefix); });
    });
  });
  ASSERT_GT(dropped, 0U);
}

/// Writes another number of updates of one tensor, into the file and its hash.
void set_steps(const fs::path& step, const std::string& tensor, std::int64_t steps) {
  alter(step, [&](CheckpointManifest& manifest) {
    const auto& piece = manifest.tensors.at(tensor).pieces.at(0);
    const fs::path file = step / piece.file;
    std::string bytes = read_file(file);
    std::uint64_t header = 0;
    std::memcpy(&header, bytes.data(), sizeof header);
    const auto json = nlohmann::json::parse(bytes.substr(sizeof header, header));
    const auto begin = json.at(piece.key).at("data_offsets").at(0).get<std::size_t>();
    std::memcpy(bytes.data() + sizeof header + header + begin, &steps, sizeof steps);
    std::ofstream(file, std::ios::binary) << bytes;
    manifest.files.find(piece.file)->second.xxh3_128 = Hash128Stream().add(bytes).digest();
  });
}

class Forged : public ::testing::Test {
 protected:
  Forged() : config_(with_steps(small_run(folder_), 2)) {}
  /// A checkpoint of two steps.
  fs::path trained() {
    train_on({2, 1}, config_, run_);
    return run_ / "checkpoint/step-2";
  }
  /// Returns the refusal of a run that resumes on that layout.
  std::string refusal(const RanksOfRun& layout) {
    return error_of(ErrorKind::kFormat, [&] { train_on(layout, with_steps(config_, 4), run_); });
  }
  TemporaryFolder folder_;
  train::Config config_;
  fs::path run_ = folder_ / "run";
};

// Naive: moments begin at zero in the middle of a run, with the bias correction of its beginning.
TEST_F(Forged, ACheckpointWithoutAnyStateOfItsOptimizerIsRefused) {
  for (const auto name : {train::OptimizerName::kAdamW, train::OptimizerName::kSgd}) {
    fs::remove_all(run_);
    config_.optimizer.name = name;
    const bool adam = name == train::OptimizerName::kAdamW;
    drop(trained(), {"optim/"});
    for (const RanksOfRun& layout : {RanksOfRun{1, 1}, RanksOfRun{2, 1}, RanksOfRun{3, 1}}) {
      EXPECT_THAT(refusal(layout),
                  Says(adam ? "found no optim/exp_avg/" : "found no optim/step/", "expected what ",
                       " kept in 2 updates", "start a new run from these weights: model.path"));
    }
  }
}

TEST_F(Forged, TheWeightsOfACheckpointWithoutStateStillBeginARun) {
  const auto step = trained();
  drop(step, {"optim/"});
  auto again = config_;
  again.model.config.clear();
  again.model.path = step.string();
  EXPECT_EQ(train_on({2, 1}, again, folder_ / "again").losses.size(), 2U);
}

TEST_F(Forged, UpdatesWithoutMomentsAreRefused) {
  drop(trained(), {"optim/exp_avg/", "optim/exp_avg_sq/"});
  EXPECT_REFUSED(kConfig, train_on({2, 1}, with_steps(config_, 4), run_),
                 "found AdamW and no optim/exp_avg/",
                 "expected the moments of all that was updated");
}

TEST_F(Forged, OneMomentOfTwoIsRefused) {
  drop(trained(), {"optim/exp_avg_sq/model.norm.weight"});
  EXPECT_THAT(refusal({2, 1}), Says("found no tensor 'optim/exp_avg_sq/model.norm.weight'"));
}

TEST_F(Forged, MomentsWithoutANumberOfUpdatesAreRefused) {
  drop(trained(), {"optim/step/model.norm.weight"});
  EXPECT_THAT(refusal({2, 1}), Says("found no tensor 'optim/step/model.norm.weight'"));
}

// Naive: bias corrections by a power of a negative number, or of one that overflows.
TEST_F(Forged, ANumberOfUpdatesThatTheRunCannotHaveIsRefused) {
  const auto step = trained();
  const std::string name = "optim/step/model.norm.weight";
  using Limits = std::numeric_limits<std::int64_t>;
  for (const std::int64_t steps : {Limits::min(), std::int64_t{-1}, std::int64_t{0},
                                   std::int64_t{3}, std::int64_t{1} << 41, Limits::max()}) {
    set_steps(step, name, steps);
    for (const RanksOfRun& layout : {RanksOfRun{1, 1}, RanksOfRun{2, 1}, RanksOfRun{2, 2}}) {
      EXPECT_THAT(refusal(layout), Says(concat("found ", steps, " in ", name,
                                               ", expected 1 to the 2 steps of the run")));
    }
  }
  set_steps(step, name, 2);
  EXPECT_EQ(train_on({2, 1}, with_steps(config_, 3), run_).losses.size(), 1U);
}

}  // namespace
}  // namespace tessera::test::checkpoint_forged_test
