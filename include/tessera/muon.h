// Muon over the shards of a handle: whole matrices are orthogonalized, AdamW steps the rest.
//
// Options as values; make_muon, which takes them, is declared in optim.h. Pure. Next: optim.h.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/optimizer_rule.h"

namespace tessera {

/// What the learning rate of a matrix with so many rows and columns is multiplied by. Source:
/// torch.optim.Muon, adjust_lr_fn.
enum class AdjustLr : std::uint8_t {
  kOriginal,       ///< sqrt(max(1, rows / columns))
  kMatchRmsAdamw,  ///< 0.2 sqrt(max(rows, columns)): with learning rates that AdamW has
};

/// In which Newton-Schulz iterations multiply; those of float64 matrices in float64 either way.
enum class IterationDType : std::uint8_t {
  kFloat32,
  kBFloat16,  ///< as torch.optim.Muon: within 5 % of float32's result, in the Frobenius norm
};

struct MuonOptions {
  double lr = 1e-3;  ///< of matrices, before AdjustLr
  double momentum = 0.95;
  bool nesterov = true;
  double weight_decay = 0.1;  ///< decoupled, of matrices and of what AdamW steps
  std::array<double, 3> ns_coefficients{3.4445, -4.7750, 2.0315};
  int ns_steps = 5;  ///< from 1 to 99
  double ns_eps = 1e-7;
  IterationDType ns_dtype = IterationDType::kFloat32;
  AdjustLr adjust_lr_fn = AdjustLr::kOriginal;
  /// Patterns as PrecisionRule::match of what AdamW steps though it has the dims of a matrix:
  /// embeddings, heads, routers. Each must match a parameter.
  std::vector<std::string> adamw{};
  double adamw_lr_scale = 1.0;  ///< AdamW's learning rate is lr times this
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  std::vector<std::string> no_decay{};
  std::vector<OptimizerRule> rules{};
};

}  // namespace tessera
