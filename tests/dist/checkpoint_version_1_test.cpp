// Property: a checkpoint that was written before tensors.jsonl came loads with all of its bits, on
// any number of ranks.
//
// The folder tests/golden/data/checkpoint-version-1 was written on two ranks by commit 7ac99f1, the
// last that writes version 1, of the model below: what an element holds follows from its place, so
// nothing here depends on the code that reads or writes.

#include <filesystem>

#include "checkpoint/saver.h"
#include "io/checkpoint_folder.h"
#include "support/plain.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "train/resume/resume.h"

namespace tessera::test::checkpoint_version_1_test {
namespace {

namespace fs = std::filesystem;
using ::testing::Key;

const fs::path kFolder = fs::path(TESSERA_TEST_DATA) / "checkpoint-version-1";
constexpr std::int64_t kStep = 7;

class Small : public torch::nn::Module {
 public:
  Small() {
    auto inner = register_module("inner", std::make_shared<torch::nn::Module>());
    register_parameter("embed", at::zeros({50, 3}));
    register_parameter("norm", at::zeros({100}, at::kBFloat16));
    inner->register_parameter("frozen", at::zeros({2, 2}), /*requires_grad=*/false);
    inner->register_buffer("counts", at::zeros({3}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
};

/// The kinds of tensors: 0 a parameter, 1 to 3 what the optimizer keeps of it, 5 a buffer.
enum class Kind : std::uint8_t {
  kParameter = 0,
  kFirst = 1,
  kSecond = 2,
  kRemainder = 3,
  kBuffer = 5
};
Kind kind_of(std::string_view kept) {
  if (kept == "exp_avg") return Kind::kFirst;
  return kept == "exp_avg_sq" ? Kind::kSecond : Kind::kRemainder;
}

/// Exact in every dtype.
at::Tensor expected_of(const at::Tensor& like, std::int64_t begin, Kind kind) {
  auto values =
      at::arange(begin, begin + like.numel(), at::kDouble) + 20 * static_cast<std::int64_t>(kind);
  if (at::isFloatingType(like.scalar_type())) values = values / 8;
  return values.reshape(like.sizes()).to(like.scalar_type());
}

TEST(CheckpointOfVersion1, SaysWhatItWasWrittenOf) {
  const auto checkpoint = CheckpointFolder::open(kFolder);
  checkpoint.verify_all();
  const auto& manifest = checkpoint.manifest();
  EXPECT_EQ(manifest.format, 1);
  EXPECT_EQ(manifest.step, kStep);
  EXPECT_EQ(manifest.world_size, 2);
  EXPECT_EQ(manifest.config_hash, Hash128Stream().add("config").digest());
  EXPECT_EQ(manifest.model_path, "models/small");
  EXPECT_EQ(manifest.seed, 42);
  EXPECT_THAT(manifest.data.path, ElementsAre("tokens.bin"));
  EXPECT_EQ(manifest.data.bytes, 1000);
  EXPECT_EQ(manifest.data.xxh3_128, Hash128Stream().add("tokens").digest());
  EXPECT_EQ(manifest.data.seq_len, 16);
  EXPECT_EQ(manifest.data.global_batch_size, 4);
  EXPECT_EQ(manifest.optimizer, "AdamW");
  EXPECT_EQ(manifest.loss_scale, (LossScaleState{1024, 3, 1}));
  EXPECT_EQ(checkpoint.config_text(), "{\"of\": \"a fixture\"}\n");
  EXPECT_THAT(checkpoint.tensors(),
              ElementsAre(Key("model/embed"), Key("model/inner.counts"), Key("model/inner.frozen"),
                          Key("model/norm"), Key("optim/exp_avg/embed"), Key("optim/exp_avg/norm"),
                          Key("optim/exp_avg_sq/embed"), Key("optim/exp_avg_sq/norm"),
                          Key("optim/master_remainder/norm"), Key("optim/step/embed"),
                          Key("optim/step/norm")));
  EXPECT_EQ(checkpoint.tensors().at("model/embed").source_dtype, DType::kBFloat16);
  EXPECT_EQ(checkpoint.tensors().at("model/norm").dtype, DType::kBFloat16);
}

void expect_all(const ShardedBase& model, const Optimizer& optimizer) {
  for (const auto& view : model.shards()) {
    EXPECT_TRUE(same_bits(view.shard, expected_of(view.shard, view.begin, Kind::kParameter)))
        << view.contract->name;
  }
  for (const auto& view : model.buffers())
    EXPECT_TRUE(same_bits(view.tensor, expected_of(view.tensor, 0, Kind::kBuffer)));
  std::size_t states = 0;
  for (const auto& state : optimizer.state()) {
    EXPECT_EQ(state.steps, kStep) << state.view.contract->name;
    for (const auto& kept : state.kept) {
      EXPECT_TRUE(
          same_bits(kept.values, expected_of(kept.values, state.view.begin, kind_of(kept.name))))
          << kept.name << " of " << state.view.contract->name;
      ++states;
    }
  }
  EXPECT_EQ(states, 5U);
}

TEST(CheckpointOfVersion1, LoadsBitForBitOnAnyRanksAndIsSavedAsVersion2) {
  for (const int count : {1, 2, 3}) {
    SCOPED_TRACE(count);
    const TemporaryFolder folder;
    const auto old = folder / "old/step-7";  // `latest` is written next to what is loaded
    fs::create_directories(old.parent_path());
    fs::copy(kFolder, old);
    ranks(count).run([&](World& world) {
      const auto make = [&] {
        return fully_shard(std::make_shared<Small>(), data_mesh(world), PrecisionPolicy{});
      };
      const auto model = make();
      const auto optimizer = make_adamw(model, {});
      const auto checkpoint = CheckpointFolder::open(old);
      train::load_checkpoint(checkpoint, model, *optimizer, world);
      expect_all(model, *optimizer);

      checkpointing::CheckpointOptions options;
      options.folder = folder / "checkpoint";
      options.config_json = checkpoint.config_text();
      checkpointing::CheckpointSaver saver(world, std::move(options));
      saver.save(kStep, model, *optimizer);
      saver.finish();
      const auto saved = CheckpointFolder::open(folder / "checkpoint");
      EXPECT_EQ(saved.manifest().format, 2);
      const auto again = make();
      const auto optimizer_again = make_adamw(again, {});
      train::load_checkpoint(saved, again, *optimizer_again, world);
      expect_all(again, *optimizer_again);
    });
  }
}

}  // namespace
}  // namespace tessera::test::checkpoint_version_1_test
