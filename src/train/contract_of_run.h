// The contracts of the parameters, buffers and units of a run's model: what its folder, its config
// and its layout say together. Next: grad/resolve.cpp, plan_of_run.h.
#pragma once

#include "tessera/dtype.h"
#include "tessera/mesh_shape.h"
#include "tessera/model_contract.h"
#include "train/config/config_resolve.h"
#include "train/hf/model_source.h"

namespace tessera::train {

/// The contract of every parameter (once where it is tied), buffer and unit, in the order of the
/// model. For inference every parameter is frozen and whole on every rank in its compute dtype,
/// regardless of config and rules. Pure but for the headers of the folder. Errors: kContract,
/// kConfig naming the parameter and the key; kFormat for a tensor of the folder that is not
/// floating.
ModelContract resolve_model(const ModelSource& source, const Config& config,
                            const ParallelDims& dims, Purpose purpose = Purpose::kTraining);

enum class SaysDifferences : std::uint8_t { kNo, kYes };
/// Compares with the lock that contract.lock names; without one nothing is compared. `says`:
/// whether the lines that differ are logged, up to forty. Errors: kContract with the first of them;
/// kFormat for a file that is no lock; kIo.
void require_locked(const Config& config, const ModelContract& contract, SaysDifferences says);

/// The dense reading of the ranks, and the sparse one of experts.
MeshShapes mesh_shape(const ParallelDims& dims);

}  // namespace tessera::train
