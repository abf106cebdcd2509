// A complete trainer: two local ranks, one sharded module, an optimizer over its shards, clipping.
//
//   build/release/examples/01_shard_a_module
//
// The ranks learn a fixed linear map from random inputs; rank 0 prints the loss, which falls below
// 0.01.
#include <tessera/tessera.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <cstdio>

namespace {

struct Mlp : torch::nn::Module {
  Mlp() {
    first = register_module("first", torch::nn::Linear(16, 64));
    second = register_module("second", torch::nn::Linear(64, 4));
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};

/// Rows that depend on step and rank: every rank sees its own data.
at::Tensor inputs(int step, int rank) {
  const auto t = at::arange(32 * 16, at::TensorOptions().dtype(at::kFloat)).view({32, 16});
  return at::sin(t * (1.7 + 0.3 * rank) + step);
}

}  // namespace

int main() {
  return tessera::launch(2, [](tessera::World& world) {
    // 1. A mesh: all ranks shard (dp_shard = 2), nothing is replicated.
    const auto mesh = world.mesh(tessera::MeshShape::dense(1, 1, world.size(), 1, 1));

    // 2. A plain module, then its handle. Values are rank 0's on every rank only if they were equal
    // before.
    at::manual_seed(1);
    auto model = tessera::fully_shard(std::make_shared<Mlp>(), mesh);

    // 3. An optimizer over the shards that this rank owns.
    tessera::AdamWOptions options;
    options.lr = 1e-2;
    options.weight_decay = 0.0;
    const auto optimizer = tessera::make_adamw(model, options);

    const auto target =
        at::sin(at::arange(16 * 4, at::TensorOptions().dtype(at::kFloat))).view({16, 4}) * 0.3;
    double last = 0;
    for (int step = 0; step < 200; ++step) {
      const auto x = inputs(step, world.rank());
      const auto loss = (model.forward(x) - at::mm(x, target)).pow(2).mean();
      torch::autograd::backward({loss}, {});  // gradients are averaged over ranks, on the shards
      tessera::clip_grad_norm(model, 1.0);
      optimizer->step();
      model.zero_grad();
      last = loss.item<double>();
      if (world.rank() == 0 && step % 50 == 0) std::printf("step %3d  loss %.4f\n", step, last);
    }
    if (world.rank() == 0) std::printf("final loss %.4f (expected below 0.01)\n", last);
    TESSERA_CHECK(std::isfinite(last) && last < 0.01, tessera::ErrorKind::kNumeric,
                  "the loss did not fall: ", last);
  });
}
