// Weights out of a checkpoint: opening reads none, reading verifies each file once.

#include <atomic>

#include "dist/training_run.h"
#include "io/checkpoint_folder.h"
#include "support/plain.h"
#include "support/ranks.h"
#include "support/test.h"
#include "train/generate.h"
#include "train/hf/hf_export.h"
#include "train/hf/weights.h"
#include "train/parallelize.h"

namespace tessera::test::checkpoint_weights_test {
namespace {

namespace fs = std::filesystem;

/// As `tessera generate` has it.
auto opened_to_generate(const train::ModelSource& source, const train::Config& config) {
  return train::parallelize_to_generate(source, config, *World::of_one());
}

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

/// The contracts of a model are known without its weights, and a run that resumes from elsewhere
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
    const auto before = read_file(folder / file);
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
                  Says(name));
    }
    ranks(2).run([&](World& world) {
      train::parallelize(source, from, data_mesh(world), train::InitialWeights::kLater);
    });
    EXPECT_REFUSED(kFormat, opened_to_generate(source, from), name);
    EXPECT_REFUSED(kFormat, train::plan_export(source, {}), name);
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
  EXPECT_NO_THROW(opened_to_generate(source, config));
}

// Naive: one says that storage_dtype changed, which it did not; the other silently writes float32
// that is as good as bfloat16.
TEST(CheckpointWeights, WhatAWholeFrozenPartLeavesIsNamedOnResumeAndByConvert) {
  const TemporaryFolder folder;
  auto config = small_run(folder);
  train_on({}, with_steps(config, 1), folder / "first");
  config.model.config.clear();
  config.model.path = (folder / "first/checkpoint/step-1").string();
  config.model.freeze = {"layers.0"};
  config.precision.param_dtype.dtype = DType::kBFloat16;
  const auto exported = [&](const std::string& run) {
    train::ModelConfig model;
    model.path = (folder / run / "checkpoint").string();
    const auto source = train::open_model(model);
    const auto plan = train::plan_export(source, {});
    for (const auto& shard : plan.shards) {
      for (const auto& tensor : shard.tensors) EXPECT_EQ(tensor.dtype, DType::kFloat32);
    }
    train::ExportOptions narrow;
    narrow.dtype = DType::kBFloat16;
    EXPECT_TRUE(train::plan_export(source, narrow).widened.empty()) << "written as it is";
    return plan.widened;
  };
  train_on({2, 1}, with_steps(config, 1), folder / "shard");
  EXPECT_TRUE(exported("shard").empty());

  auto whole = config;
  whole.model.frozen = FrozenAs::kReplicate;
  train_on({2, 1}, with_steps(whole, 1), folder / "replicate");
  const auto rounded = exported("replicate");
  EXPECT_GT(rounded.size(), 0U);
  for (const auto& name : rounded) EXPECT_THAT(name, Says("layers.0."));

  const auto refusal = [&](train::Config changed, const char* run) {
    return error_of(ErrorKind::kFormat,
                    [&] { train_on({2, 1}, with_steps(std::move(changed), 2), folder / run); });
  };
  auto wide = whole;
  wide.precision.param_dtype.dtype = DType::kFloat32;
  for (const auto& message :
       {refusal(config, "replicate"), refusal(wide, "replicate"), refusal(whole, "shard")}) {
    EXPECT_THAT(message, Says("tensor 'model/model.layers.0.", "its model.frozen",
                              "its precision.param_dtype"));
  }
}

/// A folder with one value more than float16 holds, in every tensor.
class OneLargeValue final : public TensorSource {
 public:
  explicit OneLargeValue(std::shared_ptr<const TensorSource> folder) : folder_(std::move(folder)) {}
  const fs::path& path() const override { return folder_->path(); }
  const Tensors& tensors() const override { return folder_->tensors(); }
  void read(std::string_view name, std::int64_t begin, std::int64_t end,
            std::span<std::byte> out) const override {
    folder_->read(name, begin, end, out);
    const float large = 70000.0F;
    if (begin == 0) std::ranges::copy(std::as_bytes(std::span(&large, 1)), out.begin());
  }

 private:
  std::shared_ptr<const TensorSource> folder_;
};

// Naive: generate computes with inf, and prints tokens.
TEST(CheckpointWeights, AWholeModelRefusesAValueThatItsDtypesCannotHold) {
  const TemporaryFolder folder;
  auto config = small_run(folder);
  train_on({}, with_steps(config, 1), folder / "run");
  config.model.config.clear();
  config.model.path = (folder / "run/checkpoint").string();
  for (const bool stored : {false, true}) {
    config.precision.param_dtype.dtype = DType::kFloat16;
    if (stored) config.precision.storage_dtype.dtype = DType::kFloat16;
    auto source = train::open_model(config.model);
    EXPECT_NO_THROW(opened_to_generate(source, config));
    source.folder = std::make_shared<OneLargeValue>(source.folder);
    EXPECT_REFUSED(kContract, opened_to_generate(source, config), "parameter model.",
                   "found the value 70000", "float16 can hold");
  }
}

/// A parameter of the file as it is in the module that generates.
using Cast = std::function<at::Tensor(const at::Tensor&)>;

void expect_kept_as(const Sharded<models::LanguageModel>& model, const TensorSource& folder,
                    const Cast& cast) {
  const auto in_module = model.module()->named_parameters();
  for (const ShardView& view : model.shards()) {
    const std::string& name = view.contract->name;
    const at::Tensor& used = in_module[name];
    const at::Tensor stored = train::read_elements(folder, name, 0, used.numel());
    EXPECT_TRUE(same_bits(used.view({-1}), cast(stored))) << name;
    EXPECT_TRUE(view.contract->replicated()) << name;
    EXPECT_EQ(used.const_data_ptr(), view.shard.const_data_ptr()) << name << ": in memory twice";
    EXPECT_FALSE(used.requires_grad()) << name;
  }
}

