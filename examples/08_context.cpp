// Context parallelism: ranks share the positions of the same rows, so that a row may be longer than
// what one rank can hold the activations of.
//
//   build/release/examples/08_context        two ranks
//   build/release/examples/08_context 4      four ranks
//
// A launcher (torchrun, mpirun, srun) may start the ranks instead: docs/launchers.md.
//
// The program trains a small model with causal attention of its own to name, at every position, the
// token that its row began with, first on all ranks together, then on rank 0 alone in a plain
// libtorch loop. Rank 0 prints both losses side by side: they differ by rounding only.
#include <ATen/ops/scaled_dot_product_attention.h>
#include <tessera/tessera.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <vector>

namespace {

constexpr int kSteps = 100;
constexpr std::int64_t kRows = 16, kPositions = 64, kTokens = 16, kWidth = 32, kHeads = 4;

/// One block of attention. Positions are learned, so that each rank has to use its own.
struct Net : torch::nn::Module {
  /// ids [B, n] at `places` [n] of their rows -> logits [B, n, tokens]. `context` says which
  /// positions other ranks have; none: all are here.
  torch::Tensor forward(const torch::Tensor& ids, const torch::Tensor& places,
                        const std::optional<tessera::ContextParallel>& context) {
    const auto x = embed(ids) + positions(places);
    const auto heads = [](const torch::Tensor& y) {
      return y.unflatten(2, {kHeads, kWidth / kHeads}).transpose(1, 2);
    };
    const auto parts = in(x).chunk(3, 2);
    auto k = heads(parts[1]), v = heads(parts[2]);  // [B, heads, n, width of a head]
    torch::Tensor mask;                             // [n, T]
    if (context) {
      // The two lines that make attention see the positions of the other ranks.
      k = context->gather(k, 2);
      v = context->gather(v, 2);
      mask = context->causal_mask();
    } else {
      mask = torch::ones({kPositions, kPositions}, torch::kBool).tril();
    }
    const auto mixed = at::scaled_dot_product_attention(heads(parts[0]), k, v, mask);
    return out(torch::tanh(x + mixed.transpose(1, 2).flatten(2)));
  }
  torch::nn::Embedding embed{register_module("embed", torch::nn::Embedding(kTokens, kWidth))};
  torch::nn::Embedding positions{
      register_module("positions", torch::nn::Embedding(kPositions, kWidth))};
  torch::nn::Linear in{register_module("in", torch::nn::Linear(kWidth, 3 * kWidth))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(kWidth, kTokens))};
};

std::shared_ptr<Net> make_net() {
  torch::manual_seed(1);  // the same values in every process
  return std::make_shared<Net>();
}

/// Whole rows, the same in every process. The first position of a row has no label. Labels of a
/// language model are shifted here as well, before rows are cut: the last position of a rank may be
/// followed by another rank's.
struct Batch {
  torch::Tensor ids, labels;  ///< [B, T]
};

Batch draw(int step) {
  torch::manual_seed(static_cast<std::uint64_t>(1000 + step));
  const auto ids = torch::randint(kTokens, {kRows, kPositions}, torch::kLong);
  const auto labels = ids.narrow(1, 0, 1).expand(ids.sizes()).clone();
  labels.narrow(1, 0, 1).fill_(-100);
  return {ids, labels};
}

/// The sum over the given positions, divided by the labels of whole rows.
torch::Tensor loss_of(const torch::Tensor& logits, const torch::Tensor& labels,
                      std::int64_t labels_of_all) {
  namespace F = torch::nn::functional;
  const auto sum = F::cross_entropy(logits.flatten(0, 1), labels.flatten(),
                                    F::CrossEntropyFuncOptions().reduction(torch::kSum));
  return sum / static_cast<double>(labels_of_all);
}

std::vector<double> on_all_ranks(tessera::World& world) {
  const auto mesh = world.mesh(tessera::MeshShape::dense(
      /*pp=*/1, /*dp_replicate=*/1, /*dp_shard=*/1, /*cp=*/world.size(), /*tp=*/1));
  tessera::ShardOptions options;
  options.divide_factor = 1.0;  // own losses are parts of one mean: gradients are summed
  auto net = tessera::fully_shard(make_net(), mesh, {}, options);
  torch::optim::AdamW optimizer(net.parameters(), torch::optim::AdamWOptions(1e-2));
  const tessera::ContextParallel context(mesh, kPositions);
  const auto places = context.cut(torch::arange(kPositions), 0);

  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    const auto [ids, labels] = draw(step);
    optimizer.zero_grad();
    const auto logits = net.forward(context.cut(ids, 1), places, std::optional(context));
    const auto loss =
        loss_of(logits, context.cut(labels, 1), labels.ne(-100).sum().item<std::int64_t>());
    loss.backward();
    optimizer.step();
    losses.push_back(world.size() * world.group().mean(loss.item<double>()));
  }
  return losses;
}

std::vector<double> plain_loop() {
  const auto net = make_net();
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    const auto [ids, labels] = draw(step);
    optimizer.zero_grad();
    const auto logits = net->forward(ids, torch::arange(kPositions), std::nullopt);
    const auto loss = loss_of(logits, labels, labels.ne(-100).sum().item<std::int64_t>());
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

void run(tessera::World& world) {
  const auto found = on_all_ranks(world);
  if (world.rank() != 0) return;
  const auto expected = plain_loop();
  std::printf("step  %d ranks share rows  one rank, plain loop\n", world.size());
  for (std::size_t step = 0; step < found.size(); ++step) {
    if (step % 33 == 0 || step + 1 == found.size()) {
      std::printf("%4zu  %.8f          %.8f\n", step, found[step], expected[step]);
    }
    TESSERA_CHECK(std::abs(found[step] - expected[step]) < 1e-3 * expected[step],
                  tessera::ErrorKind::kNumeric, "the losses of step ", step, " differ: found ",
                  found[step], ", expected ", expected[step]);
  }
  TESSERA_CHECK(found.back() < found.front() / 2, tessera::ErrorKind::kNumeric,
                "the loss did not fall: ", found.back());
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  return tessera::launch(ranks, run);
}
