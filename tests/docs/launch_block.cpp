// What stands around the first block of README.md: a module and rows to call it with.
#include <ATen/ATen.h>
#include <tessera/tessera.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>

#include <memory>

namespace {

struct Block : torch::nn::Module {
  Block() {
    at::manual_seed(1);
    proj = register_module("proj", torch::nn::Linear(8, 8));
    norm = register_parameter("norm", at::ones({8}));
  }
  at::Tensor forward(const at::Tensor& x) { return proj(x) * norm.to(x.scalar_type()); }
  torch::nn::Linear proj{nullptr};
  at::Tensor norm;
};

}  // namespace

int main() {
  const at::Tensor rows = at::ones({4, 8});
  // BLOCK
}
