// One layer of GPT-2: attention and an MLP, each after a LayerNorm and added to the stream. Its
// parts that no other family has: LayerNorm with a bias, and a linear layer whose matrix is [in,
// out].
//
// Short symbols: B rows, T positions, H heads of this rank, D their size. Next: gpt2_model.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "models/decoder_layer.h"
#include "models/description.h"
#include "models/model_axes.h"
#include "models/model_spec.h"
#include "nn/attention/attention.h"
#include "nn/parameter.h"
#include "nn/tensor_region.h"
#include "tessera/recompute_mode.h"

namespace tessera::models {

/// Subtracts the mean, divides by the deviation of all columns; weight and bias in fp32 at least,
/// rounded once.
class LayerNorm : public nn::PlacedModule {
 public:
  LayerNorm(std::int64_t size, double eps, const ParameterLayout& layout = {});
  /// x [..., K] -> [..., K] in x's dtype.
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight, bias;  ///< [K]

 private:
  double eps_;
};

/// x W + b with W [in, out], which is what files hold: transformers calls it Conv1D.
class TransposedLinear : public nn::PlacedModule {
 public:
  /// Sizes of this rank, and where they lie.
  struct Options {
    std::int64_t in = 0;
    std::int64_t out = 0;
    ParameterLayout weight = {};
    ParameterLayout bias = {};
    layout::FusedMatrices fused = {};
  };
  explicit TransposedLinear(const Options& options);
  /// x [..., in] -> [..., out] in x's dtype.
  at::Tensor forward(const at::Tensor& x);
  /// As nn::Linear::forward_into.
  at::Tensor forward_into(const nn::TensorRegion& region, torch::nn::Module& layer,
                          const std::vector<at::Tensor>& inputs,
                          std::function<at::Tensor(const std::vector<at::Tensor>&)> inside);

  at::Tensor weight;  ///< [in, out]
  at::Tensor bias;    ///< [out]
};

/// A rank's part of the outputs.
TransposedLinear::Options column_parallel(const nn::TensorRegion& region, std::int64_t in,
                                          std::int64_t out);
/// A rank's part of the inputs.
TransposedLinear::Options row_parallel(const nn::TensorRegion& region, std::int64_t in,
                                       std::int64_t out);

class Gpt2Attention : public nn::TokenMixer {
 public:
  Gpt2Attention(const ModelSpec& spec, const nn::TensorRegion& region, nn::ContextRegion context);
  using nn::TokenMixer::forward;
  at::Tensor forward(const at::Tensor& x, const nn::Documents& documents) override;
  at::Tensor decode(const at::Tensor& x, nn::KvCache& cache) override;

 private:
  /// As nn::causal_attention takes them.
  struct Heads {
    at::Tensor q, k, v;
  };
  Heads project(const at::Tensor& x);

  std::int64_t heads_;
  double scale_;
  nn::TensorRegion region_;
  nn::ContextRegion context_;
  std::shared_ptr<TransposedLinear> c_attn_, c_proj_;
};

/// gelu_tanh between two products.
class Gpt2Mlp : public torch::nn::Module {
 public:
  Gpt2Mlp(const ModelSpec& spec, const nn::TensorRegion& region);
  at::Tensor forward(const at::Tensor& x);

 private:
  nn::TensorRegion region_;
  std::shared_ptr<TransposedLinear> c_fc_, c_proj_;
};

class Gpt2Layer : public torch::nn::Module, public IsLayer, public Recomputable {
 public:
  Gpt2Layer(const ModelSpec& spec, std::int64_t number, const ModelAxes& axes);
  std::int64_t number() const override { return number_; }
  /// x [B, T, hidden] of the stream -> the same shape and dtype. Documents as
  /// nn::TokenMixer::forward.
  at::Tensor forward(const at::Tensor& x, const nn::Documents& documents = {});
  /// As nn::TokenMixer::decode.
  at::Tensor decode(const at::Tensor& x, nn::KvCache& cache);

 private:
  at::Tensor body(const at::Tensor& x, const nn::Documents& documents);

  std::int64_t number_;
  bool is_alone_;  // as DecoderLayer's
  std::shared_ptr<LayerNorm> ln_1_, ln_2_;
  std::shared_ptr<Gpt2Attention> attn_;
  std::shared_ptr<Gpt2Mlp> mlp_;
};

}  // namespace tessera::models
