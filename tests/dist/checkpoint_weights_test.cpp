// Weights out of a checkpoint: opening reads none, reading verifies each file once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "dist/ranks.h"
#include "dist/training_run.h"
#include "io/checkpoint_folder.h"
#include "train/hf_export.h"
#include "train/parallelize.h"
#include "train/weights.h"
#include "train/whole_model.h"

namespace tessera::test {
namespace {

namespace fs = std::filesystem;
using testing::error_of;
using ::testing::HasSubstr;
using testing::TemporaryFolder;

/// Seven files, each of which counts how often it was verified.
class CountedFiles final : public TensorSource {
 public:
  static constexpr int kFiles = 7;

  const fs::path& path() const override { return path_; }
  const Tensors& tensors() const override { return tensors_; }
  void read(std::string_view, std::int64_t, std::int64_t, std::span<std::byte>) const override {}
  std::vector<HashedFile> hashed_files() const override {
    std::vector<HashedFile> files;
    for (int i = 0; i < kFiles; ++i) files.push_back({std::to_string(i), 10});
    return files;
  }
  void verify(const HashedFile& file) const override {
    ++times_.at(static_cast<std::size_t>(std::stoi(file.name)));
  }
  int times(int file) const { return times_.at(static_cast<std::size_t>(file)); }

 private:
  fs::path path_;
  Tensors tensors_;
  mutable std::array<std::atomic<int>, kFiles> times_{};
};

TEST(CheckpointWeights, EachFileIsVerifiedOnceByAllRanksTogether) {
  for (const int ranks : {1, 2, 3, 7, 9}) {
    const CountedFiles files;
    for (int rank = 0; rank < ranks; ++rank) train::verify_weights(files, rank, ranks);
    for (int file = 0; file < CountedFiles::kFiles; ++file) {
      EXPECT_EQ(files.times(file), 1) << file << " of " << ranks << " ranks";
    }
  }
}

/// The contracts of a model are known without its weights, and a run that goes on from elsewhere
/// does not need them.
TEST(CheckpointWeights, ADamagedFileIsFoundWhereWeightsAreReadAndOnlyThere) {
  const TemporaryFolder folder;
  const auto config = small_run(folder);
  train_on({3, 1}, with_steps(config, 1), folder / "run");
  auto from = config;
  from.model.config.clear();
  from.model.path = (folder / "run/checkpoint").string();
  for (const std::string name :
       {"rank_0.safetensors", "rank_1.safetensors", "rank_2.safetensors"}) {
    const std::string file = "run/checkpoint/step-1/" + name;
    const auto before = file_text(folder / file);
    auto text = before;
    text.back() = static_cast<char>(text.back() ^ 1);
    folder.write(file, text);
    const auto source = train::open_model(from.model);
    const auto contracts = train::resolve_model(source, from, {}).parameters;
    EXPECT_FALSE(contracts.empty());
    for (const int count : {1, 2, 4}) {
      EXPECT_THAT(error_of(ErrorKind::kFormat,
                           [&] {
                             ranks(count).run([&](World& world) {
                               train::parallelize(train::open_model(from.model), from,
                                                  data_mesh(world));
                             });
                           }),
                  HasSubstr(name));
    }
    ranks(2).run([&](World& world) {
      train::parallelize(source, from, data_mesh(world), train::InitialWeights::kLater);
    });
    EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { train::load_whole_model(source, contracts); }),
                HasSubstr(name));
    EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { train::plan_export(source, {}); }),
                HasSubstr(name));
    folder.write(file, before);
  }
  train::plan_export(train::open_model(from.model), {});
}

/// Where training began matters for tokenizer files only.
TEST(CheckpointWeights, AnOriginThatIsDamagedIsAsGoodAsGone) {
  const TemporaryFolder folder;
  const auto config = small_run(folder);
  train_on({1, 1}, with_steps(config, 1), folder / "first");
  auto second = with_steps(config, 1);
  second.model.config.clear();
  second.model.path = (folder / "first/checkpoint/step-1").string();
  train_on({1, 1}, second, folder / "second");
  folder.write("first/checkpoint/step-1/manifest.json", "torn");
  train::ModelConfig model;
  model.path = (folder / "second/checkpoint").string();
  const auto source = train::open_model(model);
  EXPECT_TRUE(source.origin.empty());
  EXPECT_TRUE(train::plan_export(source, {}).copies.empty());
  EXPECT_NO_THROW(
      train::load_whole_model(source, train::resolve_model(source, config, {}).parameters));
}

}  // namespace
}  // namespace tessera::test
