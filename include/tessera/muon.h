// MuonOptions: Muon over the shards of a handle orthogonalizes whole matrices; AdamW steps the
// rest.
//
// Options as values; optim.h declares make_muon(), which takes them. Pure. Next: optim.h.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/optimizer_rule.h"

namespace tessera {

/// The factor of the learning rate of a matrix, by its rows and columns. Source: torch.optim.Muon,
/// adjust_lr_fn.
enum class AdjustLr : std::uint8_t {
  kOriginal,       ///< sqrt(max(1, rows / columns))
  kMatchRmsAdamw,  ///< 0.2 sqrt(max(rows, columns)), for learning rates as AdamW takes them
};

/// The dtype of the products in Newton-Schulz iterations; float64 matrices are iterated in float64.
enum class IterationDType : std::uint8_t {
  kFloat32,   ///< float32
  kBFloat16,  ///< as torch.optim.Muon; within 5 % of float32's result, in the Frobenius norm
};

/// Options of make_muon().
struct MuonOptions {
  double lr = 1e-3;           ///< learning rate of matrices, before AdjustLr
  double momentum = 0.95;     ///< of matrices
  bool nesterov = true;       ///< Nesterov momentum
  double weight_decay = 0.1;  ///< decoupled, for matrices and for parameters that AdamW steps
  std::array<double, 3> ns_coefficients{3.4445, -4.7750, 2.0315};  ///< Newton-Schulz polynomial
  int ns_steps = 5;                                                ///< iterations, from 1 to 99
  double ns_eps = 1e-7;                                ///< least norm that a matrix is divided by
  IterationDType ns_dtype = IterationDType::kFloat32;  ///< dtype of the iterations
  AdjustLr adjust_lr_fn = AdjustLr::kOriginal;         ///< factor of the learning rate
  /// Patterns as PrecisionRule::match of matrices that AdamW steps: embeddings, heads, routers.
  /// Each must match a parameter.
  std::vector<std::string> adamw{};
  double adamw_lr_scale = 1.0;          ///< AdamW's learning rate is lr times this
  double beta1 = 0.9;                   ///< AdamW's
  double beta2 = 0.95;                  ///< AdamW's
  double eps = 1e-8;                    ///< AdamW's
  std::vector<std::string> no_decay{};  ///< patterns as PrecisionRule::match
  std::vector<OptimizerRule> rules{};   ///< override no_decay
};

}  // namespace tessera
