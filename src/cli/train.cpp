#include <filesystem>
#include <iostream>

#include "base/log.h"
#include "cli/exit_code.h"
#include "cli/ranks.h"
#include "cli/run_folder.h"
#include "cli/stop_signal.h"
#include "cli/verbs.h"
#include "comm/failure_report.h"
#include "train/config_resolve.h"
#include "train/trainer.h"

namespace tessera::cli {

int run_train(const TrainArguments& arguments) {
  train::Config config = train::load_config(arguments.config_file);
  apply(arguments.overrides, config);
  train::validate(config, train::Verb::kTrain);
  if (arguments.print_config) {
    std::cout << train::to_toml(config);
    return kDone;
  }
  return run_ranks(config, arguments.nproc, [&](World& world, RunPhase& phase) {
    const RunFolder run_folder = prepare_run_folder(config, run_name(arguments.config_file), world);
    const train::Config& run = run_folder.config;
    const std::filesystem::path folder = *run.job.dump_folder;
    log::init({.rank = world.rank(),
               .world_size = world.size(),
               .file = folder / "logs" / concat("rank_", world.rank(), ".log")});
    log::info("run folder ", folder.string());
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
