// Tied weights: an embedding and a head over one tensor, and a mean over ranks in one line.
//
//   build/release/examples/04_tied_weights
//
// The ranks learn which token follows which; rank 0 prints the loss of all ranks, which falls below
// 0.1.
#include <ATen/ops/cross_entropy_loss.h>
#include <tessera/state_dict.h>
#include <tessera/tessera.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <cstdio>

namespace {

constexpr std::int64_t kTokens = 16;
constexpr std::int64_t kWidth = 32;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    embed = register_module("embed", torch::nn::Embedding(kTokens, kWidth));
    inner = register_module("inner", torch::nn::Linear(kWidth, kWidth));
    head = register_module(
        "head", torch::nn::Linear(torch::nn::LinearOptions(kWidth, kTokens).bias(false)));
    // One storage under two names: `head->weight = embed->weight` would change this member only,
    // and leave the parameter that `head` has registered as it was.
    head->weight.set_data(embed->weight);
  }
  at::Tensor forward(const at::Tensor& tokens) { return head(at::tanh(inner(embed(tokens)))); }
  torch::nn::Embedding embed{nullptr};
  torch::nn::Linear inner{nullptr}, head{nullptr};
};
TORCH_MODULE(Net);

}  // namespace

int main() {
  return tessera::launch(2, [](tessera::World& world) {
    const auto mesh = world.mesh(tessera::MeshShape::dense(1, 1, world.size(), 1, 1));
    const auto data = mesh.group("dp_shard");
    at::manual_seed(1);
    // Both in one unit, or in units of one fully_shard around them.
    auto model = tessera::fully_shard(Net(), mesh);

    tessera::AdamWOptions options;
    options.lr = 1e-2;
    options.weight_decay = 0.0;
    const auto optimizer = tessera::make_adamw(model, options);

    double last = 0;
    for (int step = 0; step < 200; ++step) {
      // Each rank has every other token.
      const auto tokens = at::arange(world.rank(), kTokens, world.size());
      const auto loss = at::cross_entropy_loss(model(tokens), (tokens * 5 + 3).remainder(kTokens));
      torch::autograd::backward({loss}, {});  // both uses of the weight add to one gradient
      optimizer->step();
      model.zero_grad();
      last = data.mean(loss.item<double>());
      if (world.rank() == 0 && step % 50 == 0) std::printf("step %3d  loss %.4f\n", step, last);
    }
    if (world.rank() == 0) std::printf("final loss %.4f (expected below 0.1)\n", last);
    TESSERA_CHECK(last < 0.1, tessera::ErrorKind::kNumeric, "the loss did not fall: ", last);

    at::Tensor embed, head;
    for (const auto& entry : tessera::state_dict(model, tessera::StateDictKind::kFull)) {
      if (entry.name == "embed.weight") embed = entry.values;
      if (entry.name == "head.weight") head = entry.values;
    }
    TESSERA_CHECK(embed.equal(head), tessera::ErrorKind::kNumeric, "the weights came apart");
  });
}
