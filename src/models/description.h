// ModelDescription: what a model is made of, as a value that is read off the model itself, built
// without data.
//
// Layers declare each tensor where they register it (nn/declaration.h); names, order and units are
// those of the modules. Contracts, bucket plans, files and `inspect` go by this: there is no second
// list. No torch in this header. Next: language_model.h for the units, adapters.h for adapters.
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

/// What of a model a parameter is part of.
enum class ModelPart : std::uint8_t {
  kLayers,
  kRouter,
  kExperts,
  kVision,  ///< turns images into embeddings, and sees no token
};
/// Of a module, besides torch::nn::Module, whose parameters, and of those inside it, are such a part.
class IsModelPart {
 public:
  virtual ~IsModelPart() = default;
  virtual ModelPart part() const = 0;
};
/// Of a module, besides torch::nn::Module, that is a layer of the text.
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
  /// Of each of them; the parameter's own where `stacked` is empty.
  std::vector<std::int64_t> stacked_shape = {};
  /// One of ModelDescription::units; empty = the root.
  std::string unit = {};
  ParameterLayout layout = {};  ///< beyond the data axes
  ModelPart part = ModelPart::kLayers;
  /// Of the text that it belongs to; none for embedding, norm, head, and what sees images.
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
  /// In the order of the modules (embedding, layers, final norm, head), an adapter's behind those
  /// of its layer. A tied head stands among them, as an alias of the embedding, but has no tensor
  /// of its own in a checkpoint.
  std::vector<ParameterSpec> parameters;
  std::vector<BufferSpec> buffers;
  /// Those that are sharded on their own, in the order of forward; what is in none of them belongs
  /// to the root: where the head is tied, embedding and head, and what is too small.
  std::vector<std::string> units;
  bool operator==(const ModelDescription&) const = default;
};

/// Of a model that has just been made, whole or the part of a rank: shapes are the whole's.
ModelDescription describe(LanguageModel& model);

/// Of the model that a rank of these degrees would make: no memory, no other rank is asked. Errors:
/// as check_degrees.
ModelDescription describe(const ModelSpec& spec, const LoraSpec& lora = {},
                          const ParallelDims& degrees = {});

/// Names of the modules that hold one of these parameters, and of all that stand around them.
std::set<std::string> module_names(const std::vector<ParameterSpec>& parameters);

/// Elements that multiply each token of a text: none of an embedding or a vision tower, of experts
/// only those that a token goes to.
std::int64_t active_numel(const ModelSpec& spec, const ParameterSpec& row);

/// Elements of all parameters, a tied one counted once.
std::int64_t total_numel(const std::vector<ParameterSpec>& parameters);

}  // namespace tessera::models
