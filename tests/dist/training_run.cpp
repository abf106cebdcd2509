#include "dist/training_run.h"

#include <ATen/Parallel.h>

#include "base/log.h"
#include "support/quiet_output.h"
#include "support/ranks.h"
#include "train/config/config_resolve.h"

namespace tessera::test {
train::Config small_run(const TemporaryFolder& folder) {
  const auto model = folder.write("model.json", R"({"architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24, "hidden_act": "silu",
    "vocab_size": 259, "max_position_embeddings": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-06,
    "attention_bias": false, "tie_word_embeddings": true, "initializer_range": 0.02})");
  std::string text;
  for (int line = 0; line < 80; ++line) text += "line " + std::to_string(line * 37) + " of it.\n";
  train::Config config;
  config.model.config = model;
  config.data.path = {folder.write("page.txt", text)};
  config.training.steps = 12;
  config.training.seq_len = 12;
  config.training.global_batch_size = 12;  // for 1, 2, 3 and 4 ranks
  config.precision.param_dtype.dtype = DType::kFloat32;
  config.optimizer.lr = 0.01;
  config.optimizer.no_decay = {"*norm"};
  config.lr_scheduler.warmup_steps = 3;
  config.checkpoint.enable = false;
  config.checkpoint.interval = 1000;
  return config;
}

train::Config with_steps(train::Config config, std::int64_t steps) {
  config.training.steps = steps;
  config.checkpoint.enable = true;
  return config;
}

train::Config adapters_run(const TemporaryFolder& folder) {
  auto config = small_run(folder);
  if (!std::filesystem::exists(folder / "base")) {
    train_on({}, with_steps(config, 2), folder / "base");
  }
  config.model.config.clear();
  config.model.path = (folder / "base/checkpoint/step-2").string();
  config.precision.param_dtype.dtype = DType::kBFloat16;
  config.optimizer.no_decay.clear();
  config.lora = {.rank = 3,
                 .alpha = 6.0,
                 .targets = {"q_proj", "o_proj", "layers.1.mlp.down_proj"},
                 .dropout = 0.3};
  return config;
}

RunLosses train_on(const RanksOfRun& layout, train::Config config, const std::filesystem::path& run,
                   const HooksOf& hooks) {
  config.parallelism.data_parallel_replicate_degree = layout.replicas;
  std::filesystem::create_directories(run);
  config = train::resolved_for_run(config, run.string());
  RunLosses found;
  log::init({.rank = 1, .world_size = 1, .file = {}});  // only rank 0 says what it does
  const QuietOutput quiet;
  ranks(layout.ranks).run([&](World& world) {
    at::set_num_threads(1);  // how many there are must not decide how sums are split
    auto mine = hooks ? hooks(world) : train::TrainingHooks{};
    const auto after_step = mine.after_step;
    mine.after_step = [&, after_step](const train::StepMetrics& metrics, const ShardedBase& model) {
      if (world.rank() == 0) {
        found.losses.push_back(metrics.loss);
        found.norms.push_back(metrics.grad_norm);
      }
      if (after_step) after_step(metrics, model);
    };
    const auto result = train::run_training(config, world, mine);
    if (world.rank() == 0) found.result = result;
  });
  return found;
}

}  // namespace tessera::test
