// The gated MLPs, down(silu(gate(x)) * up(x)) and the same with GELU (in its tanh form), and the
// one without a gate, down(relu(up(x))^2). Next: gates.h, grouped_linear.h, ../moe/experts.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>

#include "nn/gates.h"
#include "nn/linear.h"
#include "nn/tensor_region.h"

namespace tessera::nn {

enum class Gate : std::uint8_t {
  kSilu,
  kGelu,
  kNone,  ///< relu_squared of up alone
};
/// Whether gate and up are two matrices or rows of one, "gate_up_proj".
enum class GateAndUp : std::uint8_t { kSeparate, kFused };

class Mlp : public torch::nn::Module {
 public:
  /// `intermediate_size` of this rank. Fused: the gate is SiLU.
  Mlp(std::int64_t hidden_size, std::int64_t intermediate_size, Bias bias = Bias::kNo,
      const TensorRegion& region = {}, Gate gate = Gate::kSilu,
      GateAndUp first = GateAndUp::kSeparate);
  /// x [..., hidden] of the stream -> the same shape and dtype.
  at::Tensor forward(const at::Tensor& x);
  /// x inside the region, on all ranks the same -> an addend of every rank, not yet summed. No bias
  /// of down_proj where there are several ranks.
  at::Tensor addend(const at::Tensor& x);

 private:
  ProductInput inner(const at::Tensor& x);

  TensorRegion region_;
  Gate gate_;
  std::shared_ptr<Linear> gate_proj_, up_proj_;  ///< null where they are one, or there is no gate
  std::shared_ptr<Linear> gate_up_proj_;         ///< null where they are separate
  std::shared_ptr<Linear> down_proj_;
};

class GegluMlp : public torch::nn::Module {
 public:
  /// `intermediate_size` of this rank.
  GegluMlp(std::int64_t hidden_size, std::int64_t intermediate_size,
           WeightName weight_name = WeightName::kOwn, const TensorRegion& region = {});
  /// x [..., hidden] of the stream -> the same shape and dtype.
  at::Tensor forward(const at::Tensor& x);

 private:
  TensorRegion region_;
  std::shared_ptr<Linear> gate_proj_, up_proj_, down_proj_;
};

}  // namespace tessera::nn
