// Gates between the two products of an MLP: silu(gate) * up and others, elementwise, and the input
// of a product that is such a gate.
//
// A product keeps its input for the gradient of its weight. A gate keeps what it is made of, which
// is enough to form its result again: a ProductInput says so, and its product keeps nothing more
// (Liger Kernel, arXiv 2410.10989, forms silu(gate) again in the same way). Short symbols: I inner.
// Next: linear.h, mlp.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>

namespace tessera::nn {

/// silu(gate) * up.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

/// both [..., 2I], gate then up -> silu(gate) * up [..., I].
at::Tensor swiglu_halves(const at::Tensor& both);

/// relu(x)^2.
at::Tensor relu_squared(const at::Tensor& x);

/// gelu_tanh(gate) * up.
at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up);

struct ClampedSwiglu {
  double alpha = 1.702;
  double limit = 7.0;
};

/// gpt-oss: both [..., 2I], gate in the even columns, up in the odd ones ->
/// (up + 1) * gate * sigmoid(alpha * gate) [..., I] with gate at most `limit` and up within
/// +-limit; what is clamped gets no gradient. 16-bit input: fp32 inside, rounded once.
at::Tensor clamped_swiglu(const at::Tensor& both, const ClampedSwiglu& options);

/// The input of a product: a tensor, which the product keeps for backward, or a gate, which backward
/// forms again.
struct ProductInput {
  enum class Kind : std::uint8_t {
    kItself,
    kSwiglu,        ///< swiglu(x, up)
    kSwigluHalves,  ///< swiglu_halves(x)
  };
  // NOLINTNEXTLINE(google-explicit-constructor): a tensor is an input
  ProductInput(at::Tensor itself) : x(std::move(itself)) {}
  ProductInput(Kind of_gate, at::Tensor first, at::Tensor second = {})
      : kind(of_gate), x(std::move(first)), up(std::move(second)) {}

  /// The input itself, which its product then keeps, with a gradient.
  at::Tensor formed() const;

  std::optional<at::Tensor> second() const {
    return up.defined() ? std::optional(up) : std::nullopt;
  }
  /// The last size of the input.
  std::int64_t columns() const { return x.size(-1) / (kind == Kind::kSwigluHalves ? 2 : 1); }
  /// Whether a product keeps x and `up` alone: not for second derivatives, for two dtypes, nor
  /// where the gate's tensors need no gradient, of which there are more than of its result.
  bool is_kept_as_gate() const;

  Kind kind = Kind::kItself;
  at::Tensor x;
  at::Tensor up = {};  ///< of kSwiglu
};

/// The input of a product, without a gradient: for a Function that has the gate inside of it.
at::Tensor formed_again(ProductInput::Kind kind, const at::Tensor& x, const at::Tensor& up);
/// grad of the input -> gradients of x and of `up`, undefined where there is none.
std::tuple<at::Tensor, at::Tensor> formed_backward(const at::Tensor& grad, ProductInput::Kind kind,
                                                   const at::Tensor& x, const at::Tensor& up);

}  // namespace tessera::nn
