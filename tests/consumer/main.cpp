// A user's program: two local ranks share a module, learn a fixed map, eager and replayed, and
// print the loss.
#include <ATen/ATen.h>
#include <tessera/tessera.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
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

struct Losses {
  double first = 0, last = 0;
};

Losses learn(tessera::World& world, tessera::CompileMode mode) {
  const auto mesh = world.mesh(tessera::MeshShape::dense(1, 1, world.size(), 1, 1));
  auto model = tessera::fully_shard(std::make_shared<Net>(), mesh);
  tessera::compile(model, {.mode = mode});
  tessera::AdamWOptions options;
  options.lr = 1e-2;
  const auto optimizer = tessera::make_adamw(model, options);

  const auto x = at::sin(at::arange(64, at::kFloat).view({8, 8}) * (1.0 + world.rank()));
  const auto target = x.narrow(1, 0, 2) * x.narrow(1, 2, 2);
  constexpr int kSteps = 100;
  Losses losses;
  for (int step = 0; step < kSteps; ++step) {
    const auto loss = (model.forward(x) - target).pow(2).mean();
    torch::autograd::backward({loss}, {});
    tessera::clip_grad_norm(model, 1.0);
    optimizer->step();
    model.zero_grad();
    losses.last = loss.item<double>();
    if (step == 0) losses.first = losses.last;
  }
  const auto replayed = tessera::replay_calls(model).replayed;
  // But for the first calls, which are recorded and compared.
  const std::int64_t expected = mode == tessera::CompileMode::kReplay ? kSteps - 4 : 0;
  TESSERA_CHECK(replayed == expected, tessera::ErrorKind::kInternal, "found ", replayed,
                " replays, expected ", expected);
  return losses;
}

void train(tessera::World& world) {
  const auto [first, last] = learn(world, tessera::CompileMode::kOff);
  TESSERA_CHECK(last < first / 4, tessera::ErrorKind::kNumeric, "the loss did not fall: found ",
                last, ", expected less than a quarter of ", first);
  const auto replayed = learn(world, tessera::CompileMode::kReplay);
  TESSERA_CHECK(replayed.last == last, tessera::ErrorKind::kNumeric, "replayed: found the loss ",
                replayed.last, ", expected ", last);
  if (world.rank() == 0) {
    std::printf("%d ranks, loss %.4f, then %.4f\n", world.size(), first, last);
  }
}

}  // namespace

int main() { return tessera::launch(2, train); }
