// tessera train: the run in its folder.
#include <iostream>
#include <memory>
#include <string>

#include "base/log.h"
#include "cli/arguments.h"
#include "cli/program_end.h"
#include "cli/ranks.h"
#include "cli/run_folder.h"
#include "comm/failure_report.h"
#include "train/config/config_resolve.h"
#include "train/hf/model_source.h"
#include "train/trainer.h"

namespace tessera::cli {
namespace {

/// "tiny" of "configs/tiny.toml".
std::string run_name(const std::string& config_file) {
  const std::string stem = std::filesystem::path(config_file).stem().string();
  return stem.empty() ? "run" : stem;
}

}  // namespace

int run_train(const TrainArguments& arguments) {
  train::Config config = train::load_config(arguments.config_file);
  apply(arguments.overrides, config);
  train::validate(config, train::Verb::kTrain);
  if (arguments.print_config) {
    std::cout << train::to_toml(config);
    return kDone;
  }
  return run_ranks(config, arguments.nproc, [&](World& world, RunPhase& phase) {
    // Locked until nothing is left to remove.
    const auto run_folder = std::make_shared<RunFolder>();
    phase.when_refused([run_folder] { run_folder->made.remove(); });
    comm::when_refused(world, [&phase] { phase.refused(); });
    prepare_run_folder(config, run_name(arguments.config_file), world, *run_folder);
    train::Config& run = run_folder->config;
    log::init(
        {.rank = world.rank(), .world_size = world.size(), .file = log_file(run, world.rank())});
    train::take_checkpoint_of_run(run, world);
    const StopSignal stop;
    train::TrainingHooks hooks;
    hooks.on_first_step = [&] {
      if (world.rank() == 0) {
        world.work_at("writing config.toml");
        write_run_config(run);
      }
      phase.begin_steps();
    };
    hooks.stop_requested = [] { return StopSignal::requested(); };
    hooks.on_failure = [&](const std::exception& error) {
      if (world.size() > 1) comm::report_failure(&world, error, exit_code(error, phase.now()));
    };
    if (arguments.profile) hooks.profiling = train::Profiling::kYes;
    train::run_training(run, world, hooks);
  });
}

}  // namespace tessera::cli
