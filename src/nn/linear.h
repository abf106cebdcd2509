// Linear: x W^T + b, computed in the weight's dtype, returned in the input's; with an adapter its
// part is added. Where ranks share it, sizes are those of one rank. An input that is a gate is
// formed again in backward (gates.h).
//
// ../grad/weight_gradient.h says when the gradient of its weight is formed; a head's is at once.
//
// An adapter is y + scale * B(A(dropout(x))), two thin matrices added to a frozen one. The product
// is computed in the adapter's dtype and the sum rounded once to the layer's result dtype, as peft
// does. Dropout takes no generator: which elements are dropped follows from (seed, step, layer, row
// of the global batch, position, column of the whole input), so it is the same under every layout
// and in recomputation. Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models"
// (2021).
//
// Short symbols: B rows, T positions, K inputs, N outputs, R rank. Next: rms_norm.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/random.h"
#include "grad/weight_gradient.h"
#include "nn/gates.h"
#include "nn/parameter.h"
#include "nn/tensor_region.h"

namespace tessera::nn {

struct LoraOptions {
  std::int64_t rank = 0;
  double scale = 1.0;
  double dropout = 0.0;    ///< in [0, 1): of the adapter's input, while a SampleScope lives
  std::string layer = {};  ///< its name in the model, by which dropout is drawn
  /// The first column of x among those of the layer's whole input, of which ranks may have a part
  /// each.
  std::int64_t first_column = 0;
};

/// base [..., N], x [..., K], a [R, K], b [N, R] -> [..., N] in base's dtype. Where dropout is
/// drawn x is [B, T, K].
at::Tensor add_adapter(const at::Tensor& base, const at::Tensor& x, const at::Tensor& a,
                       const at::Tensor& b, const LoraOptions& options);

/// The elements that one forward drops, as a value.
struct DropoutDraw {
  double probability = 0.0;
  std::uint64_t stream = 0;  ///< of seed, step and layer
  std::int64_t first_row = 0;
  std::int64_t first_column = 0;
  /// As SamplePlace has it.
  std::shared_ptr<const std::vector<std::int64_t>> places = nullptr;
};
DropoutDraw dropout_draw(const LoraOptions& options, const SamplePlace& place);

/// 0 for an element that is dropped, else 1 / (1 - probability): [B, T, K], drawn on `device`, the
/// same on every one (dropout.cpp).
at::Tensor dropout_factors(const DropoutDraw& draw, const std::vector<std::int64_t>& shape,
                           at::ScalarType dtype, at::Device device = at::kCPU);

/// x [..., K], weight [N, K], bias [N] or undefined -> [..., N] in x's dtype. Computed in `compute`
/// (none: the weight's dtype), which raw gradients have, too: nothing rounds them before the sink.
at::Tensor linear(const ProductInput& x, const at::Tensor& weight, const at::Tensor& bias = {},
                  std::optional<at::ScalarType> compute = std::nullopt,
                  grad::WeightGradient when = grad::WeightGradient::kMayWait);

enum class Bias : std::uint8_t { kNo, kYes };

/// The placement of a layer's matrix on the tensor-parallel axis, and of an adapter's matrices.
struct LinearPlacement {
  ParameterLayout weight = {};
  ParameterLayout bias = {};
  ParameterLayout lora_a = {};
  ParameterLayout lora_b = {};
  int input_part =
      0;  ///< which of the equal parts of its inputs a rank has; 0 also for all of them
  layout::FusedMatrices fused = {};  ///< of the weight, and of an adapter's second factor
};
LinearPlacement column_parallel(const TensorRegion& region);  ///< x Replicate -> a part of y
/// As column_parallel, of several products in one, with so many outputs of all ranks each.
LinearPlacement side_by_side(const TensorRegion& region, const std::vector<std::int64_t>& outputs);
LinearPlacement row_parallel(const TensorRegion& region);  ///< a part of x -> an addend of y
/// x and y Replicate, gradients Partial: for what is small, or has no dim to cut.
LinearPlacement inside(const TensorRegion& region);
/// As column_parallel, by heads that may be fewer than the ranks.
LinearPlacement by_heads(const TensorRegion& region, std::int64_t heads);

class Linear : public PlacedModule {
 public:
  Linear(std::int64_t in_features, std::int64_t out_features, Bias with_bias = Bias::kNo,
         LinearPlacement placement = {});
  at::Tensor forward(const ProductInput& x);
  /// Row parallel: x a part of the inputs -> the stream of `region`. The first rank's addend has
  /// the bias. This is the last product of `layer`, which computes x between two transitions as
  /// inside(inputs), from its inputs and its own parameters alone. Where ranks share the region,
  /// inside() is replayed with this product, if anything is; otherwise a larger region that
  /// contains them may be.
  at::Tensor forward_into(const TensorRegion& region, torch::nn::Module& layer,
                          const std::vector<at::Tensor>& inputs,
                          std::function<ProductInput(const std::vector<at::Tensor>&)> inside);

  /// Declares also an adapter that is added later.
  void declare_all(const ParameterLayout& layout) override;

  /// The one matrix [out, in] that forward multiplies by, an adapter's part included, in x's dtype.
  /// For a decode that multiplies in another order; no gradient.
  at::Tensor whole_weight(at::ScalarType dtype) const;

  /// For a head: the gradient of its weight (not of an adapter's) is never deferred.
  void form_weight_gradient_at_once() { when_ = grad::WeightGradient::kAtOnce; }

  /// Adds the parameters lora_A.weight [rank, in] and lora_B.weight [out, rank], before sharding.
  void add_adapter(const LoraOptions& options);

  at::Tensor weight;  ///< [out, in]
  at::Tensor bias;    ///< [out] or undefined

 private:
  /// With an adapter's part.
  at::Tensor product(const ProductInput& input, const at::Tensor& with_bias) const;

  LinearPlacement placement_;
  grad::WeightGradient when_ = grad::WeightGradient::kMayWait;
  std::shared_ptr<Linear> lora_a_, lora_b_;  // null without an adapter; hold parameters only
  LoraOptions lora_;
};

/// Where a projection's weight stands in the names of a model.
enum class WeightName : std::uint8_t {
  kOwn,    ///< "q_proj.weight"
  kInner,  ///< "q_proj.linear.weight", as in Gemma 4's vision tower
};

struct Projection {
  std::int64_t in = 0;
  std::int64_t out = 0;
  WeightName weight_name = WeightName::kOwn;
  LinearPlacement placement = {};
};

/// A Linear without bias that is registered under `name` of `parent`.
std::shared_ptr<Linear> add_projection(torch::nn::Module& parent, const std::string& name,
                                       const Projection& projection);

}  // namespace tessera::nn
