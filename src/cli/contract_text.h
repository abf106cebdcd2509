// Prints what a run would agree on for a person: layers that are alike on one line, sizes in GiB.
//
// Values stay what they are: hashes and --json are of the whole contract and plan. Pure. Next:
// inspect.cpp.
#pragma once

#include <cstdint>
#include <string>

#include "layout/model_plan.h"
#include "tessera/model_contract.h"

namespace tessera::cli {

/// Parameters, buffers and units whose names differ by the layer's number alone, and which are
/// equal otherwise, as one in the place of the first: "model.layers.{0-2,5}.mlp.up_proj.weight
/// x 4".
ModelContract folded(const ModelContract& contract);

/// "80.0 GiB: fits, 3.10 GiB left", or how much is too much.
std::string fits_text(std::int64_t room, std::int64_t taken);

enum class Layers { kFolded, kAll };

/// A line a unit, two a bucket and one a parameter.
std::string plan_text(const layout::ModelPlan& plan, Layers layers);

}  // namespace tessera::cli
