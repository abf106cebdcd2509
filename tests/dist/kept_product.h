// A block of weight products that a selective checkpoint keeps, as nn::Linear does.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "support/modules.h"
#include "tessera/recompute.h"

namespace tessera::test {

/// x W^T through keep(). Counts how often it was computed.
struct KeptProduct : torch::autograd::Function<KeptProduct> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight, int* computed) {
    context->save_for_backward({x, weight});
    return keep({x.size(0), weight.size(0)}, [&] {
      ++*computed;
      return at::mm(x, weight.t());
    });
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {at::mm(gradients[0], saved[1]), at::mm(gradients[0].t(), saved[0]), at::Tensor()};
  }
};

/// x + silu(relu(tanh(x) A^T) B^T), dropped out if asked, as `mode` says. Without a checkpoint it
/// holds more than its input and products.
class KeptBlock : public torch::nn::Module {
 public:
  KeptBlock(std::uint64_t seed, std::int64_t width)
      : a(register_parameter("a", seeded(seed, {2 * width, width}))),
        b(register_parameter("b", seeded(seed + 1, {width, 2 * width}))) {}

  at::Tensor forward(const at::Tensor& x) {
    return checkpoint([this](const std::vector<at::Tensor>& in) { return body(in[0]); }, {x}, mode);
  }

  at::Tensor body(const at::Tensor& x) {
    ++calls;
    const auto inner = at::relu(KeptProduct::apply(at::tanh(x), a, &computed));
    auto y = KeptProduct::apply(inner, b, &computed);
    if (dropout > 0) y = at::dropout(y, dropout, /*train=*/true);
    return x + at::sigmoid(y) * y;
  }

  at::Tensor a, b;
  RecomputeMode mode = RecomputeMode::kNone;
  double dropout = 0;  ///< from libtorch's process-wide generator: on one rank only
  int calls = 0;
  int computed = 0;  ///< products
};

}  // namespace tessera::test
