// From found parameters to contracts and units: the steps of fully_shard that are not about order.
#pragma once

#include <memory>
#include <vector>

#include "fsdp/collect.h"
#include "fsdp/runtime/unit.h"
#include "tessera/mesh.h"
#include "tessera/model_contract.h"
#include "tessera/shard.h"

namespace tessera::fsdp {

/// The prefix of the names of a handle inside at `path`.
std::string prefix_of(const std::string& path, const ShardOptions& options);

/// One contract a parameter and a buffer, in their order: looked up in options.contracts and
/// options.buffer_contracts, and compared with what the modules declare, else resolved from the
/// policy. No units. `patterns_inside`: of the rules of units inside, which one policy for all units
/// has, too. Errors: kContract.
ModelContract contracts_of(const Found& found, const Mesh& mesh, const PrecisionPolicy& policy,
                           const ShardOptions& options,
                           const std::vector<std::string>& patterns_inside);

/// That of options.unit_contracts which has options.name; none = it is resolved from the policy.
/// Errors: kContract.
std::optional<UnitContract> given_unit_contract(const ShardOptions& options);

/// The data axes of a mesh and the divide factor (none: the number of data ranks).
ReductionPlan data_reductions(const Mesh& mesh, std::optional<double> divide_factor);

/// Names of all that was found; empty where the contracts came with them. Before a handle inside
/// gets its prefix.
std::vector<Registered> registered_of(const Found& found, const ShardOptions& options);

/// `contracts` of them, in their order.
std::vector<Buffer> make_buffers(const std::vector<FoundBuffer>& found,
                                 const std::vector<BufferContract>& contracts,
                                 const ShardOptions& options);
/// One tensor that modules of several units have as a buffer has one dtype, and is cast once.
/// Errors: kContract.
void check_shared_buffers(const std::vector<Unit*>& units);

/// `contracts` of them, in their order; `options` for their places in the whole model.
std::vector<std::shared_ptr<Parameter>> make_parameters(const std::vector<FoundParameter>& found,
                                                        const std::vector<GradContract>& contracts,
                                                        const ShardOptions& options);

/// Parameters that several units below use move to `ancestor`, which they then need. Collective.
void move_shared(Unit& ancestor, const std::vector<Unit*>& below);
/// Buckets below `bytes` move to `ancestor`. Collective.
void move_small(Unit& ancestor, const std::vector<Unit*>& below, std::int64_t bytes);

}  // namespace tessera::fsdp
