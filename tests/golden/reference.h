// The results of transformers for a folder of tests/golden/data, and the bounds of that data's
// README.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "support/tensors.h"

namespace tessera::golden {

// "Expected of a second fp32 implementation" in the data's README: 10 to 30 times the measured
// noise of fp32 against fp64, and far below what any wrong detail of a model makes.
inline constexpr double kLossBound = 5e-6;
inline constexpr double kGradientBound = 5e-5;  // relative L2
inline constexpr double kStepLossBound = 5e-5;
inline constexpr double kMovedBound = 1e-3;  // relative

using Tensors = std::map<std::string, at::Tensor>;

/// A copy, in the dtype it is stored in.
at::Tensor read_tensor(const SafetensorsFile& file, const std::string& name);

enum class Tied { kNo, kYes };  ///< the head is the embedding

class Reference {
 public:
  explicit Reference(const std::string& name);
  /// The one of a folder, opened once.
  static const Reference& of(const std::string& name);

  const std::string& name() const { return name_; }
  /// Routing weights 16 times as large make the noise of the full DeepSeek V2 larger.
  double logits_bound() const { return name_.starts_with("deepseek-v2-group") ? 1e-4 : 5e-5; }
  at::Tensor result(const std::string& name) const { return read_tensor(results_, name); }
  /// Every "grad/NAME" by NAME.
  const Tensors& gradients() const { return gradients_; }
  /// Every parameter of the checkpoint, widened to fp32; MXFP4 blocks unpacked, under their
  /// parameter's name. Stored causal masks (GPT-2's) are none.
  const Tensors& parameters() const { return parameters_; }
  std::vector<double> step_losses(const std::string& optimizer) const;
  Tied tied() const { return parameters_.contains("lm_head.weight") ? Tied::kNo : Tied::kYes; }
  /// L2 norm of a parameter's way over five steps.
  double moved(const std::string& parameter, const std::string& optimizer) const;
  /// How far from moved() another fp32 run may be. AdamW divides each element by the size of its
  /// own gradients: one that is as small as fp32's noise in them (key biases, to which softmax is
  /// nearly blind) goes by that much of a learning rate elsewhere, each step.
  double moved_bound(const std::string& parameter, const std::string& optimizer) const;
  /// Largest 1 - cosine allowed under bf16 compute: the larger of 0.01 and twice the worst
  /// recorded, three times that of qwen3-next.
  double bfloat16_bound() const;
  /// The folder's reference.safetensors: a file of batches too.
  std::string batches() const { return results_.path().string(); }

 private:
  std::string name_;
  SafetensorsFile results_;
  nlohmann::json summary_;
  Tensors gradients_;
  Tensors parameters_;
};

/// The folders of dense models.
inline const std::vector<std::string> kFolders{
    "qwen3-fp32",        "qwen3-mixed",   "llama-fp32",       "llama-mixed",
    "qwen2-fp32",        "qwen2-mixed",   "mistral-fp32",     "mistral-mixed",
    "olmo2-fp32",        "olmo2-mixed",   "gemma3-text-fp32", "gemma3-text-mixed",
    "granite-fp32",      "granite-mixed", "smollm3-fp32",     "smollm3-mixed",
    "phi3-fp32",         "phi3-mixed",    "phi4-mini-fp32",   "qwen3-5-text-fp32",
    "qwen3-5-text-mixed"};

/// Dense ones whose tensors have other names.
inline const std::vector<std::string> kGpt2Folders{"gpt2-fp32", "gpt2-mixed"};

/// Those of models with images and a mixture of experts.
inline const std::vector<std::string> kGemmaFolders{"gemma4-fp32", "gemma4-mixed"};

/// Those with a mixture of experts in the place of the MLP, and an auxiliary loss.
inline const std::vector<std::string> kMoeFolders{
    "gpt-oss-fp32", "gpt-oss-mixed", "gpt-oss-mxfp4",   "qwen3-moe-fp32",  "qwen3-moe-mixed",
    "mixtral-fp32", "mixtral-mixed", "qwen3-next-fp32", "qwen3-next-mixed"};

/// Those with latent attention and a mixture of experts, each of which is a tensor of the files.
inline const std::vector<std::string> kDeepseekFolders{
    "deepseek-v2-fp32", "deepseek-v2-mixed", "deepseek-v2-group-fp32", "deepseek-v2-group-mixed",
    "deepseek-v3-fp32", "deepseek-v3-mixed", "kimi-k2-fp32",           "kimi-k2-mixed"};

/// The folders with a mixture of experts and shared ones, without an auxiliary loss.
inline const std::vector<std::string> kSharedExpertFolders{"glm4-moe-fp32",    "glm4-moe-mixed",
                                                           "llama4-text-fp32", "llama4-text-mixed",
                                                           "nemotron-h-fp32",  "nemotron-h-mixed"};

/// Families with folders of both dtypes that `scripts/full families` goes through: all that
/// `scripts/full layouts` does not.
inline const std::vector<std::string> kLaterFamilies{
    "mixtral", "deepseek-v3", "glm4-moe",     "llama4-text", "gemma3-text", "olmo2",
    "gpt2",    "qwen2",       "mistral",      "granite",     "smollm3",     "phi3",
    "kimi-k2", "qwen3-next",  "qwen3-5-text", "nemotron-h"};

/// Whether names begin with "backbone." and layers have one part.
inline bool is_nemotron(const std::string& folder) { return folder.starts_with("nemotron"); }

/// Those of the lists above that have experts.
std::vector<std::string> folders_with_experts();

/// Those of the lists above.
const std::vector<std::string>& all_folders();

/// "qwen3_fp32": what GoogleTest allows in names.
std::string test_name(const std::string& folder);
inline std::string folder_name(const ::testing::TestParamInfo<std::string>& folder) {
  return test_name(folder.param);
}

/// The results that `tessera gradients` writes.
struct Gradients {
  double loss = 0;
  at::Tensor logits;
  Tensors by_name;
};
Gradients read_gradients(const std::filesystem::path& file);

/// Loss, logits and every gradient by name, none missing and none too many.
void expect_within_bounds(const Gradients& found, const Reference& reference);

using test::relative_error;
double cosine_difference(const at::Tensor& found, const at::Tensor& expected);

/// Same names and same values, dtype included. A zero equals a zero of the other sign: 0 + -0 is 0,
/// and how many ranks without rows add their zeros depends on the layout.
void expect_same_bits(const Tensors& found, const Tensors& expected);

}  // namespace tessera::golden
