#include "golden/layouts.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <fstream>
#include <mutex>

#include "golden/model_folder.h"
#include "io/safetensors.h"
#include "models/description.h"
#include "support/quiet_output.h"
#include "support/ranks.h"
#include "support/test.h"
#include "tessera/shard.h"
#include "train/gradients.h"
#include "train/parallelize.h"

namespace tessera::golden {
namespace {

constexpr const char* kTiedNames[] = {"model.embed_tokens.weight",
                                      "model.language_model.embed_tokens.weight", "wte.weight"};

/// Parameters that stack several tensors of the files, as these.
Tensors as_in_files(const std::vector<models::ParameterSpec>& table, Tensors parameters) {
  for (const auto& row : table) {
    const auto found = parameters.find(row.name);
    if (row.stacked.empty() || found == parameters.end()) continue;
    auto shape = row.stacked_shape;
    shape.insert(shape.begin(), static_cast<std::int64_t>(row.stacked.size()));
    const at::Tensor parts = found->second.view(shape);
    parameters.erase(found);
    for (std::size_t i = 0; i < row.stacked.size(); ++i) {
      parameters[row.stacked[i]] = parts.select(0, static_cast<std::int64_t>(i));
    }
  }
  return parameters;
}

/// One thread a rank: how many there are must not decide how sums are split.
void on_ranks(const Layout& layout, const std::function<void(World&)>& body) {
  const test::QuietOutput quiet;
  test::ranks(layout.ranks, layout.backend).run([&](World& world) {
    at::set_num_threads(1);
    body(world);
  });
}

}  // namespace

std::string to_string(const Layout& layout) {
  constexpr const char* kMicro[] = {"whole batch", "one row", "one row, each reduced"};
  return concat(layout.replicas, " x ", layout.ranks / layout.replicas, " ranks, ",
                layout.reshard_after_forward ? "reshard" : "no reshard", ", ",
                kMicro[static_cast<int>(layout.micro_batches)],
                layout.backend == ThreadBackend::kGloo ? ", gloo" : "");
}

train::Config config_for(const Layout& layout) {
  train::Config config;
  config.parallelism.data_parallel_replicate_degree = layout.replicas;
  config.parallelism.reshard_after_forward = layout.reshard_after_forward;
  if (layout.micro_batches != MicroBatches::kWhole) config.training.local_batch_size = 1;
  config.training.sync_every_micro_batch = layout.micro_batches == MicroBatches::kOneRowEachSync;
  config.precision.param_dtype.dtype = DType::kFloat32;
  return config;
}

Gradients run_gradients(train::Config config, const Layout& layout, const std::string& batch,
                        Routing routing) {
  train::GradientsRequest request;
  request.config = std::move(config);
  request.batch = batch;
  request.impose_routing = routing == Routing::kImposed;
  request.out = temporary_path("gradients.safetensors");
  on_ranks(layout, [&](World& world) { train::run_gradients(request, world); });
  Gradients gradients = read_gradients(request.out);
  std::filesystem::remove(request.out);
  return gradients;
}

Gradients run_gradients(const std::filesystem::path& model, const Layout& layout,
                        const std::string& batch) {
  auto config = config_for(layout);
  config.model.path = model;
  return run_gradients(config, layout, batch);
}

void expect_same_directions(const Gradients& found, const Reference& reference,
                            const std::function<bool(const std::string&)>& compared) {
  // 8 bits of mantissa: 2^-8 of a loss between 5 and 6, and rounding errors average out.
  EXPECT_NEAR(found.loss, reference.result("loss").item<double>(), 0.02);
  ASSERT_EQ(found.by_name.size(), reference.gradients().size());
  for (const auto& [name, expected] : reference.gradients()) {
    ASSERT_TRUE(found.by_name.contains(name)) << name;
    if (compared && !compared(name)) continue;
    EXPECT_LT(cosine_difference(found.by_name.at(name), expected),
              test::direction_bound(name, reference.bfloat16_bound()))
        << name;
  }
}

void expect_same_bits(const Gradients& found, const Gradients& expected) {
  EXPECT_EQ(found.loss, expected.loss);
  EXPECT_TRUE(test::same_bits(found.logits, expected.logits)) << "logits";
  expect_same_bits(found.by_name, expected.by_name);
}

void expect_same_row_sums(Gradients on_one_rank, Gradients on_several, Tied tied) {
  if (tied == Tied::kYes) {
    std::size_t erased = 0;
    for (const char* name : kTiedNames) {
      erased += on_one_rank.by_name.erase(name);
      on_several.by_name.erase(name);
    }
    EXPECT_EQ(erased, 1U);
  }
  expect_same_bits(on_one_rank, on_several);
}

TrainingRun run_training(train::Config config, const Layout& layout,
                         const std::set<std::int64_t>& keep_parameters_of) {
  const auto folder = temporary_path("run");
  std::filesystem::create_directories(folder);
  config.job.dump_folder = folder;
  config.metrics.folder = folder / "metrics";
  // Checkpoints only where a test has a folder for them.
  config.checkpoint.enable = std::filesystem::path(config.checkpoint.folder).is_absolute();
  TrainingRun run;
  run.regions.resize(static_cast<std::size_t>(layout.ranks));
  std::mutex mutex;
  on_ranks(layout, [&](World& world) {
    train::TrainingHooks hooks;
    hooks.after_step = [&](const train::StepMetrics& metrics, const ShardedBase& model) {
      if (world.rank() == 0) {
        run.losses.push_back(metrics.loss);
        run.norms.push_back(metrics.grad_norm);
      }
      run.regions[static_cast<std::size_t>(world.rank())] = replay_calls(model);
      if (!keep_parameters_of.contains(metrics.step)) return;
      // The first rank of each stage of a pipeline has that one's.
      const auto firsts = model.mesh().shapes().ranks_of(0, {axis::kPipeline});
      const bool first = std::ranges::count(firsts, world.rank()) > 0;
      model.visit_full_parameters([&](const std::string& name, const at::Tensor& parameter) {
        if (!first) return;
        const std::lock_guard lock(mutex);
        const auto [place, is_new] =
            run.parameters[metrics.step].emplace(name, parameter.detach().cpu().clone());
        // Each end of a tied pair has a gradient.
        EXPECT_TRUE(is_new || test::same_bits(place->second, parameter))
            << name << " of two stages";
      });
    };
    const auto result = train::run_training(config, world, hooks);
    if (world.rank() == 0) run.result = result;
  });
  const auto table = models::describe(train::open_model(config.model).spec).parameters;
  for (auto& [step, parameters] : run.parameters) {
    parameters = as_in_files(table, std::move(parameters));
  }
  std::ifstream lines(folder / "metrics" / "metrics.jsonl");
  for (std::string line; std::getline(lines, line);) run.lines.push_back(line);
  return run;
}

std::string to_string(OptimizerKind kind) { return kind == OptimizerKind::kSgd ? "sgd" : "adamw"; }

train::Config training_config(const Reference& reference, OptimizerKind kind,
                              const Layout& layout) {
  auto config = config_for(layout);
  config.model.path = data_folder(reference.name());
  config.data.path = {reference.batches()};
  config.training.steps = 6;       // five batches, then the first again
  config.training.max_norm = 0.0;  // no clipping
  // Otherwise a rank's rows come one by one.
  if (layout.micro_batches == MicroBatches::kWhole) config.training.local_batch_size = 2;
  if (kind == OptimizerKind::kSgd) {
    config.optimizer.name = train::OptimizerName::kSgd;
    config.optimizer.lr = 0.05;
  } else {
    config.optimizer.name = train::OptimizerName::kAdamW;
    config.optimizer.lr = 1e-3;
  }
  return config;
}

std::string batch_file(const models::ModelSpec& spec, std::int64_t rows, std::int64_t tokens) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  const auto ids = at::randint(0, spec.vocab_size - 1, {rows, tokens}, generator,
                               at::TensorOptions().dtype(at::kLong));
  auto labels = ids.clone();
  labels.view({-1}).slice(0, 3, rows * tokens, 5).fill_(-100);
  const auto path = temporary_path("batch.safetensors");
  SafetensorsWriter writer(path, {{"input_ids", DType::kInt64, {rows, tokens}},
                                  {"labels", DType::kInt64, {rows, tokens}}});
  const auto write = [&](const char* name, const at::Tensor& tensor) {
    writer.write(name, {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()});
  };
  write("input_ids", ids);
  write("labels", labels);
  writer.finish();
  return path;
}

}  // namespace tessera::golden
