// A user's program: two local ranks share a module, learn a fixed map, and print the loss.
#include <ATen/ATen.h>
#include <tessera/tessera.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>

#include <cstdio>
#include <memory>

namespace {

struct Net : torch::nn::Module {
  Net() {
    at::manual_seed(1);
    inner = register_module("inner", torch::nn::Linear(8, 32));
    outer = register_module("outer", torch::nn::Linear(32, 2));
  }
  at::Tensor forward(const at::Tensor& x) { return outer(at::tanh(inner(x))); }
  torch::nn::Linear inner{nullptr}, outer{nullptr};
};

void train(tessera::World& world) {
  const auto mesh = world.mesh(tessera::MeshShape::dense(1, 1, world.size(), 1, 1));
  auto model = tessera::fully_shard(std::make_shared<Net>(), mesh);
  tessera::AdamWOptions options;
  options.lr = 1e-2;
  const auto optimizer = tessera::make_adamw(model, options);

  const auto x = at::sin(at::arange(64, at::kFloat).view({8, 8}) * (1.0 + world.rank()));
  const auto target = x.narrow(1, 0, 2) * x.narrow(1, 2, 2);
  double first = 0;
  double last = 0;
  for (int step = 0; step < 100; ++step) {
    const auto loss = (model.forward(x) - target).pow(2).mean();
    torch::autograd::backward({loss}, {});
    tessera::clip_grad_norm(model, 1.0);
    optimizer->step();
    model.zero_grad();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  TESSERA_CHECK(last < first / 4, tessera::ErrorKind::kNumeric, "the loss did not fall: found ",
                last, ", expected less than a quarter of ", first);
  if (world.rank() == 0) {
    std::printf("%d ranks, loss %.4f, then %.4f\n", world.size(), first, last);
  }
}

}  // namespace

int main() { return tessera::launch(2, train); }
