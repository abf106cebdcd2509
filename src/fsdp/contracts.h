// Makes contracts and units from found parameters: the steps of fully_shard that are not about
// order.
#pragma once

#include <memory>
#include <vector>

#include "fsdp/collect.h"
#include "fsdp/runtime/unit.h"
#include "tessera/mesh.h"
#include "tessera/model_contract.h"
#include "tessera/shard.h"

namespace tessera::fsdp {

/// Returns the prefix of names for an inner handle at `path`.
std::string prefix_of(const std::string& path, const ShardOptions& options);

/// Returns one contract for each parameter and buffer, in their order, without units. They are
/// looked up in options.contracts and options.buffer_contracts and compared with the modules'
/// declarations, or resolved from the policy. `patterns_inside`: patterns of rules that inner
/// units' parameters match, since one policy for all units has those rules, too. Errors: kContract.
ModelContract contracts_of(const Found& found, const Mesh& mesh, const PrecisionPolicy& policy,
                           const ShardOptions& options,
                           const std::vector<std::string>& patterns_inside);

/// Returns the contract in options.unit_contracts that has options.name; none: it is resolved from
/// the policy. Errors: kContract.
std::optional<UnitContract> given_unit_contract(const ShardOptions& options);

/// Returns the reductions over the data axes of a mesh. `divide_factor`: none stands for the number
/// of data ranks.
ReductionPlan data_reductions(const Mesh& mesh, std::optional<double> divide_factor);

/// Returns the names of all that was found; none where the contracts came with them. Must be called
/// before an inner handle gets its prefix.
std::vector<Registered> registered_of(const Found& found, const ShardOptions& options);

/// `contracts`: one for each, in their order.
std::vector<Buffer> make_buffers(const std::vector<FoundBuffer>& found,
                                 const std::vector<BufferContract>& contracts,
                                 const ShardOptions& options);
/// Requires one dtype for a tensor that modules of several units have as a buffer: it is cast once.
/// Errors: kContract.
void check_shared_buffers(const std::vector<Unit*>& units);

/// `contracts`: one for each, in their order. `options` has their places in the whole model.
std::vector<std::shared_ptr<Parameter>> make_parameters(const std::vector<FoundParameter>& found,
                                                        const std::vector<GradContract>& contracts,
                                                        const ShardOptions& options);

/// Moves parameters that several units below use to `ancestor`, which these units then need.
/// Collective.
void move_shared(Unit& ancestor, const std::vector<Unit*>& below);
/// Moves buckets smaller than `bytes` to `ancestor`. Collective.
void move_small(Unit& ancestor, const std::vector<Unit*>& below, std::int64_t bytes);

}  // namespace tessera::fsdp
