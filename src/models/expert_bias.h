// The bias on the choice of experts in the layers of a model that has just been made.
//
// A buffer [E] fp32 a layer with experts, `expert_bias` of the module that chooses them
// (`model.layers.N.mlp`, Gemma 4's `model.language_model.layers.N.router`), zeros to begin with.
// Families have none of their own and files of Hugging Face hold none: training with
// model.load_balance_coeff adds it, and our checkpoints keep it. Next: ../moe/routing.h, which
// makes the next one.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "models/description.h"

namespace tessera::models {

class LanguageModel;

/// Of a module that chooses experts, besides torch::nn::Module.
class HasExpertBias {
 public:
  static constexpr const char* kName = "expert_bias";
  /// Of a buffer, with the module's.
  static bool is_name(std::string_view buffer) {
    return buffer.substr(buffer.rfind('.') + 1) == kName;
  }

  explicit HasExpertBias(std::int64_t num_experts) : num_experts_(num_experts) {}
  virtual ~HasExpertBias() = default;

  /// `self` is this module.
  void add_expert_bias(torch::nn::Module& self);
  std::int64_t num_experts() const { return num_experts_; }

 protected:
  /// [E] fp32, or undefined.
  const at::Tensor& expert_bias() const { return expert_bias_; }

 private:
  std::int64_t num_experts_;
  at::Tensor expert_bias_;
};

/// One a layer with experts, in their order; none for models without experts.
std::vector<BufferSpec> expert_biases(const ModelSpec& spec);

/// Before the model is sharded.
void add_expert_biases(LanguageModel& model);

}  // namespace tessera::models
