// A run that resumes from a checkpoint is the run that was never interrupted: bit for bit on the
// same layout, and with the same tensors, bit for bit, on any other.

#include <cmath>
#include <cstddef>
#include <fstream>

#include "base/log.h"
#include "checkpoint/saver.h"
#include "dist/checkpoint_tensors.h"
#include "dist/training_run.h"
#include "io/checkpoint_folder.h"
#include "io/checkpoint_store.h"
#include "proof.h"
#include "support/modules.h"
#include "support/ranks.h"
#include "support/test.h"
#include "train/hf/model_forms.h"
#include "train/parallelize.h"
#include "train/resume/checkpoint_session.h"
#include "train/resume/resume.h"
#include "train/step.h"

namespace tessera::test::checkpoint_resume_test {
namespace {

namespace fs = std::filesystem;

const RanksOfRun kLayouts[] = {{1, 1}, {2, 1}, {3, 1}, {2, 2}, {4, 2}};

std::string text_of(const RanksOfRun& layout) {
  return concat(layout.replicas, " x ", layout.ranks / layout.replicas);
}

void expect_same_tensors(const fs::path& found, const fs::path& expected) {
  const auto a = all_tensors(found);
  const auto b = all_tensors(expected);
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, values] : b)
    EXPECT_TRUE(a.contains(name) && a.at(name) == values) << name;
}

struct Kind {
  std::string name;
  std::function<void(train::Config&)> set;
};

const Kind kKinds[] = {
    {"AdamW", [](train::Config&) {}},
    {"momentum",
     [](train::Config& config) {
       config.optimizer.name = train::OptimizerName::kSgd;
       config.optimizer.momentum = 0.9;
       config.optimizer.lr = 0.1;
     }},
    // The first steps are left out, then the scale grows every third one until one is again.
    {"a scaled loss in float16",
     [](train::Config& config) {
       config.precision.param_dtype.dtype = DType::kFloat16;
       config.precision.reduce_dtype.dtype = DType::kFloat16;
       config.grad_scaler.init_scale = 0x1p20;
       config.grad_scaler.backoff_factor = 0.25;
       config.grad_scaler.growth_interval = 3;
     }},
    {"accumulation and a frozen part",
     [](train::Config& config) {
       config.training.local_batch_size = 1;
       config.model.freeze = {"layers.0"};
       config.lr_scheduler.decay = train::LrDecay::kCosine;
     }},
    {"a frozen part that is whole on every rank",
     [](train::Config& config) {
       config.model.freeze = {"layers.0", "embed_tokens"};
       config.model.frozen = FrozenAs::kReplicate;
     }},
    {"Muon", [](train::Config& config) { config.optimizer.name = train::OptimizerName::kMuon; }},
};

/// ./test has two layouts of each kind on the host, one on simulated devices.
bool is_gone_through(std::size_t kind, std::size_t layout) {
  const std::size_t turn = (layout + kind) % std::size(kLayouts);
  return full_proof() || turn == 0 || (turn == 2 && place().device == "cpu");
}

TEST(Resume, OnTheSameLayoutHasTheBitsOfTheUndisturbedRun) {
  for (std::size_t i = 0; i < std::size(kKinds); ++i) {
    for (std::size_t j = 0; j < std::size(kLayouts); ++j) {
      if (!is_gone_through(i, j)) continue;
      const Kind& kind = kKinds[i];
      const RanksOfRun& layout = kLayouts[j];
      SCOPED_TRACE(kind.name + " on " + text_of(layout));
      const TemporaryFolder folder;
      auto config = small_run(folder);
      kind.set(config);
      const auto whole = train_on(layout, with_steps(config, 12), folder / "whole");

      // The same schedule until step 12, stopped after 5 by a request.
      const auto first = train_on(layout, with_steps(config, 12), folder / "parts", [](World&) {
        train::TrainingHooks hooks;
        hooks.stop_requested = [asked = 0]() mutable { return asked++ == 5; };
        return hooks;
      });
      EXPECT_EQ(first.result.steps, 5);
      const auto second = train_on(layout, with_steps(config, 12), folder / "parts");
      EXPECT_EQ(second.result.steps, 12);

      auto losses = first.losses;
      losses.insert(losses.end(), second.losses.begin(), second.losses.end());
      EXPECT_EQ(losses, whole.losses);
      for (int rank = 0; rank < layout.ranks; ++rank) {
        const auto file = concat("checkpoint/step-12/rank_", rank, ".safetensors");
        const auto expected = read_file(folder / "whole" / file);
        EXPECT_GT(expected.size(), 0U);
        EXPECT_TRUE(read_file(folder / "parts" / file) == expected) << file;
      }
      const auto loss_scale = [&](const char* run) {
        return CheckpointFolder::open(folder / run / "checkpoint").manifest().loss_scale;
      };
      EXPECT_EQ(loss_scale("parts"), loss_scale("whole"));
    }
  }
}

