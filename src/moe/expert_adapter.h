// ExpertAdapter: a low-rank adapter of each expert, added to one frozen product of all experts.
//
// For the rows of expert e it computes y + scale * B_e (A_e x), as nn/linear.h does for one matrix:
// both products in the adapter's dtype, the sum rounded once to the result's. Rows are sorted by
// expert, so each product is a grouped one. A and B are [out, in] for every layout of the experts'
// matrices. There is no dropout: rows of experts know no position, and peft has none either.
// Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021). Short symbols: M
// rows, E experts of this rank, K inputs, N outputs, R rank. Next: experts.h,
// ../models/moe_layer.h, which places it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "nn/grouped_linear.h"
#include "nn/parameter.h"
#include "tessera/placement.h"

namespace tessera::moe {

/// Undefined tensors: none.
struct AdapterWeights {
  at::Tensor a = {};  ///< [E, R, K]
  at::Tensor b = {};  ///< [E, N, R]
  double scale = 1.0;
};

/// base [M, N], x [M, K] -> [M, N] in base's dtype. Gradients of an expert without rows are zeros.
/// a and b have one dtype; where it is not bf16, products need the begins of groups
/// (nn::needs_begins).
at::Tensor add_expert_adapter(const at::Tensor& base, const at::Tensor& x,
                              const AdapterWeights& adapter, const nn::RowGroups& groups);

/// The sizes on this rank.
struct AdapterSizes {
  std::int64_t experts = 0;
  std::int64_t in = 0;
  std::int64_t out = 0;
  std::int64_t rank = 0;
};

struct AdapterPlacement {
  ParameterLayout a = {};
  ParameterLayout b = {};
  /// the matrices fused in B, whose rows are the product's outputs
  layout::FusedMatrices fused = {};
};

/// Holds lora_A.weight and lora_B.weight, which begin as those of a linear layer.
class ExpertAdapter : public torch::nn::Module {
 public:
  ExpertAdapter(const AdapterSizes& sizes, const AdapterPlacement& placement, double scale);
  AdapterWeights weights() const { return {a_->weight, b_->weight, scale_}; }

 private:
  struct Factor : nn::PlacedModule {
    Factor(const std::vector<std::int64_t>& sizes, nn::Declaration declaration)
        : weight(add_parameter("weight", sizes, std::move(declaration))) {}
    at::Tensor weight;
  };

  double scale_;
  std::shared_ptr<Factor> a_, b_;
};

}  // namespace tessera::moe
