// A pipeline schedule of a kind or out of a file: its lists, whether they can run, how long they
// would take. A value is looked at, nothing runs.
#include "pipeline/schedule.h"

#include <algorithm>
#include <iomanip>
#include <iostream>
#include <limits>
#include <map>
#include <optional>
#include <string>

#include "base/mapped_file.h"
#include "base/text/printable.h"
#include "cli/arguments.h"
#include "cli/planned_machine.h"
#include "cli/program_end.h"
#include "pipeline/kinds.h"
#include "pipeline/picture.h"
#include "pipeline/schedule_csv.h"
#include "pipeline/simulate.h"
#include "pipeline/slot_trace.h"
#include "pipeline/validate.h"
#include "tessera/error.h"
#include "train/config/config_resolve.h"
#include "train/contract_of_run.h"
#include "train/data/config_paths.h"
#include "train/hf/model_source.h"
#include "train/pipeline/pipeline_plan.h"
#include "train/step_rates.h"

namespace tessera::cli {
namespace {

constexpr std::int64_t kMostCsvBytes = std::int64_t{64} << 20;
/// Bounds the exchanges of a micro-batch over all stages: far above any model, simulated in
/// seconds.
constexpr std::int64_t kMostExchangesInAll = std::int64_t{1} << 18;
constexpr std::int64_t kMostTraceBytes = std::int64_t{64} << 20;

/// The schedule that was asked for, with messages: those of its file, else those that follow.
struct Asked {
  std::string name;
  pipeline::Program program;
  bool own_messages = false;
};

bool is_file(const ScheduleArguments& arguments) { return arguments.schedule.ends_with(".csv"); }

Asked read_asked(const ScheduleArguments& arguments) {
  Asked asked{arguments.schedule, {}, false};
  asked.program = train::open_as("FILE.csv", [&] {
    return pipeline::parse_csv(read_text_file(arguments.schedule, kMostCsvBytes),
                               shown(arguments.schedule));
  });
  const auto ranks = static_cast<int>(asked.program.steps.size());
  TESSERA_CHECK(arguments.ranks.value_or(ranks) == ranks, ErrorKind::kUsage, "--ranks: found ",
                arguments.ranks.value_or(0), ", expected ", ranks, ", the rows of ",
                shown(arguments.schedule));
  const auto stages = static_cast<int>(asked.program.rank_of.size());
  TESSERA_CHECK(
      !arguments.stages_per_rank || std::int64_t{*arguments.stages_per_rank} * ranks == stages,
      ErrorKind::kUsage, "--stages-per-rank: found ", arguments.stages_per_rank.value_or(0),
      ", expected what makes ", stages, " stages on ", ranks, " ranks, as in ",
      shown(arguments.schedule));
  const int micro_batches = arguments.micro_batches.value_or(asked.program.micro_batches);
  TESSERA_CHECK(micro_batches >= 1 && micro_batches <= pipeline::kMostMicroBatches &&
                    std::int64_t{stages} * micro_batches <= pipeline::kMostCells,
                ErrorKind::kUsage, "--micro-batches: found ", micro_batches,
                ", expected at least 1 and, with ", stages, " stages, a product of at most ",
                pipeline::kMostCells);
  asked.program.micro_batches = micro_batches;
  asked.own_messages = pipeline::has_messages(asked.program);
  return asked;
}

Asked make_asked(const ScheduleArguments& arguments) {
  const pipeline::KindRow& row = pipeline::row_of(pipeline::kind_named(arguments.schedule));
  TESSERA_CHECK(arguments.ranks && arguments.micro_batches, ErrorKind::kUsage, "schedule ",
                row.name, ": found no ", arguments.ranks ? "--micro-batches" : "--ranks",
                ", expected --ranks P and --micro-batches M");
  const pipeline::Shape shape{*arguments.ranks,
                              arguments.stages_per_rank.value_or(row.stages_per_rank),
                              *arguments.micro_batches};
  return {std::string(row.name), lower(make_schedule(row.kind, shape)), false};
}

bool is_config(const std::string& path) { return path.ends_with(".toml"); }

bool gives_ms(const ScheduleArguments& arguments) {
  return arguments.machine.machine || arguments.machine.flops;
}

/// GFLOP, or ms of the described machine in the dtype in which most elements compute.
double cost_of_operation(const ScheduleArguments& arguments, const ModelContract& contract) {
  if (!gives_ms(arguments)) return 1e-9;
  const check::Machine machine = machine_of(arguments.machine);
  TESSERA_CHECK(machine.flops, ErrorKind::kConfig, "--machine: found no flops of ", machine.name,
                ", expected them: without them its times are not known; give --flops");
  return 1e3 / machine.flops->of(train::most_computed(contract));
}

/// Works out the costs of a micro-batch on a rank: a forward as the configuration's stages have it,
/// as many for the input gradients, with another forward where layers are recomputed, and for the
/// weight gradients.
pipeline::Costs costs_of_config(const std::string& path, const ScheduleArguments& arguments,
                                const pipeline::Schedule& schedule) {
  auto config = train::open_as("--costs-from", [&] { return train::load_config(path); });
  config.pipeline.schedule_file.clear();
  if (is_file(arguments)) {
    config.pipeline.schedule_file = arguments.schedule;
  } else {
    config.pipeline.schedule = arguments.schedule;
  }
  config.pipeline.stages_per_rank = arguments.stages_per_rank;
  config.pipeline.micro_batches = -1;
  config.parallelism.pipeline_parallel_degree = schedule.ranks();
  train::validate(config, train::Verb::kContract);
  train::require_relative_paths(config, path, train::Verb::kContract);
  TESSERA_CHECK(config.training.seq_len, ErrorKind::kConfig,
                "--costs-from: found no training.seq_len in ", shown(path),
                ", expected it: nothing else says how much a micro-batch computes");
  TESSERA_CHECK(schedule.ranks() > 1, ErrorKind::kUsage,
                "--costs-from: found a configuration with a schedule of one rank, expected at "
                "least two, over which stages are divided");
  config.model.path = train::newest_checkpoint(config.model.path, "model.path");
  const auto source = train::open_as(train::model_key(config.model),
                                     [&] { return train::open_model(config.model, config.lora); });
  const ParallelDims dims{.pp = schedule.ranks(),
                          .cp = config.parallelism.context_parallel_degree,
                          .tp = config.parallelism.tensor_parallel_degree};
  const double cost = cost_of_operation(arguments, train::resolve_model(source, config, dims));
  const auto plan = train::resolve_pipeline(
      config, dims, source.spec, source.description,
      {.micro_batches = schedule.micro_batches, .row_tokens = *config.training.seq_len});
  return train::stage_costs(*plan, config, dims.cp * dims.tp, cost);
}

std::optional<pipeline::Exchanges> exchanges_of(const ScheduleArguments& arguments, int stages) {
  if (arguments.exchanges.empty()) return std::nullopt;
  TESSERA_CHECK(!arguments.costs_from || is_config(*arguments.costs_from), ErrorKind::kUsage,
                "--exchanges: found with measured costs, which include them, expected "
                "--costs or --costs-from CONFIG.toml");
  TESSERA_CHECK(!arguments.costs_from || gives_ms(arguments), ErrorKind::kUsage,
                "--exchange-cost: found with costs in GFLOP, expected --machine or --flops, with "
                "which they are ms");
  const pipeline::Exchanges exchanges{arguments.exchanges.at(0), arguments.exchanges.at(1),
                                      arguments.layers, arguments.exchange_cost.value_or(0.0)};
  const std::int64_t pieces =
      std::int64_t{stages} * exchanges.layers * (exchanges.forward + exchanges.backward);
  TESSERA_CHECK(pieces <= kMostExchangesInAll, ErrorKind::kUsage, "--exchanges: found ",
                joined(arguments.exchanges), " in ", exchanges.layers, " layers of ", stages,
                " stages, ", pieces, " in all, expected at most ", kMostExchangesInAll);
  return exchanges;
}

pipeline::Costs costs_of(const ScheduleArguments& arguments, const pipeline::Schedule& schedule) {
  const auto exchanges = exchanges_of(arguments, schedule.stages());
  TESSERA_CHECK(!gives_ms(arguments) || is_config(arguments.costs_from.value_or("")),
                ErrorKind::kUsage, arguments.machine.machine ? "--machine" : "--flops",
                ": found with measured costs, expected --costs-from CONFIG.toml");
  pipeline::Costs costs(static_cast<std::size_t>(schedule.stages()));
  if (arguments.costs_from && is_config(*arguments.costs_from)) {
    costs = costs_of_config(*arguments.costs_from, arguments, schedule);
  } else if (arguments.costs_from) {
    costs = train::open_as("--costs-from", [&] {
      const std::string text = read_text_file(*arguments.costs_from, kMostTraceBytes);
      return pipeline::costs_from_trace(text, shown(*arguments.costs_from), schedule);
    });
  }
  for (pipeline::StageCosts& stage : costs) {
    if (!arguments.costs.empty()) {
      stage.forward = arguments.costs.at(0);
      stage.input_gradient = arguments.costs.at(1);
      stage.weight_gradient = arguments.costs.at(2);
      if (arguments.costs.size() > 3) stage.paired = arguments.costs.at(3);
    }
    if (exchanges) stage = with_exchanges(stage, *exchanges);
    // Counted in micro-batches: how large one is is not known here.
    stage.live_bytes = stage.deferred_bytes = 1.0;
  }
  return costs;
}

void print_findings(const Asked& asked, const pipeline::Validation& validation) {
  for (const pipeline::Finding& finding : validation.findings) {
    std::cout << to_string(finding.fault) << ": " << finding.text << '\n';
  }
  std::cout << printable(asked.name) << ": " << validation.findings.size() << " findings\n";
}

void print_times(const pipeline::Schedule& schedule, const pipeline::Simulated& simulated,
                 std::string_view unit) {
  std::cout << "\nmakespan " << simulated.makespan << unit << "\n\n"
            << "rank         busy         idle  idle %  live  deferred  open sends  stages\n";
  for (std::size_t rank = 0; rank < simulated.ranks.size(); ++rank) {
    const pipeline::SimulatedRank& one = simulated.ranks[rank];
    const double share = simulated.makespan > 0.0 ? 100.0 * one.idle / simulated.makespan : 0.0;
    std::cout << std::setw(4) << rank << std::setw(13) << one.busy << std::setw(13) << one.idle
              << std::setw(8) << std::fixed << std::setprecision(1) << share << std::defaultfloat
              << std::setprecision(6) << std::setw(6) << one.peak_live_chunks << std::setw(10)
              << one.peak_deferred_bytes << std::setw(12) << one.most_open_sends << "  "
              << joined(schedule.stages_of(static_cast<int>(rank))) << '\n';
  }
  std::cout
      << "\nthe most of each rank: live, micro-batches of all its stages from F to the end of W;"
         "\ndeferred, W that wait; open sends, not yet arrived\n";
}

/// The slot that takes longest of those that run a B with their F.
std::optional<pipeline::Slot> longest_pair(const pipeline::Schedule& schedule,
                                           const pipeline::Costs& costs) {
  std::optional<pipeline::Slot> longest;
  std::map<std::pair<int, int>, double> times;  // by the stages of F and B
  for (const auto& slots : schedule.slots) {
    for (const pipeline::Slot& slot : slots) {
      if (!slot.paired) continue;
      const auto [place, is_new] = times.try_emplace({slot.action.stage, slot.paired->stage});
      if (!is_new) continue;
      place->second = time_of(slot, costs).all;
      if (!longest || place->second > time_of(*longest, costs).all) longest = slot;
    }
  }
  return longest;
}

/// Prints the times of exchanges within stages: of the longest pair, and of each rank's step.
void print_exchanges(const pipeline::Schedule& schedule, const pipeline::Simulated& simulated,
                     const pipeline::Costs& costs, std::string_view unit) {
  if (const auto pair = longest_pair(schedule, costs)) {
    const pipeline::SlotTime time = time_of(*pair, costs);
    const pipeline::StageCosts& forward = costs.at(static_cast<std::size_t>(pair->action.stage));
    const pipeline::StageCosts& backward = costs.at(static_cast<std::size_t>(pair->paired->stage));
    std::cout << "\nlongest pair " << to_string(*pair) << ": " << time.all << unit << ", F "
              << forward.forward << " and B " << backward.of_backward()
              << " alone; of its exchanges " << time.hidden << " hidden, " << time.exposed
              << " exposed\nturns: "
              << to_string(pipeline::turns_of(forward.forward_pieces.size(),
                                              backward.backward_pieces.size()))
              << '\n';
  }
  std::cout << "\nrank       hidden      exposed\n";
  for (std::size_t rank = 0; rank < simulated.ranks.size(); ++rank) {
    const pipeline::SimulatedRank& one = simulated.ranks[rank];
    std::cout << std::setw(4) << rank << std::setw(13) << one.hidden_exchange << std::setw(13)
              << one.exposed_exchange << '\n';
  }
  std::cout << "\nhidden: time of exchanges under what else the rank does; exposed: it stands "
               "waiting for them\n";
}

/// Before anything runs: costs of a configuration take their time.
void try_outputs(const ScheduleArguments& arguments) {
  const std::string read = arguments.costs_from.value_or("");
  if (arguments.csv) try_output("--csv", *arguments.csv, read);
  if (arguments.svg) try_output("--svg", *arguments.svg, read);
  if (arguments.trace) try_output("--trace", *arguments.trace, read);
}

}  // namespace

int run_schedule(const ScheduleArguments& arguments) {
  try_outputs(arguments);
  const Asked asked = is_file(arguments) ? read_asked(arguments) : make_asked(arguments);
  const pipeline::Schedule schedule = schedule_of(asked.program);
  // Every finding is named: a file has no more than it has steps and stages.
  pipeline::Limits limits;
  limits.findings = std::numeric_limits<std::size_t>::max();
  // Without messages of its own a file's are made from lists that have to be right first.
  const pipeline::Validation validation =
      asked.own_messages ? validate(asked.program, limits) : validate(schedule, limits);
  if (!validation.valid()) {
    print_findings(asked, validation);
    return kFoundProblems;
  }
  const pipeline::Program program = asked.own_messages ? asked.program : lower(schedule);
  const pipeline::Costs costs = costs_of(arguments, schedule);
  const pipeline::Simulated simulated = simulate(program, costs);
  if (arguments.csv) {
    write_output("--csv", *arguments.csv,
                 arguments.csv_form == "compute_comms" ? to_csv(program) : to_csv(schedule));
  }
  if (arguments.svg) write_output("--svg", *arguments.svg, to_svg(schedule, simulated));
  if (arguments.trace) write_output("--trace", *arguments.trace, trace_of(schedule, simulated));
  std::cout << printable(asked.name) << ": " << schedule.ranks() << " ranks, " << schedule.stages()
            << " stages, " << schedule.micro_batches << " micro-batches\n";
  for (const std::string& remark : validation.remarks) std::cout << "note: " << remark << '\n';
  const bool in_ms = gives_ms(arguments) || !is_config(arguments.costs_from.value_or(".toml"));
  const std::string_view unit = in_ms ? " ms" : arguments.costs_from ? " GFLOP" : "";
  print_times(schedule, simulated, unit);
  if (!arguments.exchanges.empty()) print_exchanges(schedule, simulated, costs, unit);
  std::cout << '\n' << to_string(schedule);
  const int open_sends = fewest_open_sends(program);
  std::cout << "valid; no deadlock where sends are synchronous and a rank "
            << (open_sends == 0 ? "waits for each" : concat("has at most ", open_sends, " open"))
            << '\n';
  return kDone;
}

}  // namespace tessera::cli