/// Reads a checkpoint on another layout and writes what was read.
void copy_on(const RanksOfRun& layout, const train::Config& config, const fs::path& from,
             const fs::path& to) {
  ranks(layout.ranks).run([&](World& world) {
    const auto source = train::open_model(config.model);
    const auto mesh = data_mesh(world, layout.replicas);
    auto same = config;
    same.parallelism.data_parallel_replicate_degree = layout.replicas;
    const auto model = train::parallelize(source, same, mesh, train::InitialWeights::kLater);
    const auto optimizer =
        fsdp::make_optimizer(config.optimizer.name, *model, 1e-3, config.optimizer,
                             train::hidden_matrices(source.description.parameters));
    const auto checkpoint = CheckpointFolder::open(from);
    train::load_checkpoint(checkpoint, *model, *optimizer, world);
    checkpointing::CheckpointOptions options;
    options.folder = to;
    options.config_json = checkpoint.config_text();
    options.state.source_dtype = [](const std::string&) { return std::nullopt; };
    options.state.replica = mesh.coordinate(axis::kReplicate);
    options.state.replicas = layout.replicas;
    checkpointing::CheckpointSaver saver(world, std::move(options));
    saver.save(checkpoint.manifest().step, *model, *optimizer);
    saver.finish();
  });
}

void expect_every_layout_reads_every_other(const Kind& kind) {
  for (const auto& from : kLayouts) {
    const TemporaryFolder folder;
    auto config = small_run(folder);
    kind.set(config);
    train_on(from, with_steps(config, 3), folder / "from");
    const auto written = folder / "from/checkpoint/step-3";
    for (const auto& to : kLayouts) {
      SCOPED_TRACE(text_of(from) + " to " + text_of(to));
      const auto copy = folder / ("to " + text_of(to));
      copy_on(to, config, written, copy);
      expect_same_tensors(copy / "step-3", written);
    }
  }
}

TEST(Resume, EveryLayoutReadsTheBitsOfEveryOther) {
  expect_every_layout_reads_every_other(kKinds[0]);
}

// Momentum of matrices, moments of the rest.
TEST(Resume, EveryLayoutReadsWhatMuonKeepsInEveryOther) {
  expect_every_layout_reads_every_other(kKinds[5]);
}

// Naive: every rank writes what it has whole, and the pieces cover a tensor several times (which
// opening the checkpoint refuses).
TEST(Resume, WhatIsWholeOnEveryRankIsWrittenOnceAndReadByEveryLayout) {
  expect_every_layout_reads_every_other(kKinds[3]);
}

/// Updates by gradients that depend on parameter, step and element only.
void step_by_hand(const ShardedBase& model, Optimizer& optimizer, int step) {
  for (const auto& view : model.shards()) {
    const auto whole = seeded(hash_bytes(view.contract->name, static_cast<std::uint64_t>(step)),
                              {view.contract->numel()});
    view.shard.mutable_grad() = whole.narrow(0, view.begin, view.end - view.begin).clone();
  }
  optimizer.step();
}

