// Whether a configuration's gradients are right, in which order its ranks issue what, whether a
// step fits and how long it takes: before a run starts. No weight is read, no rank is started.
#include "check/page.h"
#include "check/report.h"
#include "cli/arguments.h"
#include "cli/planned_machine.h"
#include "cli/program_end.h"
#include "cli/report_json.h"
#include "tessera/error.h"
#include "train/check/check_run.h"
#include "train/check/step_forecast.h"
#include "train/config/config_resolve.h"
#include "train/data/config_paths.h"
#include "train/data/data_files.h"
#include "train/dry/dry_batches.h"
#include "train/hf/model_source.h"
#include "train/plan_of_step.h"
#include "train/planned_steps.h"

namespace tessera::cli {

int run_check(const CheckArguments& arguments) {
  if (arguments.html) try_output("--html", *arguments.html, arguments.config_file);
  const check::Machine machine = machine_of(arguments.machine);
  train::Config config =
      train::open_as("CONFIG.toml", [&] { return train::load_config(arguments.config_file); });
  apply(arguments.overrides, config);
  take_device(arguments.machine, config);
  train::validate(config, train::Verb::kTrain);
  train::require_relative_paths(config, arguments.config_file, train::Verb::kContract);
  config = train::with_context_parts(std::move(config));
  const int world = arguments.world ? *arguments.world : train::ranks_to_spawn(config.parallelism);
  config.model.path = train::newest_checkpoint(config.model.path, "model.path");
  const auto source = train::open_as(train::model_key(config.model),
                                     [&] { return train::open_model(config.model, config.lora); });
  const ParallelDims dims = train::resolve_parallelism(config.parallelism, world);
  config = train::with_rows_of_data(std::move(config), source, dims);
  config = train::with_budget_in_bytes(
      config, train::memory_here(
                  config, world,
                  {.device_bytes = machine.memory, .ranks_per_host = machine.ranks_per_host}));
  const bool has_time = gives_time(machine, arguments.machine, config, world);
  auto checked = train::check_run(config, source, world, machine.memory,
                                  memory_from(machine, arguments.machine),
                                  train::read_expert_loads(arguments.expert_loads, source.spec));
  if (has_time) {
    train::forecast_step(config, source, world, machine, rates_from(machine, arguments.machine),
                         checked);
  }
  const check::Report& report = checked.report;
  const int code = print_found(arguments.json ? json_text(report) : to_string(report),
                               report.findings.empty() ? kDone : kFoundProblems);
  if (arguments.html) write_output("--html", *arguments.html, page_of(report));
  return code;
}

}  // namespace tessera::cli
