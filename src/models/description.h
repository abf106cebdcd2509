// ModelDescription: the parameters of a model as a value, read off the model itself, which is built
// without data.
//
// Layers declare each tensor where they register it (nn/declaration.h); names, order and units are
// those of the modules. Contracts, bucket plans, files and `inspect` follow this value: there is no
// second list. No torch in this header. Next: language_model.h for the units, adapters.h for
// adapters.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "models/adapters.h"
#include "models/model_spec.h"
#include "nn/declaration.h"
#include "tessera/placement.h"

namespace tessera::models {

class LanguageModel;
using nn::DecayClass;
using nn::InitKind;

/// The part of a model that a parameter belongs to.
enum class ModelPart : std::uint8_t {
  kLayers,
  kRouter,
  kExperts,
  kVision,  ///< turns images into embeddings, and sees no token
};
/// Base of modules whose parameters, those of inner modules included, belong to one part.
class IsModelPart {
 public:
  virtual ~IsModelPart() = default;
  virtual ModelPart part() const = 0;
};
/// Base of modules that are a layer of the text.
class IsLayer {
 public:
  virtual ~IsLayer() = default;
  virtual std::int64_t number() const = 0;  ///< in the whole model, from 0
};

struct ParameterSpec {
  std::string name;                      ///< Hugging Face's
  std::vector<std::int64_t> shape = {};  ///< global
  InitKind init = InitKind::kNormal;
  double init_std = 0.0;     ///< of kNormal (mean 0); of kUniform half the range around 0
  nn::StepRange steps = {};  ///< of kInverseSoftplus
  DecayClass decay = DecayClass::kMatrix;
  /// Name of the parameter whose storage this one shares, else empty.
  std::string tied_to = {};
  /// The tensors of the file that this one stacks along its first dims, in order, each as large as
  /// the others ("...experts.0.gate_proj.weight", "...experts.0.up_proj.weight", ...); empty = one
  /// of its own name.
  std::vector<std::string> stacked = {};
  /// The shape of each of them; the parameter's own where `stacked` is empty.
  std::vector<std::int64_t> stacked_shape = {};
  /// One of ModelDescription::units; empty = the root.
  std::string unit = {};
  ParameterLayout layout = {};  ///< beyond the data axes
  ModelPart part = ModelPart::kLayers;
  /// The layer of the text that it belongs to; none for embedding, norm, head, and the vision
  /// tower.
  std::optional<std::int64_t> layer = {};
  layout::FusedMatrices fused = {};  ///< of the last two dims
  std::int64_t numel() const {
    std::int64_t product = 1;
    for (const std::int64_t size : shape) product *= size;
    return product;
  }
  bool operator==(const ParameterSpec&) const = default;
};

/// A tensor of the checkpoint that is part of the forward and never trained. Every rank holds it
/// whole.
struct BufferSpec {
  std::string name;
  std::vector<std::int64_t> shape = {};
  InitKind init = InitKind::kZeros;  ///< kOnes or kZeros
  bool operator==(const BufferSpec&) const = default;
};

struct ModelDescription {
  /// In the order of the modules (embedding, layers, final norm, head), an adapter's after those of
  /// its layer. A tied head is among them, as an alias of the embedding, but has no tensor of its
  /// own in a checkpoint.
  std::vector<ParameterSpec> parameters;
  std::vector<BufferSpec> buffers;
  /// The modules that are sharded separately, in the order of forward; all other parameters belong
  /// to the root: where the head is tied, embedding and head, and small ones.
  std::vector<std::string> units;
  bool operator==(const ModelDescription&) const = default;
};

/// Describes a model that has just been made, whole or the part of a rank: shapes are the whole's.
ModelDescription describe(LanguageModel& model);

/// Describes the model that a rank of these degrees would make, without memory and without
/// communication. Errors: as check_degrees.
ModelDescription describe(const ModelSpec& spec, const LoraSpec& lora = {},
                          const ParallelDims& degrees = {});

/// Returns the names of the modules that hold one of these parameters, and of all around them.
std::set<std::string> module_names(const std::vector<ParameterSpec>& parameters);

/// Returns the number of elements that multiply each token of a text: none of an embedding or a
/// vision tower, of experts only those that a token goes to.
std::int64_t active_numel(const ModelSpec& spec, const ParameterSpec& row);

/// Returns the number of elements of all parameters, a tied one counted once.
std::int64_t total_numel(const std::vector<ParameterSpec>& parameters);

}  // namespace tessera::models
