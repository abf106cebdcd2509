// Experts: from tokens and their routing to the weighted sum of what their experts make of them.
//
// Tokens are ordered by expert, each expert's range is one product, and what comes out is summed
// per token in the order of the experts' numbers: the result of a token does not depend on who else
// is in the batch. Every expert has a gradient, zeros where no token came. All on one rank: no
// token leaves it. Short symbols: M tokens, E experts, K experts a token, H hidden, I inner. Next:
// ../nn/grouped_linear.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "moe/routing.h"
#include "nn/grouped_linear.h"

namespace tessera::moe {

/// The rows (token, slot) in the order of their experts, tokens ascending within one.
struct Dispatch {
  at::Tensor slot_of_row;  ///< [M*K] i64: token * K + slot
  at::Tensor row_of_slot;  ///< [M*K] i64, the inverse
  nn::GroupOffsets offsets;
  std::int64_t experts_per_token = 0;
};

/// indices [M, K] as Routing has them.
Dispatch dispatch(const at::Tensor& indices, std::int64_t experts);

/// x [M, H] -> [M*K, H]: each row its token.
at::Tensor gather_tokens(const at::Tensor& x, const Dispatch& dispatch);

/// rows [M*K, H], weights [M, K] -> [M, H] in the rows' dtype: products in the weights' dtype,
/// rounded, then added in the order of the slots.
at::Tensor combine(const at::Tensor& rows, const at::Tensor& weights, const Dispatch& dispatch);

/// gate_up [E, 2I, H] (rows 0..I-1 the gate), down [E, H, I].
struct ExpertWeights {
  at::Tensor gate_up;
  at::Tensor down;
};
/// What an expert does between its two products: (gate, up) [rows, I] -> [rows, I].
using Gated = at::Tensor (*)(const at::Tensor& gate, const at::Tensor& up);

/// x [M, H] -> [M, H] in x's dtype.
at::Tensor experts(const at::Tensor& x, const Routing& routing, const ExpertWeights& weights,
                   Gated gated);

}  // namespace tessera::moe