void save_now(World& world, const fs::path& folder, std::int64_t step, const ShardedBase& model,
              const Optimizer& optimizer) {
  checkpointing::CheckpointOptions options;
  options.folder = folder;
  options.config_json = "{}";
  options.state.source_dtype = [](const std::string&) { return DType::kBFloat16; };
  checkpointing::CheckpointSaver saver(world, std::move(options));
  saver.save(step, model, optimizer);
  saver.finish();
}

TEST(Resume, SixteenBitShardsResumeWithTheirMasters) {
  const TemporaryFolder folder;
  auto config = small_run(folder);
  auto model = read_file(folder / "model.json");
  model.insert(model.find('{') + 1, R"("torch_dtype": "bfloat16", )");
  config.model.config = folder.write("narrow.json", model);
  config.precision.storage_dtype.dtype.reset();  // as config.json says
  const auto source = train::open_model(config.model);
  AdamWOptions small_updates;
  small_updates.lr = 1e-4;  // below a bf16 step
  ranks(2).run([&](World& world) {
    const auto mesh = data_mesh(world);
    const auto whole = train::parallelize(source, config, mesh);
    const auto optimizer = make_adamw(*whole, small_updates);
    for (int step = 1; step <= 4; ++step) {
      step_by_hand(*whole, *optimizer, step);
      if (step == 2) save_now(world, folder / "parts", 2, *whole, *optimizer);
    }
    save_now(world, folder / "whole", 4, *whole, *optimizer);

    const auto resumed = train::parallelize(source, config, mesh, train::InitialWeights::kLater);
    const auto resumed_optimizer = make_adamw(*resumed, small_updates);
    train::load_checkpoint(CheckpointFolder::open(folder / "parts/step-2"), *resumed,
                           *resumed_optimizer, world);
    for (int step = 3; step <= 4; ++step) step_by_hand(*resumed, *resumed_optimizer, step);
    save_now(world, folder / "parts", 4, *resumed, *resumed_optimizer);
  });
  expect_same_tensors(folder / "parts/step-4", folder / "whole/step-4");
  const auto checkpoint = CheckpointFolder::open(folder / "parts/step-4");
  const std::string name = "model.layers.1.mlp.up_proj.weight";
  EXPECT_EQ(checkpoint.tensors().at("model/" + name).dtype, DType::kBFloat16);
  EXPECT_EQ(checkpoint.tensors().at("model/" + name).source_dtype, DType::kBFloat16);
  EXPECT_EQ(checkpoint.tensors().at("optim/master_remainder/" + name).dtype, DType::kInt16);
  EXPECT_EQ(checkpoint.tensors().at("optim/exp_avg_sq/" + name).dtype, DType::kFloat32);
}

/// As a checkpoint of before manifests counted the steps that made no update.
void forget_left_out(const fs::path& step) {
  auto manifest = CheckpointFolder::open(step).manifest();
  EXPECT_GE(manifest.left_out_steps, 1);
  manifest.left_out_steps.reset();
  std::ofstream(step / kManifestFile, std::ios::binary) << to_json(manifest);
}

TEST(Resume, TheScheduleWaitsForStepsLeftOutAlsoBehindACheckpointThatDoesNotCountThem) {
  const TemporaryFolder folder;
  auto config = small_run(folder);
  config.precision.param_dtype.dtype = DType::kFloat16;
  config.grad_scaler.init_scale = 0x1p30;
  config.grad_scaler.backoff_factor = 0x1p-10;
  config.lr_scheduler.warmup_steps = 10;
  train_on({2, 1}, with_steps(config, 5), folder / "run");
  fs::copy(folder / "run", folder / "before", fs::copy_options::recursive);
  forget_left_out(folder / "before/checkpoint/step-5");
  const auto skipped =
      CheckpointFolder::open(folder / "run/checkpoint").manifest().loss_scale->skipped_steps;
  for (const char* run : {"run", "before"}) {
    std::vector<double> rates;
    train_on({2, 1}, with_steps(config, 7), folder / run, [&](World& world) {
      train::TrainingHooks hooks;
      if (world.rank() != 0) return hooks;
      hooks.after_step = [&](const train::StepMetrics& metrics, const ShardedBase&) {
        rates.push_back(metrics.lr);
      };
      return hooks;
    });
    ASSERT_EQ(rates.size(), 2U);
    const double lr = *config.optimizer.lr;
    EXPECT_DOUBLE_EQ(rates[0], lr * static_cast<double>(6 - skipped) / 10) << run;
    EXPECT_DOUBLE_EQ(rates[1], lr * static_cast<double>(7 - skipped) / 10) << run;
  }
}

