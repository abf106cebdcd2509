// The Newton-Schulz iteration of Muon, with bits that depend on a matrix alone.
//
// Next: muon.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

namespace tessera::fsdp {

struct NewtonSchulz {
  std::array<double, 3> coefficients;  ///< a, b, c: X <- a X + (b G + c G G) X with G = X X^T
  int steps = 5;
  double eps = 1e-7;  ///< least norm by which a matrix is divided
  at::ScalarType dtype = at::kFloat;
};

/// Returns U S V^T for a matrix U D V^T, where the diagonal of S is near 1: five steps with torch's
/// coefficients bring singular values above some 1/300 of the norm between 0.68 and 1.14. `matrix`:
/// [rows, columns], contiguous, float or double; the result likewise. On the CPU in float32 and
/// float64 its bits depend neither on the number of threads nor on the rank (fixed_product.h); in
/// bfloat16 they may. Source: Keller Jordan, Muon; torch.optim.Muon of torch 2.13, which iterates
/// in bfloat16.
at::Tensor orthogonalized(const at::Tensor& matrix, const NewtonSchulz& how);

}  // namespace tessera::fsdp
