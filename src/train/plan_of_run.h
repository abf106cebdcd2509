// The bucket plan of one of our models for any number of ranks, from its description and its
// contracts.
//
// Pure: nothing is allocated and no rank is asked. parallelize.cpp makes the same units out of
// modules; that both plans are equal is tested for every layout, and their hashes can be compared
// (`inspect --contract` and the metadata of `gradients`). Next: layout/model_plan.h.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/model_plan.h"
#include "models/description.h"
#include "tessera/model_contract.h"

namespace tessera::train {

/// Buckets below this go to the root and are gathered once a step: a message costs as much as
/// moving this many bytes (docs/performance.md).
inline constexpr std::int64_t kMergeBelowBytes = std::int64_t{64} << 10;

/// The units of models::ModelDescription with the root in front, as the contract knows them: which
/// of `parameters` each has before small buckets merge. Our layers cast their inputs by themselves.
std::vector<UnitMeta> units_of(const models::ModelDescription& model,
                               const std::vector<ParameterMeta>& parameters);

/// `contracts` as resolve_model gives them for `mesh`.
layout::ModelPlan plan_model(const models::ModelDescription& model,
                             const std::vector<GradContract>& contracts, const MeshShapes& mesh);

}  // namespace tessera::train