// Naive: it begins again at init_scale, and leaves out steps that the first run had not.
TEST(Resume, AScaledRunContinuesAtItsScaleOnAnyLayoutAndMayComeFromFloat32OrGoThere) {
  const TemporaryFolder folder;
  auto config = small_run(folder);
  auto half = config;
  half.precision.param_dtype.dtype = DType::kFloat16;
  half.grad_scaler.init_scale = 0x1p30;
  half.grad_scaler.backoff_factor = 0x1p-10;
  const auto state = [&](const char* run) {
    return CheckpointFolder::open(folder / run / "checkpoint").manifest().loss_scale;
  };
  train_on({2, 1}, with_steps(half, 6), folder / "run");
  const auto first = state("run");
  ASSERT_TRUE(first);
  EXPECT_GE(first->skipped_steps, 1);
  EXPECT_LT(first->scale, 0x1p30);
  train_on({3, 1}, with_steps(half, 8), folder / "run");
  const auto second = state("run");
  ASSERT_TRUE(second);
  EXPECT_EQ(*second, (LossScaleState{first->scale, first->good_steps + 2, first->skipped_steps}));

  auto narrow = half;
  narrow.grad_scaler.min_scale = 0x1p30;
  EXPECT_REFUSED(kConfig, train_on({2, 1}, with_steps(narrow, 9), folder / "run"),
                 "lower grad_scaler.min_scale");
  train_on({2, 1}, with_steps(config, 9), folder / "run");
  EXPECT_EQ(state("run"), std::nullopt);
  half.grad_scaler = {};
  half.grad_scaler.init_scale = 256;
  train_on({2, 1}, with_steps(half, 10), folder / "run");
  EXPECT_EQ(state("run"), (LossScaleState{256, 1, 0}));
}

