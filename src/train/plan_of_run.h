// The part of a run's contract that follows from its model's description alone: what the family
// keeps in fp32, the units, and the bucket plan for any number of ranks.
//
// Pure: nothing is allocated and no rank is asked. parallelize.cpp makes the same units out of
// modules; that both plans are equal is tested for every layout, and their hashes can be compared
// (`inspect --contract` and the metadata of `gradients`). Next: layout/model_plan.h.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/model_plan.h"
#include "models/description.h"
#include "models/family.h"
#include "tessera/contract.h"
#include "tessera/model_contract.h"

namespace tessera::train {

/// Sets strict_pin and pin16 of the parameters and buffers that the family's patterns match.
/// Errors: kContract for a pattern that matches none: the family's table does not fit its own
/// models.
void apply_pins(const models::FamilyTraits& family, std::vector<ParameterMeta>& parameters,
                std::vector<BufferMeta>& buffers);

/// Buckets below this go to the root and are gathered once a step: a message costs as much as
/// moving this many bytes (docs/performance.md).
inline constexpr std::int64_t kMergeBelowBytes = std::int64_t{64} << 10;

/// The units of models::ModelDescription with the root in front, as the contract knows them: which
/// of `parameters` each has before small buckets merge. Our layers cast their inputs by themselves.
std::vector<UnitMeta> units_of(const models::ModelDescription& model,
                               const std::vector<ParameterMeta>& parameters);

/// In which memory buckets lie: on devices parameters are aligned to more bytes.
enum class BucketsOn : std::uint8_t { kHost, kDevice };
/// How buckets are laid out over the ranks of a mesh.
layout::PlanOptions plan_options(const MeshShapes& mesh, BucketsOn where = BucketsOn::kHost);

/// `contracts` as resolve_model gives them for `mesh`.
layout::ModelPlan plan_model(const models::ModelDescription& model,
                             const std::vector<GradContract>& contracts, const MeshShapes& mesh,
                             BucketsOn where = BucketsOn::kHost);

/// A hash of the plans of all ranks of a pipeline, by their place on its axis; of one alone its
/// own.
std::uint64_t stages_hash(const std::vector<std::uint64_t>& plans);

}  // namespace tessera::train
