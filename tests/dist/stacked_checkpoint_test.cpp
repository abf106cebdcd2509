// Checkpoints of experts that are one parameter here: written under the names of files, read on any
// number of ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dist/plain.h"
#include "dist/stacked_files.h"
#include "io/checkpoint_tensors.h"
#include "tessera/optim.h"
#include "train/checkpoint.h"
#include "train/resume.h"
#include "unit/io/temporary_folder.h"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing::TemporaryFolder;

const train::FileForms kForms(StackedExperts::table());

struct RanksOfTest {
  int ranks = 1;
  int replicas = 1;
};
const RanksOfTest kLayouts[] = {{1, 1}, {2, 1}, {3, 1}, {4, 2}, {5, 1}};

/// A rank's model and optimizer.
struct Trained {
  Trained(World& world, int replicas, std::uint64_t seed)
      : model(fully_shard(std::make_shared<StackedExperts>(seed), data_mesh(world, replicas))),
        optimizer(make_adamw(model, {})) {}
  /// By gradients that depend on parameter, step and element only.
  void step(std::uint64_t number) {
    std::uint64_t seed = number * 100;
    for (const auto& view : model.shards()) {
      const auto whole = seeded(++seed, {view.contract->numel()});
      view.shard.mutable_grad() = whole.narrow(0, view.begin, view.end - view.begin).clone();
    }
    optimizer->step();
  }
  Sharded<StackedExperts> model;
  std::unique_ptr<Optimizer> optimizer;
};

void save(World& world, const Trained& trained, int replicas, const fs::path& folder) {
  train::CheckpointOptions options;
  options.folder = folder;
  options.config_json = "{}";
  options.state.source_dtype = [](const std::string& name) {
    return name.ends_with("_proj.weight") ? std::optional(DType::kBFloat16) : std::nullopt;
  };
  options.state.forms = kForms;
  options.state.replica = data_mesh(world, replicas).coordinate(axis::kReplicate);
  options.state.replicas = replicas;
  train::CheckpointSaver saver(world, std::move(options));
  saver.save(2, trained.model, *trained.optimizer);
  saver.finish();
}

/// Steps twice from the same weights on these ranks, and saves.
fs::path checkpoint_of(const RanksOfTest& layout, const fs::path& folder) {
  ranks(layout.ranks).run([&](World& world) {
    Trained trained(world, layout.replicas, 5);
    trained.step(1);
    trained.step(2);
    save(world, trained, layout.replicas, folder);
  });
  return folder / "step-2";
}

std::map<std::string, std::vector<std::byte>> values_of(const fs::path& path) {
  const auto checkpoint = CheckpointFolder::open(path);
  checkpoint.verify_all();
  std::map<std::string, std::vector<std::byte>> all;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    auto& bytes = all[name];
    bytes.resize(static_cast<std::size_t>(tensor.numel() * size_of(tensor.dtype)));
    checkpoint.read(name, 0, tensor.numel(), bytes);
  }
  return all;
}

// The manifest's own check sees that each element is in exactly one piece.
TEST(StackedCheckpoint, HasTheNamesOfFilesAndTheSameBytesOnAnyRanks) {
  const TemporaryFolder folder;
  const auto alone = checkpoint_of({1, 1}, folder / "alone");
  const auto expected = values_of(alone);
  EXPECT_EQ(expected.size(), 13U * 4U) << "12 of experts and a norm, each with three of AdamW's";
  const auto checkpoint = CheckpointFolder::open(alone);
  const auto& up = checkpoint.tensors().at("model/experts.1.up_proj.weight");
  EXPECT_EQ(up.shape, (std::vector<std::int64_t>{6, 5}));
  EXPECT_EQ(up.source_dtype, DType::kBFloat16);
  EXPECT_EQ(checkpoint.tensors().at("optim/step/experts.3.down_proj.weight").dtype, DType::kInt64);
  EXPECT_FALSE(checkpoint.find("model/gate_up"));
  EXPECT_EQ(checkpoint.tensors().at("optim/exp_avg/experts.3.down_proj.weight").shape,
            (std::vector<std::int64_t>{5, 6}));
  for (const auto& layout : kLayouts) {
    const auto other = checkpoint_of(layout, folder / concat(layout.ranks));
    EXPECT_TRUE(values_of(other) == expected) << layout.ranks << " ranks";
  }
}

TEST(StackedCheckpoint, IsReadOnAnyRanks) {
  const TemporaryFolder folder;
  for (const auto& from : kLayouts) {
    const auto written = checkpoint_of(from, folder / concat("from", from.ranks));
    const auto expected = values_of(written);
    for (const auto& to : kLayouts) {
      const auto copy = folder / concat("from", from.ranks, "to", to.ranks);
      ranks(to.ranks).run([&](World& world) {
        Trained other(world, to.replicas, 99);
        train::load_checkpoint(CheckpointFolder::open(written), other.model, *other.optimizer,
                               world, kForms);
        for (const auto& state : other.optimizer->state()) EXPECT_EQ(state.steps, 2);
        save(world, other, to.replicas, copy);
      });
      EXPECT_TRUE(values_of(copy / "step-2") == expected) << from.ranks << " to " << to.ranks;
    }
  }
}

TEST(StackedCheckpoint, ReadsAsAModelFolderUnderTheSameNames) {
  const TemporaryFolder folder;
  const CheckpointTensors source(CheckpointFolder::open(checkpoint_of({3, 1}, folder / "run")));
  EXPECT_NO_THROW(train::check_tensors(source, StackedExperts::table(), {}));
  EXPECT_EQ(source.find("experts.1.up_proj.weight")->original, DType::kBFloat16);
}

}  // namespace
}  // namespace tessera::test
