// Opens the model that the config's model section names: a folder with weights, Hugging Face's or a
// checkpoint of a run, or a config.json alone; and checks that it is the model that adapters were
// trained with: they mean nothing with another one. Next: weights.h.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/hash.h"
#include "io/tensor_source.h"
#include "models/description.h"
#include "models/language_model.h"
#include "models/model_spec.h"
#include "tessera/world.h"
#include "train/config/config.h"

namespace tessera::train {

/// The purpose for which a model is read, and contracts resolved: inference trains nothing, so
/// nothing is refused for its gradients.
using models::Purpose;

/// The model that the config's model section names: a folder with weights (Hugging Face's, or a
/// checkpoint of a run), or a config.json alone.
struct ModelSource {
  models::ModelSpec spec;
  models::ModelDescription description;        ///< of the whole model, adapters included
  std::shared_ptr<const TensorSource> folder;  ///< null from scratch
  /// Its tensors that are no part of the model, by its own names: what predicts or sees.
  std::vector<std::string> left_out;
  /// The Hugging Face folder that the weights come from: this one, or the one that the run of a
  /// checkpoint began with; empty where training began from scratch.
  std::filesystem::path origin;
  /// Adapters of the model, which is frozen then.
  LoraSpec lora;
  /// Where the adapters are trained already: a checkpoint of them (`folder` is the model they were
  /// trained with), and what that model's tensors must be (tensors_hash).
  std::shared_ptr<const TensorSource> adapters;
  std::optional<Hash128> base_hash;
};
/// Reads no weight: a caller that does verifies a checkpoint's files (verify_weights). A checkpoint
/// of adapters brings the model that they were trained with. Errors: kIo, kFormat, kConfig: see
/// HfFolder, CheckpointFolder, models::parse_spec and models::plan_lora.
ModelSource open_model(const ModelConfig& model, const LoraRequest& lora = {},
                       Purpose purpose = Purpose::kTraining);

/// Where `path` is a RUN folder, or one of checkpoints: its latest checkpoint, which is logged with
/// the `key` that asked for it. Else `path`. Errors: kIo, kFormat for a RUN without a whole one.
std::string newest_checkpoint(const std::string& path, std::string_view key);
/// The same of model.path, on all ranks as rank 0 finds it: the run may still be saving.
/// Collective. Errors: on all ranks alike.
void take_newest_checkpoint(ModelConfig& model, World& world, std::string_view key);
/// The same of the model.path of a run in its folder. One that resumes from a checkpoint keeps the
/// step that it began with, which its own config.toml has. Collective. Errors: on all ranks alike.
void take_checkpoint_of_run(Config& run, World& world);

/// The biases that balance experts (models/expert_bias.h) that the folder holds: all, or none.
std::vector<models::BufferSpec> stored_expert_biases(const TensorSource& folder,
                                                     const models::ModelSpec& spec);

/// XXH3-128 over every tensor's name, dtype, shape and bytes, by name: however the files are cut.
/// Reads them all, each on one rank. Collective. Errors: kIo, on all ranks alike.
Hash128 tensors_hash(const TensorSource& folder, World& world);

/// That source.folder is the model that source.base_hash says. Collective. Errors: kConfig, on all
/// ranks alike.
void check_base(const ModelSource& source, World& world);

}  // namespace tessera::train
