#include "train/gradients.h"

#include "base/log.h"
#include "cli/arguments.h"
#include "cli/ranks.h"
#include "train/config/config_resolve.h"
#include "train/hf/model_source.h"

namespace tessera::cli {

int run_gradients(const GradientsArguments& arguments) {
  train::GradientsRequest request;
  request.config.model.path = arguments.model;
  apply(arguments.overrides, request.config);
  train::validate(request.config, train::Verb::kGradients);
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
