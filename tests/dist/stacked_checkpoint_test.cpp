// Checkpoints of experts that are one parameter here: written under the names of files, read under
// any layout.

#include "checkpoint/saver.h"
#include "dist/checkpoint_tensors.h"
#include "dist/cut_modules.h"
#include "dist/stacked_files.h"
#include "io/checkpoint_folder.h"
#include "support/temporary_folder.h"
#include "tessera/optim.h"
#include "train/hf/weights.h"
#include "train/resume/resume.h"

namespace tessera::test::stacked_checkpoint_test {
namespace {

namespace fs = std::filesystem;

const train::FileForms kForms = train::file_forms(StackedExperts::table());

/// {replicas, shards, tp}, {dp_shard_mod_ep, ep, etp}, and whether the norm is the same on tp.
struct Layout {
  Degrees degrees;
  bool norm_is_invariant = false;
};
const Layout kLayouts[] = {
    {{1, 1, 1, 1, 1, 1}}, {{1, 2, 1, 2, 1, 1}},       {{1, 3, 1, 3, 1, 1}},
    {{2, 2, 1, 2, 1, 1}}, {{1, 1, 2, 1, 1, 2}},       {{1, 1, 2, 1, 2, 1}, true},
    {{1, 2, 2, 1, 2, 2}}, {{2, 1, 2, 1, 1, 2}, true}, {{1, 1, 3, 1, 1, 3}},
    {{1, 4, 1, 2, 2, 1}}, {{1, 2, 2, 2, 2, 1}, true}};

std::string text_of(const Layout& layout) {
  return concat(to_string(layout.degrees.shapes()), layout.norm_is_invariant ? ", norm I" : "");
}

/// A rank's model and optimizer.
struct Trained {
  Trained(World& world, const Layout& on, std::uint64_t seed)
      : layout(on),
        mesh(world.mesh(on.degrees.shapes())),
        model(shard_experts(mesh, seed, on.norm_is_invariant)),
        optimizer(make_adamw(model, {})) {}
  /// A step, then values that depend on state, parameter and global element only: vectorized loops
  /// and their ends round the moments differently, wherever an element's place is.
  void step(std::uint64_t number) {
    for (const auto& view : model.shards()) view.shard.mutable_grad() = at::ones_like(view.shard);
    optimizer->step();
    std::uint64_t seed = number * 100;
    for (const auto& state : optimizer->state()) {
      fill(state.view, ++seed, state.view.shard.detach());
      for (const auto& kept : state.kept) fill(state.view, ++seed, kept.values);
    }
  }
  void fill(const ShardView& view, std::uint64_t seed, at::Tensor values) const {
    const auto& contract = *view.contract;
    const auto part = local_part(seeded(seed, contract.shape), contract.layout, mesh).reshape(-1);
    values.copy_(part.narrow(0, view.begin, view.end - view.begin));
  }
  Layout layout;
  Mesh mesh;
  Sharded<StackedExperts> model;
  std::unique_ptr<Optimizer> optimizer;
};

void save(World& world, const Trained& trained, const fs::path& folder) {
  checkpointing::CheckpointOptions options;
  options.folder = folder;
  options.config_json = "{}";
  options.state.source_dtype = [](const std::string& name) {
    return name.ends_with("_proj.weight") ? std::optional(DType::kBFloat16) : std::nullopt;
  };
  options.state.forms = kForms;
  options.state.replica = trained.mesh.coordinate(axis::kReplicate);
  options.state.replicas = trained.mesh.size_of(axis::kReplicate);
  checkpointing::CheckpointSaver saver(world, std::move(options));
  saver.save(2, trained.model, *trained.optimizer);
  saver.finish();
}

/// Steps twice from the same weights on these ranks, and saves.
fs::path checkpoint_of(const Layout& layout, const fs::path& folder) {
  ranks(layout.degrees.ranks()).run([&](World& world) {
    Trained trained(world, layout, 5);
    trained.step(1);
    trained.step(2);
    save(world, trained, folder);
  });
  return folder / "step-2";
}

// The manifest's own check sees that each element is in exactly one piece.
TEST(StackedCheckpoint, HasTheNamesOfFilesAndTheSameBytesUnderEveryLayout) {
  const TemporaryFolder folder;
  const auto alone = checkpoint_of(kLayouts[0], folder / "alone");
  const auto expected = all_tensors(alone);
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
    const auto other = checkpoint_of(layout, folder / text_of(layout));
    const auto found = all_tensors(other);
    EXPECT_EQ(found.size(), expected.size()) << text_of(layout);
    for (const auto& [name, bytes] : expected) {
      EXPECT_TRUE(found.count(name) > 0 && found.at(name) == bytes) << text_of(layout) << name;
    }
  }
}

TEST(StackedCheckpoint, IsReadUnderEveryOtherLayout) {
  const TemporaryFolder folder;
  for (const auto& from : kLayouts) {
    const auto written = checkpoint_of(from, folder / text_of(from));
    const auto expected = all_tensors(written);
    for (const auto& to : kLayouts) {
      const auto copy = folder / concat(text_of(from), " to ", text_of(to));
      ranks(to.degrees.ranks()).run([&](World& world) {
        Trained other(world, to, 99);
        train::load_checkpoint(CheckpointFolder::open(written), other.model, *other.optimizer,
                               world, kForms);
        for (const auto& state : other.optimizer->state()) EXPECT_EQ(state.steps, 2);
        save(world, other, copy);
      });
      EXPECT_TRUE(all_tensors(copy / "step-2") == expected)
          << text_of(from) << " to " << text_of(to);
    }
  }
}

TEST(StackedCheckpoint, ReadsAsAModelFolderUnderTheSameNames) {
  const TemporaryFolder folder;
  const CheckpointTensors source(
      CheckpointFolder::open(checkpoint_of(kLayouts[2], folder / "run")));
  EXPECT_NO_THROW(train::check_tensors(source, StackedExperts::table(), {}));
  EXPECT_EQ(source.find("experts.1.up_proj.weight")->original, DType::kBFloat16);
}

}  // namespace
}  // namespace tessera::test::stacked_checkpoint_test
