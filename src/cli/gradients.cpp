#include "train/gradients.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <iostream>
#include <string_view>

#include "base/log.h"
#include "base/text/printable.h"
#include "cli/arguments.h"
#include "cli/ranks.h"
#include "io/atomic_file.h"
#include "tessera/error.h"
#include "train/config/config_resolve.h"
#include "train/hf/model_source.h"
#include "train/precision/precision_report.h"
#include "train/precision/precision_what_if.h"

namespace tessera::cli {
namespace {

/// What the policies of a search differ in is not for the user to set.
void refuse_searched_keys(const Overrides& overrides) {
  constexpr std::array<std::string_view, 3> kSearched{"precision.param_dtype",
                                                      "precision.reduce_dtype", "precision.rule"};
  for (const auto& [key, value] : overrides) {
    TESSERA_CHECK(std::ranges::find(kSearched, key) == kSearched.end(), ErrorKind::kUsage, "--",
                  key,
                  ": found a value beside --precision-what-if, which sets the key itself; "
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
}

/// Before anything runs: a report takes its time.
void refuse_unwritable(const GradientsArguments& arguments, const train::Config& config) {
  train::refuse_overwriting_inputs(
      {.config = config, .batch = arguments.batch, .out = arguments.out});
  const auto folder = std::filesystem::absolute(arguments.out).parent_path();
  TESSERA_CHECK(std::filesystem::is_directory(folder), ErrorKind::kUsage, "--out: found ",
                shown(arguments.out), ", whose folder does not exist, expected one that does");
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

}  // namespace

int run_gradients(const GradientsArguments& arguments) {
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
