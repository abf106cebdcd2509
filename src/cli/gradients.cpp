#include "train/gradients.h"

#include <algorithm>
#include <array>
#include <iostream>
#include <string_view>
#include <tuple>

#include "base/log.h"
#include "cli/arguments.h"
#include "cli/program_end.h"
#include "cli/ranks.h"
#include "cli/report_json.h"
#include "io/atomic_file.h"
#include "tessera/error.h"
#include "train/config/config_resolve.h"
#include "train/hf/model_source.h"
#include "train/precision/precision_report.h"
#include "train/precision/precision_what_if.h"
#include "train/small/diff_runs.h"

namespace tessera::cli {
namespace {

/// Refuses keys that the policies of a search set.
void refuse_searched_keys(const Overrides& overrides) {
  constexpr std::array<std::string_view, 3> kSearched{"precision.param_dtype",
                                                      "precision.reduce_dtype", "precision.rule"};
  for (const auto& [key, value] : overrides) {
    TESSERA_CHECK(std::ranges::find(kSearched, key) == kSearched.end(), ErrorKind::kUsage, "--",
                  key,
                  ": found a value with --precision-what-if, which sets the key itself; "
                  "leave one of them out");
  }
}

void write_report(const GradientsArguments& arguments, const train::WhatIfReport& report) {
  const bool wants_json = arguments.json || !arguments.out.empty();
  const std::string json = wants_json ? train::to_json(report) : "";
  if (!arguments.out.empty()) {
    train::open_as("--out", [&] { write_atomically(arguments.out, std::string_view(json)); });
  }
  std::cout << (arguments.json ? json : train::to_text(report));
  check_standard_output();
}

/// Before anything runs: a report takes its time.
void refuse_unwritable(const GradientsArguments& arguments, const train::Config& config) {
  train::refuse_overwriting_inputs(
      {.config = config, .batch = arguments.batch, .out = arguments.out});
  try_output("--out", arguments.out);
}

int run_what_if(const GradientsArguments& arguments, const train::Config& config) {
  refuse_searched_keys(arguments.overrides);
  train::WhatIfRequest request{.config = config,
                               .batch = arguments.batch,
                               .bound = arguments.bound.value_or(train::kDefaultBound),
                               .impose_routing = arguments.impose_routing};
  if (!arguments.out.empty()) refuse_unwritable(arguments, config);
  return run_ranks(config, arguments.nproc, [&](World& world, RunPhase& phase) {
    log::init({.rank = world.rank(), .world_size = world.size(), .file = {}});
    train::take_newest_checkpoint(request.config.model, world, "--model");
    const auto report = train::precision_what_if(request, world, [&phase] { phase.begin_steps(); });
    if (world.rank() == 0) write_report(arguments, report);
  });
}

/// A TOML file as a side of a comparison.
train::DiffSide side_of(const std::string& file, const GradientsArguments& arguments) {
  train::DiffSide side{file, train::open_as("--diff", [&] { return train::load_config(file); })};
  if (!arguments.model.empty()) side.config.model.path = arguments.model;
  apply(arguments.overrides, side.config);
  train::validate(side.config, train::Verb::kGradients);
  side.config.model.path = train::newest_checkpoint(side.config.model.path, "--model");
  return side;
}

int run_diff(const GradientsArguments& arguments) {
  const auto& [a, b] = std::tie(arguments.diff.at(0), arguments.diff.at(1));
  const check::GradientDiff diff =
      arguments.diffs_files()
          ? train::diff_files(a, b)
          : train::diff_runs(side_of(a, arguments), side_of(b, arguments), arguments.batch);
  return print_found(arguments.json ? json_text(diff) : to_string(diff),
                     diff.is_right() ? kDone : kFoundProblems);
}

}  // namespace

int run_gradients(const GradientsArguments& arguments) {
  if (!arguments.diff.empty()) return run_diff(arguments);
  train::GradientsRequest request;
  request.config.model.path = arguments.model;
  apply(arguments.overrides, request.config);
  train::validate(request.config, train::Verb::kGradients);
  if (arguments.precision_what_if) return run_what_if(arguments, request.config);
  request.batch = arguments.batch;
  request.out = arguments.out;
  request.logits = !arguments.no_logits;
  request.impose_routing = arguments.impose_routing;
  return run_ranks(request.config, arguments.nproc, [&](World& world, RunPhase& phase) {
    log::init({.rank = world.rank(), .world_size = world.size(), .file = {}});
    train::take_newest_checkpoint(request.config.model, world, "--model");
    train::run_gradients(request, world, [&phase] { phase.begin_steps(); });
  });
}

}  // namespace tessera::cli
