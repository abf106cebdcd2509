// From found parameters to contracts and units: the steps of fully_shard that are not about order.
#pragma once

#include <memory>
#include <vector>

#include "fsdp/collect.h"
#include "fsdp/unit.h"
#include "tessera/contract.h"
#include "tessera/mesh.h"
#include "tessera/shard.h"

namespace tessera::fsdp {

/// One contract a parameter: looked up in options.contracts, else resolved from the policy.
std::vector<GradContract> contracts_of(const std::vector<FoundParameter>& parameters,
                                       const Mesh& mesh, const PrecisionPolicy& policy,
                                       const ShardOptions& options);

/// Errors: kConfig for a contract that cannot be run yet.
void require_built(const GradContract& contract);

/// The data axes of a mesh and the divide factor (none: the number of data ranks).
ReductionPlan data_reductions(const Mesh& mesh, std::optional<double> divide_factor);

std::vector<std::unique_ptr<Parameter>> make_parameters(const std::vector<FoundParameter>& found,
                                                        const std::vector<GradContract>& contracts);

/// Parameters that several units below use move to `ancestor`, which they then need. Collective.
void move_shared(Unit& ancestor, const std::vector<Unit*>& below);
/// Buckets below `bytes` move to `ancestor`. Collective.
void move_small(Unit& ancestor, const std::vector<Unit*>& below, std::int64_t bytes);

}  // namespace tessera::fsdp
