// From a model without data to a sharded one with weights: the order in which a model is made
// parallel.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "models/language_model.h"
#include "tessera/mesh.h"
#include "tessera/model_contract.h"
#include "tessera/shard.h"
#include "train/config/config.h"
#include "train/config/config_resolve.h"
#include "train/contract_of_run.h"
#include "train/hf/model_source.h"
#include "train/pipeline/pipeline_plan.h"

namespace tessera::train {

/// Where the values of the parameters come from.
enum class InitialWeights : std::uint8_t {
  kOfSource,  ///< the folder, or drawn where there is none
  kLater,     ///< left unset for the caller to fill (a checkpoint)
  kNone,      ///< of a dry run, which has no values
};

/// The parts that are there before ranks share a model: one of this rank's sizes without data, and
/// the description of the whole.
struct ModelParts {
  ModelContract contract;
  std::shared_ptr<models::LanguageModel> model;
};
/// The contract is the whole model's, the model what `pipeline` gives to this rank; null = all of
/// it. Collective on first use of an axis. Errors: as resolve_model.
ModelParts model_parts(const ModelSource& source, const Config& config, const Mesh& mesh,
                       Purpose purpose = Purpose::kTraining,
                       const PipelinePlan* pipeline = nullptr);

/// Collective. The units: models::LanguageModel::units; what is left belongs to the root. Weights
/// are loaded from the folder, whose files are verified before, each on one rank, or drawn;
/// buffers, and the frozen model of adapters, are loaded in any case. Errors, on all ranks
/// alike: kFormat naming the file; kConfig for another model than the adapters were trained with.
std::shared_ptr<Sharded<models::LanguageModel>> parallelize(
    const ModelSource& source, const Config& config, const Mesh& mesh,
    InitialWeights weights = InitialWeights::kOfSource);
/// The same of given parts. Errors: kContract where a layer declares another placement than its
/// contract has.
std::shared_ptr<Sharded<models::LanguageModel>> parallelize(
    ModelParts parts, const ModelSource& source, const Config& config, const Mesh& mesh,
    InitialWeights weights = InitialWeights::kOfSource);

/// Which of the data ranks (ParallelDims::data_ranks) this one is.
int data_rank(const Mesh& mesh);

}  // namespace tessera::train
