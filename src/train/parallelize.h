// From a model without data to a sharded one with weights: the order in which a model is made
// parallel.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "base/hash.h"
#include "io/tensor_source.h"
#include "models/description.h"
#include "models/language_model.h"
#include "tessera/mesh.h"
#include "tessera/model_contract.h"
#include "tessera/shard.h"
#include "train/config.h"
#include "train/config_resolve.h"

namespace tessera::train {

/// What a model is read for, and contracts resolved: inference trains nothing, so nothing is
/// refused for its gradients.
using models::Purpose;

/// What the config's model section names: a folder with weights (Hugging Face's, or a checkpoint of
/// a run), or a config.json alone.
struct ModelSource {
  models::ModelSpec spec;
  models::ModelDescription description;        ///< of the whole model, adapters included
  std::shared_ptr<const TensorSource> folder;  ///< null from scratch
  /// The Hugging Face folder that the weights come from: this one, or the one that the run of a
  /// checkpoint began with; empty where training began from scratch.
  std::filesystem::path origin;
  /// Adapters beside the model, which is frozen then.
  LoraSpec lora;
  /// Where the adapters are trained already: a checkpoint of them (`folder` is the model they were
  /// trained beside), and what that model's tensors must be (tensors_hash).
  std::shared_ptr<const TensorSource> adapters;
  std::optional<Hash128> base_hash;
};
/// Reads no weight: whoever does verifies a checkpoint's files (verify_weights). A checkpoint of
/// adapters brings the model they were trained beside along. Errors: kIo, kFormat, kConfig: see
/// HfFolder, CheckpointFolder, models::parse_spec and models::plan_lora.
ModelSource open_model(const ModelConfig& model, const LoraRequest& lora = {},
                       Purpose purpose = Purpose::kTraining);

/// The contract of every parameter (once where it is tied), buffer and unit, in the order of the
/// model. Pure but for the headers of the folder. Errors: kContract, kConfig naming the parameter
/// and the key; kFormat for a tensor of the folder that is not floating.
ModelContract resolve_model(const ModelSource& source, const Config& config,
                            const ParallelDims& dims, Purpose purpose = Purpose::kTraining);

/// Where the values of the parameters come from.
enum class InitialWeights : std::uint8_t {
  kOfSource,  ///< the folder, or drawn where there is none
  kLater,     ///< left unset for the caller to fill (a checkpoint)
};

/// What is there before ranks share it: a model of this rank's sizes without data, and what the
/// whole of it is.
struct ModelParts {
  ModelContract contract;
  std::shared_ptr<models::LanguageModel> model;
};
/// Collective on first use of an axis. Errors: as resolve_model.
ModelParts model_parts(const ModelSource& source, const Config& config, const Mesh& mesh);

/// Collective. The units: models::LanguageModel::units; what is left belongs to the root. Weights
/// are loaded from the folder, whose files are verified before, each on one rank, or drawn;
/// buffers, and the frozen model beside adapters, are loaded in any case. Errors, on all ranks
/// alike: kFormat naming the file; kConfig for another model than the adapters were trained beside.
std::shared_ptr<Sharded<models::LanguageModel>> parallelize(
    const ModelSource& source, const Config& config, const Mesh& mesh,
    InitialWeights weights = InitialWeights::kOfSource);
/// The same of given parts. Errors: kContract where a layer declares another placement than its
/// contract has.
std::shared_ptr<Sharded<models::LanguageModel>> parallelize(
    ModelParts parts, const ModelSource& source, const Config& config, const Mesh& mesh,
    InitialWeights weights = InitialWeights::kOfSource);

/// The dense reading of the ranks, and the sparse one of experts.
MeshShapes mesh_shape(const ParallelDims& dims);

/// Which of the data ranks (ParallelDims::data_ranks) this one is.
int data_rank(const Mesh& mesh);

}  // namespace tessera::train
