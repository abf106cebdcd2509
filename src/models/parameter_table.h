// The parameters of a model as a value: names, global shapes, how they begin, who they belong to.
//
// The order is that of the modules (embedding, layers, final norm, head). A tied head stands in the
// table, as an alias of the embedding, but has no tensor of its own in a checkpoint. What ranks
// make of the shapes is not known here. Next: decoder.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/model_spec.h"
#include "nn/declaration.h"
#include "tessera/placement.h"

namespace tessera::models {

using nn::DecayClass;
using nn::InitKind;

struct ParameterSpec {
  std::string name;                      ///< Hugging Face's
  std::vector<std::int64_t> shape = {};  ///< global
  InitKind init = InitKind::kNormal;
  double init_std = 0.0;  ///< of kNormal (mean 0); of kUniform half the range around 0
  DecayClass decay = DecayClass::kMatrix;
  /// Name of the parameter whose storage this one shares, else empty.
  std::string tied_to = {};
  /// The tensors of the file that this one stacks along its first dims, in order, each as large as
  /// the others ("...experts.0.gate_proj.weight", "...experts.0.up_proj.weight", ...); empty = one
  /// of its own name.
  std::vector<std::string> stacked = {};
  /// Of each of them; the parameter's own where `stacked` is empty.
  std::vector<std::int64_t> stacked_shape = {};
  /// The block that is gathered together: "model.embed_tokens", "model.layers.3", "head".
  std::string unit = {};
  ParameterLayout layout = {};  ///< as its layer declares
  std::int64_t numel() const;
  bool operator==(const ParameterSpec&) const = default;
};

std::vector<ParameterSpec> parameter_table(const ModelSpec& spec);

/// The units of the table that are sharded on their own, in its order; all others belong to the
/// root: where the head is tied, embedding and head, and what is too small.
std::vector<std::string> sharding_units(const ModelSpec& spec);

/// A tensor of the checkpoint that is part of the forward and never trained. Every rank holds it
/// whole.
struct BufferSpec {
  std::string name;
  std::vector<std::int64_t> shape = {};
  InitKind init = InitKind::kZeros;  ///< kOnes or kZeros
  bool operator==(const BufferSpec&) const = default;
};

std::vector<BufferSpec> buffer_table(const ModelSpec& spec);

/// Where a model routes tokens to experts; no layers = nowhere.
struct RoutedExperts {
  std::int64_t experts = 0;
  std::int64_t experts_per_token = 0;
  std::vector<std::int64_t> layers = {};  ///< their numbers, ascending
};
RoutedExperts routed_experts(const ModelSpec& spec);

/// Elements that multiply each token of a text: none of an embedding or a vision tower, of experts
/// only those that a token goes to.
std::int64_t active_numel(const ModelSpec& spec, const ParameterSpec& row);

/// Elements of all parameters, a tied one counted once.
std::int64_t total_numel(const std::vector<ParameterSpec>& table);

}  // namespace tessera::models