// A model to generate from is in memory once, in its compute dtype, its values rounded to the
// storage dtype before; rules that keep a part in another way are without effect.
TEST(CheckpointWeights, AModelToGenerateFromIsWholeInItsComputeDtypeByWayOfItsStorageDtype) {
  const TemporaryFolder folder;
  auto config = small_run(folder);
  train_on({}, with_steps(config, 1), folder / "run");
  config.model.config.clear();
  config.model.path = (folder / "run/checkpoint").string();
  const auto source = train::open_model(config.model, {}, train::Purpose::kInference);
  PrecisionRule rule;
  rule.match = {"layers.0"};
  for (const auto frozen : {FrozenRule::kNo, FrozenRule::kShard}) {
    rule.frozen = frozen;
    config.precision.rule = {rule};
    config.precision.storage_dtype.dtype = DType::kFloat32;
    config.precision.param_dtype.dtype = DType::kBFloat16;
    expect_kept_as(*opened_to_generate(source, config), *source.folder,
                   [](const at::Tensor& stored) { return stored.to(at::kBFloat16); });
    config.precision.storage_dtype.dtype = DType::kBFloat16;
    config.precision.on_narrower_request = NarrowerRequest::kNarrow;
    config.precision.param_dtype.dtype = DType::kFloat32;
    expect_kept_as(
        *opened_to_generate(source, config), *source.folder,
        [](const at::Tensor& stored) { return stored.to(at::kBFloat16).to(at::kFloat); });
  }
}

// The same in training, from a folder and drawn. Naive: "replicate" loads past the storage dtype,
// and a run computes with other values than one of "shard".
TEST(CheckpointWeights, FrozenPartsOfATrainedModelHaveTheSameValuesWholeOrSharded) {
  const TemporaryFolder folder;
  const auto drawn = small_run(folder);
  train_on({}, with_steps(drawn, 1), folder / "run");
  auto loaded = drawn;
  loaded.model.config.clear();
  loaded.model.path = (folder / "run/checkpoint").string();
  for (auto config : {drawn, loaded}) {
    config.model.freeze = {"layers.0"};
    config.precision.storage_dtype.dtype = DType::kBFloat16;
    config.precision.on_narrower_request = NarrowerRequest::kNarrow;
    config.precision.param_dtype.dtype = DType::kFloat32;
    const auto source = train::open_model(config.model);
    const auto values = [&](World& world, FrozenAs frozen) {
      config.model.frozen = frozen;
      const auto model = train::parallelize(source, config, data_mesh(world));
      Tensors all;
      for (const auto& [name, value] : whole_parameters(*model)) all[name] = value.to(at::kFloat);
      return all;
    };
    ranks(1).run([&](World& world) {
      const auto sharded = values(world, FrozenAs::kShard);
      EXPECT_GT(sharded.size(), 10U);
      expect_same(values(world, FrozenAs::kReplicate), sharded);
    });
  }
}

// Naive: several ranks read memory that was never gathered, or refuse what each of them has whole.
TEST(CheckpointWeights, WhatIsWholeOnSeveralRanksDecodesOnEachAndWhatIsShardedIsRefused) {
  const TemporaryFolder folder;
  auto config = small_run(folder);
  train_on({}, with_steps(config, 1), folder / "run");
  config.model.config.clear();
  config.model.path = (folder / "run/checkpoint").string();
  const auto source = train::open_model(config.model);
  const at::Tensor ids = at::arange(5, at::kLong).view({1, 5});
  const auto expected = train::decoder_of(*opened_to_generate(source, config)).next_logits(ids);
  ranks(2).run([&](World& world) {
    const auto whole = train::parallelize_to_generate(source, config, world);
    EXPECT_TRUE(same_bits(train::decoder_of(*whole).next_logits(ids), expected));
    const auto sharded = train::parallelize(source, config, data_mesh(world));
    auto& decoder = train::decoder_of(*sharded);
    auto cache = decoder.make_cache(5);
    for (const auto& message : {error_of(ErrorKind::kUsage, [&] { decoder.decode(ids, cache); }),
                                error_of(ErrorKind::kUsage, [&] { decoder.next_logits(ids); })}) {
      EXPECT_THAT(message, Says("found the parameter model.embed_tokens.weight sharded"));
    }
  });
}

// Naive: it trains on any values that the memory held.
TEST(CheckpointWeights, AParameterThatTheTableLacksIsNoneThatStaysUndrawn) {
  const TemporaryFolder folder;
  const auto config = small_run(folder);
  ranks(1).run([&](World& world) {
    const auto source = train::open_model(config.model);
    const auto model = train::parallelize(source, config, data_mesh(world));
    auto table = models::describe(source.spec).parameters;
    std::erase_if(table, [](const auto& row) { return row.name == "model.norm.weight"; });
    EXPECT_REFUSED(kInternal, train::draw_weights(*model, table, 1),
                   "model.norm.weight is not in the parameter table");
    // Adapters that are not there: nothing of the model is drawn in their place.
    EXPECT_NO_THROW(train::draw_weights(*model, {}, 1, train::Loaded::kAdapters));
  });
}

}  // namespace
}  // namespace tessera::test::checkpoint_weights_test
