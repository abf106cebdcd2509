// The bias on the choice of experts in the layers of a model that has just been made.
//
// A buffer [E] fp32 a layer with experts, zeros to begin with, moved by training with
// model.load_balance_coeff and by nothing else. Families whose router has one in their files
// (MoeSpec::has_stored_bias: DeepSeek V3, GLM 4.5) keep it there, `e_score_correction_bias` of the
// router, under every dtype and always in fp32. For the others such training adds `expert_bias` to
// the module that chooses experts (`model.layers.N.mlp`, Gemma 4's
// `model.language_model.layers.N.router`), which our checkpoints keep and files of Hugging Face do
// not hold. Next: ../moe/routing.h, which makes the next one.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "models/description.h"

namespace tessera::models {

class LanguageModel;

/// Base of modules that choose experts.
class HasExpertBias {
 public:
  static constexpr const char* kName = "expert_bias";
  static constexpr const char* kStoredName = "e_score_correction_bias";
  /// Whether it is the name of a stored buffer, prefixed by the module's.
  static bool is_stored_name(std::string_view buffer) {
    return buffer.substr(buffer.rfind('.') + 1) == kStoredName;
  }
  /// Whether it is a name of either kind.
  static bool is_name(std::string_view buffer) {
    return buffer.substr(buffer.rfind('.') + 1) == kName || is_stored_name(buffer);
  }

  explicit HasExpertBias(const MoeSpec& moe)
      : num_experts_(moe.num_experts), is_stored_(moe.has_stored_bias()) {}
  virtual ~HasExpertBias() = default;

  /// `self` is this module.
  void add_expert_bias(torch::nn::Module& self);
  std::int64_t num_experts() const { return num_experts_; }
  /// The router has one: none is added.
  bool is_stored() const { return is_stored_; }

 protected:
  /// [E] fp32, or undefined.
  const at::Tensor& expert_bias() const { return expert_bias_; }

 private:
  std::int64_t num_experts_;
  bool is_stored_;
  at::Tensor expert_bias_;
};

/// Returns the buffers that training adds, one a layer with experts, in their order; none for
/// models without experts, and for those that store them anyway.
std::vector<BufferSpec> expert_biases(const ModelSpec& spec);

/// Adds those. To be called before the model is sharded.
void add_expert_biases(LanguageModel& model);

}  // namespace tessera::models