/// Returns the lines that the ranks of `act` log together.
std::vector<std::string> log_of(const TemporaryFolder& folder, const std::function<void()>& act) {
  const auto file = folder / "said.log";
  fs::remove(file);
  log::init({.rank = 1, .world_size = 1, .file = file});
  act();
  log::init({.rank = 1, .world_size = 1, .file = {}});
  std::ifstream in(file);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

void read_checkpoint(World& world, const train::Config& config, const fs::path& path) {
  const auto source = train::open_model(config.model);
  const auto model =
      train::parallelize(source, config, data_mesh(world), train::InitialWeights::kLater);
  const auto optimizer = make_adamw(*model, {});
  train::load_checkpoint(CheckpointFolder::open(path), *model, *optimizer, world);
}

// Naive: each rank says it of its own share, and only what rank 0 says is seen.
TEST(Resume, StateThatIsMissingIsCountedOverAllRanksAndSaidOnce) {
  const TemporaryFolder folder;
  auto config = small_run(folder);
  auto frozen = config;
  frozen.model.freeze = {"layers.0"};
  train_on({2, 1}, with_steps(frozen, 2), folder / "run");
  const auto path = folder / "run/checkpoint/step-2";
  const auto checkpoint = CheckpointFolder::open(path);
  const auto missing = std::ranges::count_if(checkpoint.tensors(), [](const auto& tensor) {
    return tensor.first.starts_with("model/model.layers.0.");
  });
  for (const int count : {1, 2, 3, 4}) {
    const auto lines = log_of(folder, [&] {
      ranks(count).run([&](World& world) { read_checkpoint(world, config, path); });
    });
    const auto said =
        Says(concat("found no optimizer's state of ", missing, " trained parameter(s), as "),
             "model.layers.0.");
    EXPECT_THAT(lines, Contains(said).Times(1)) << count << " ranks";
    EXPECT_THAT(lines, Contains(Says("optimizer's state")).Times(1));
  }
}

// Naive: a rank that trains nothing continues, and the others wait for it.
TEST(Resume, ARankThatTrainsNothingIsThereWhereTheOthersAgree) {
  const TemporaryFolder folder;
  const auto config = small_run(folder);
  train_on({2, 1}, with_steps(config, 2), folder / "run");
  ranks(2).run([&](World& world) {
    const auto source = train::open_model(config.model);
    const auto mesh = data_mesh(world);
    const auto model = train::parallelize(source, config, mesh, train::InitialWeights::kLater);
    const auto frozen = std::make_shared<Scale>(at::ones({4}));
    frozen->weight.requires_grad_(false);
    const auto nothing = fully_shard(frozen, mesh);
    const auto optimizer = make_adamw(*model, {});
    const auto empty = make_adamw(nothing, {});
    auto& mine = world.rank() == 0 ? *optimizer : *empty;
    train::load_checkpoint(CheckpointFolder::open(folder / "run/checkpoint/step-2"), *model, mine,
                           world);
    EXPECT_EQ(mine.state().empty(), world.rank() == 1);
  });
}

// A run may change to float16 and from it: it says so, and by which key it would not.
TEST(Resume, AChangeToFloat16OrFromItIsAWarningWithItsKey) {
  const TemporaryFolder folder;
  auto half = small_run(folder);
  half.precision.param_dtype.dtype = DType::kFloat16;
  CheckpointManifest of_float16;
  of_float16.loss_scale = {1024, 3, 1};
  const auto resume = [&](const CheckpointManifest& manifest, const train::Config& config) {
    return log_of(folder, [&] {
      ranks(1).run([&](World& world) {
        const auto source = train::open_model(config.model);
        const auto model = train::parallelize(source, config, data_mesh(world));
        const auto scaler = train::make_scaler(*model, model->contract().parameters, {});
        train::restore_scaler(manifest, scaler.get());
      });
    });
  };
  const auto warning = [](const char* found, const char* hint) {
    return Contains(Says("warning", found, hint)).Times(1);
  };
  EXPECT_THAT(resume(of_float16, small_run(folder)),
              warning("precision.param_dtype: found no float16", "at the loss scale 1024"));
  EXPECT_THAT(resume({}, half), warning("grad_scaler: found no loss scale", "grad_scaler.init_"));
  EXPECT_THAT(resume(of_float16, half), Not(Contains(Says("warning"))));
  EXPECT_THAT(resume({}, small_run(folder)), Not(Contains(Says("warning"))));
}

TEST(Resume, OnOtherLayoutsHasTheLossesWithinRounding) {
  const TemporaryFolder folder;
  const auto config = small_run(folder);
  const auto whole = train_on({2, 1}, with_steps(config, 25), folder / "whole");
  train_on({2, 1}, with_steps(config, 5), folder / "start");
  for (const RanksOfRun& layout : {RanksOfRun{3, 1}, RanksOfRun{1, 1}, RanksOfRun{4, 2}}) {
    SCOPED_TRACE(text_of(layout));
    const auto run = folder / ("on " + text_of(layout));
    fs::copy(folder / "start", run, fs::copy_options::recursive);
    const auto rest = train_on(layout, with_steps(config, 25), run);
    ASSERT_EQ(rest.losses.size(), 20U);
    double largest = 0;
    for (std::size_t i = 0; i < rest.losses.size(); ++i) {
      largest = std::max(largest, std::abs(rest.losses[i] - whole.losses[i + 5]));
    }
    // Sums of fp32 gradients in another order: 2^-24 of a loss of 5 is 3e-7, and 20 updates carry
    // such differences along.
    EXPECT_LT(largest, 5e-6);
    RecordProperty(text_of(layout), concat(largest));
  }
}

// A momentum is a hyperparameter: where there was none, the first buffer is the next gradient.
TEST(Resume, SgdMayBeginWithAMomentumButNotDropOne) {
  const TemporaryFolder folder;
  auto plain = with_steps(small_run(folder), 2);
  plain.optimizer.name = train::OptimizerName::kSgd;
  train_on({2, 1}, plain, folder / "run");
  auto heavy = plain;
  heavy.optimizer.momentum = 0.9;
  heavy.training.steps = 3;
  EXPECT_EQ(train_on({2, 1}, heavy, folder / "run").losses.size(), 1U);
  plain.training.steps = 3;
  train_on({2, 1}, plain, folder / "plain");
  EXPECT_EQ(all_tensors(folder / "run/checkpoint/step-3").at("model/model.norm.weight"),
            all_tensors(folder / "plain/checkpoint/step-3").at("model/model.norm.weight"));
  plain.training.steps = 4;
  EXPECT_REFUSED(kConfig, train_on({2, 1}, plain, folder / "run"),
                 "optimizer.name: found an optimizer that keeps none");
}

/// As it was written before tensors had a file of their own.
void make_version_1(const fs::path& step) {
  const auto checkpoint = CheckpointFolder::open(step);
  auto manifest = checkpoint.manifest();
  ASSERT_EQ(manifest.format, 2);
  manifest.format = 1;
  manifest.tensors = checkpoint.tensors();
  manifest.blocks.clear();
  manifest.files.erase(std::string(kTensorsFile));
  fs::remove(step / kTensorsFile);
  std::ofstream(step / kManifestFile, std::ios::binary) << to_json(manifest);
}

TEST(Resume, ACheckpointOfVersion1ResumesOnAnyLayout) {
  const TemporaryFolder folder;
  const auto config = small_run(folder);
  for (const auto& to : {RanksOfRun{2, 1}, RanksOfRun{3, 1}}) {
    const auto run = concat("old", to.ranks);
    const auto same = concat("new", to.ranks);
    train_on({2, 1}, with_steps(config, 2), folder / run);
    train_on({2, 1}, with_steps(config, 2), folder / same);
    make_version_1(folder / run / "checkpoint/step-2");
    const auto found = train_on(to, with_steps(config, 4), folder / run);
    const auto expected = train_on(to, with_steps(config, 4), folder / same);
    EXPECT_EQ(found.losses, expected.losses);
    expect_same_tensors(folder / run / "checkpoint/step-4", folder / same / "checkpoint/step-4");
    expect_same_tensors(folder / run / "checkpoint/step-2", folder / same / "checkpoint/step-2");
  }
}

TEST(Resume, AnAlteredFileIsNamedOnAllRanksBeforeAnythingElse) {
  const TemporaryFolder folder;
  const auto config = small_run(folder);
  train_on({3, 1}, with_steps(config, 2), folder / "run");
  for (const std::string file : {"rank_0.safetensors", "rank_1.safetensors", "rank_2.safetensors",
                                 "config.json", "manifest.json", "tensors.jsonl"}) {
    const auto path = folder / ("run/checkpoint/step-2/" + file);
    const auto before = read_file(path);
    auto text = before;
    text[text.size() / 2] = static_cast<char>(text[text.size() / 2] ^ 4);
    folder.write("run/checkpoint/step-2/" + file, text);
    // One rank more and one less than wrote it: every file is verified by somebody.
    for (const int ranks : {1, 2, 4}) {
      EXPECT_REFUSED(kFormat, train_on({ranks, 1}, with_steps(config, 3), folder / "run"), file)
          << ranks << " ranks";
    }
    folder.write("run/checkpoint/step-2/" + file, before);
  }
  EXPECT_EQ(train_on({3, 1}, with_steps(config, 3), folder / "run").losses.size(), 1U);
}

// Naive: `cannot open manifest.json`. What is older is not taken without being asked for.
TEST(Resume, ANewestStepThatIsNotWholeNamesTheNewestThatIsAndTheKey) {
  const TemporaryFolder folder;
  auto config = small_run(folder);
  config.checkpoint.interval = 1;
  train_on({2, 1}, with_steps(config, 4), folder / "run");
  const auto at = [&](int step) { return folder / concat("run/checkpoint/step-", step); };
  const auto refused = [&] {
    return error_of(ErrorKind::kFormat,
                    [&] { train_on({2, 1}, with_steps(config, 5), folder / "run"); });
  };
  fs::remove(at(4) / "manifest.json");
  fs::resize_file(at(3) / "rank_1.safetensors", 8);
  const auto names_step_2 =
      Says("'" + at(4).string() + "': found no manifest.json, expected a whole",
           "the newest whole checkpoint before it is '" + at(2).string() +
               "': set checkpoint.load_step = 2");
  EXPECT_THAT(refused(), names_step_2);
  fs::remove(folder / "run/checkpoint/latest");  // a crash before the first was written
  EXPECT_THAT(refused(), names_step_2);
  config.checkpoint.load_step = 3;
  EXPECT_THAT(refused(), Says("rank_1.safetensors", "load_step = 2"));
  config.checkpoint.load_step = 2;
  EXPECT_EQ(train_on({2, 1}, with_steps(config, 5), folder / "run").losses.size(), 3U);
  EXPECT_EQ(CheckpointStore(folder / "run/checkpoint").latest(), 5);
  for (const int step : {1, 2, 3, 4, 5}) fs::remove(at(step) / "manifest.json");
  config.checkpoint.load_step = -1;
  EXPECT_THAT(refused(), Says("there is no whole checkpoint before it: choose another"));
  folder.write("run/checkpoint/latest", "step-9");
  EXPECT_THAT(refused(), Says("found step-9, which is not there", "or set checkpoint.load_step"));
}

TEST(Resume, AnEarlierStepThatWasAskedForBecomesTheLatest) {
  const TemporaryFolder folder;
  auto config = small_run(folder);
  config.checkpoint.interval = 2;
  const auto whole = train_on({2, 1}, with_steps(config, 6), folder / "run");
  const auto expected = read_file(folder / "run/checkpoint/step-6/rank_1.safetensors");
  const CheckpointStore store(folder / "run/checkpoint");
  EXPECT_EQ(store.steps(), (std::vector<std::int64_t>{2, 4, 6}));

  config.checkpoint.load_step = 2;
  EXPECT_EQ(train_on({2, 1}, with_steps(config, 2), folder / "run").losses.size(), 0U);
  EXPECT_EQ(store.latest(), 2) << "a restart resumes from what was chosen";
  config.checkpoint.load_step = -1;
  const auto again = train_on({2, 1}, with_steps(config, 6), folder / "run");
  EXPECT_EQ(again.losses, std::vector<double>(whole.losses.begin() + 2, whole.losses.end()));
  EXPECT_EQ(read_file(folder / "run/checkpoint/step-6/rank_1.safetensors"), expected);
  EXPECT_EQ(store.latest(), 6);
}

TEST(Resume, MetricsAreCutBackToTheResumedStep) {
  const TemporaryFolder folder;
  auto config = small_run(folder);
  config.checkpoint.interval = 2;
  const auto lines = [&] {
    const auto text = read_file(folder / "run/metrics/metrics.jsonl");
    return std::count(text.begin(), text.end(), '\n');
  };
  train_on({1, 1}, with_steps(config, 6), folder / "run");
  EXPECT_EQ(lines(), 6);
  config.checkpoint.load_step = 4;
  train_on({1, 1}, with_steps(config, 4), folder / "run");
  EXPECT_EQ(lines(), 4);
  config.checkpoint.load_step = -1;
  train_on({1, 1}, with_steps(config, 7), folder / "run");
  EXPECT_EQ(lines(), 7);
}

}  // namespace
}  // namespace tessera::test::checkpoint_resume_test
