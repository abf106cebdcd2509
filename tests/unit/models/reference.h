// A folder of tests/golden/data as tensors: a checkpoint, and what transformers computes from it.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "io/hf_folder.h"
#include "io/safetensors.h"
#include "models/decoder.h"
#include "models/description.h"
#include "models/gemma4/gemma4_model.h"
#include "models/language_model.h"

namespace tessera::models {

/// A copy of a tensor of the file, in the dtype it is stored in.
at::Tensor read_tensor(const SafetensorsFile& file, const std::string& name);

class Reference {
 public:
  /// `name`: "qwen3-fp32", ...
  explicit Reference(const std::string& name);

  const ModelSpec& spec() const { return spec_; }
  /// Reads a tensor of reference.safetensors.
  at::Tensor result(const std::string& name) const { return read_tensor(results_, name); }

  bool has_result(const std::string& name) const { return results_.header().find(name) != nullptr; }
  /// Every NAME of a "grad/NAME".
  std::vector<std::string> gradient_names() const;

  enum class Compute {
    kFloat32,   ///< everything widened
    kBFloat16,  ///< bf16, but what the checkpoint stores wider than its bulk stays as it is
  };
  /// The model with the checkpoint's weights, unsharded.
  std::shared_ptr<Decoder> model(Compute compute) const;
  /// The same of a gemma4 folder, its vision tower frozen.
  std::shared_ptr<Gemma4Model> gemma4(Compute compute) const;
  /// The same of a gpt2 folder.
  std::shared_ptr<LanguageModel> gpt2(Compute compute) const;

  /// The model of any family of text.
  std::shared_ptr<LanguageModel> text_model(Compute compute) const;

  /// A tensor of the checkpoint, as it is stored.
  at::Tensor stored(const std::string& name) const;

 private:
  /// A parameter of the model, out of the tensors that it stacks.
  at::Tensor stored(const ParameterSpec& row) const;
  void load(const torch::nn::Module& model, Compute compute) const;

  HfFolder folder_;
  SafetensorsFile results_;
  ModelSpec spec_;
};

/// The gradient of every trainable parameter of the checkpoint by the checkpoint's names, fp32: a
/// tied head's is added to its owner's. A parameter that got none throws.
std::map<std::string, at::Tensor> gradients(const torch::nn::Module& model, const ModelSpec& spec);

double largest(const at::Tensor& difference);

/// The gradients of the model are those of the reference, up to `bound` of each one's norm.
void expect_gradients(const torch::nn::Module& model, const Reference& reference, double bound);

/// They point the same way: 1 - cosine is below `bound`.
void expect_directions(const torch::nn::Module& model, const Reference& reference, double bound);

}  // namespace tessera::models
