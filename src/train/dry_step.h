// A step of a run on nobody's memory: what one rank of any number holds and sends.
//
// The model is made parallel and stepped by the code that a run uses, over a World of this thread alone
// (comm/dry_world.h) and on fake tensors (dry/fake_operations.h): nobody is started, no weight is read,
// and what a layer allocates is counted and not forecast. Two steps are made; the second one is what
// all others are like. Experts get as many tokens each. Next: parallelize.h, step.h.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/backends/dry/dry.h"
#include "fsdp/held_bytes.h"
#include "train/config/config.h"
#include "train/hf/model_source.h"

namespace tessera::train {

/// Bytes of one rank.
struct DryStep {
  fsdp::HeldBytes held = {};  ///< when gradients are complete; `unsharded`: the most of the step
  fsdp::OptimizerBytes optimizer = {};
  std::int64_t between_steps = 0;  ///< all that is held behind a step
  std::int64_t peak = 0;           ///< the most in a step, all that is held counted
  std::vector<comm::DryCollective> collectives = {};  ///< of the second step, in order of issue
};

/// Of rank `rank` of `ranks`. Errors: as train's, of configuration, contract and layout.
DryStep dry_step(const Config& config, const ModelSource& source, int rank, int ranks);

}  // namespace tessera::train
