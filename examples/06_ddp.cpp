// DistributedDataParallel in C++: every rank holds the whole model, computes its own rows of each
// batch, and receives the gradients averaged over all ranks.
//
//   build/release/examples/06_ddp        two ranks
//   build/release/examples/06_ddp 4      four ranks
//
// A launcher (torchrun, mpirun, srun) may start the ranks instead: docs/launchers.md.
//
// The program draws points in the plane, and a small network learns which of them are inside of a
// circle: first on all ranks together, then on rank 0 alone in a plain libtorch loop. Rank 0 prints
// both losses side by side. They are equal bit for bit, since both loops add the same gradients in
// the same order (see plain_loop below).
#include <tessera/tessera.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int kSteps = 200;
constexpr int kRowsPerRank = 64;

struct Net : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& points) {
    return second(torch::tanh(first(points))).squeeze(1);
  }
  torch::nn::Linear first{register_module("first", torch::nn::Linear(2, 32))};
  torch::nn::Linear second{register_module("second", torch::nn::Linear(32, 1))};
};

/// Returns a network with the same values in every process. DDP broadcasts those of rank 0; here
/// an equal seed does.
std::shared_ptr<Net> make_net() {
  torch::manual_seed(1);
  return std::make_shared<Net>();
}

/// One batch: points [rows, 2] and labels [rows], 1 inside of the circle of radius 1.2, else 0.
struct Batch {
  torch::Tensor points, labels;
  /// The rows that rank `rank` computes.
  Batch of_rank(int rank) const {
    const auto first = rank * kRowsPerRank;
    return {points.narrow(0, first, kRowsPerRank), labels.narrow(0, first, kRowsPerRank)};
  }
};

/// Draws the batch of a step, the same in every process: the seed is the number of the step.
Batch draw(int step, int ranks) {
  torch::manual_seed(static_cast<std::uint64_t>(1000 + step));
  const auto points = torch::randn({ranks * kRowsPerRank, 2});
  return {points, points.norm(2, 1).lt(1.2).to(torch::kFloat)};
}

torch::Tensor loss_of(const torch::Tensor& logits, const torch::Tensor& labels) {
  return torch::nn::functional::binary_cross_entropy_with_logits(logits, labels);
}

/// Trains on all ranks and returns the loss of each step, averaged over the ranks.
std::vector<double> data_parallel(tessera::World& world) {
  // The one line that makes this DDP: all ranks are replicas (dp_replicate), none holds a shard.
  // With dp_shard = world.size() instead, the same program is FSDP.
  const auto mesh = world.mesh(tessera::MeshShape::dense(
      /*pp=*/1, /*dp_replicate=*/world.size(), /*dp_shard=*/1, /*cp=*/1, /*tp=*/1));
  auto net = tessera::fully_shard(make_net(), mesh);
  torch::optim::SGD optimizer(net.parameters(), torch::optim::SGDOptions(0.5).momentum(0.9));

  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    const auto batch = draw(step, world.size()).of_rank(world.rank());
    optimizer.zero_grad();
    const auto loss = loss_of(net.forward(batch.points), batch.labels);
    loss.backward();  // the gradients are averaged over the ranks here
    optimizer.step();
    losses.push_back(world.group().mean(loss.item<double>()));
  }
  return losses;
}

/// Trains the same network on one rank, without the library. Each backward adds the gradient of the
/// rows of one rank, in rank order, and the sum is divided once: the order of additions that the
/// data-parallel loop has. One backward over the whole batch adds rows in another order; its losses
/// then differ by rounding.
std::vector<double> plain_loop(int ranks) {
  const auto net = make_net();
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.5).momentum(0.9));

  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    const auto batch = draw(step, ranks);
    optimizer.zero_grad();
    double sum = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const auto rows = batch.of_rank(rank);
      const auto loss = loss_of(net->forward(rows.points), rows.labels);
      loss.backward();
      sum += loss.item<double>();
    }
    for (auto& parameter : net->parameters()) parameter.mutable_grad().div_(ranks);
    optimizer.step();
    losses.push_back(sum / ranks);
  }
  return losses;
}

void run(tessera::World& world) {
  const auto found = data_parallel(world);
  if (world.rank() != 0) return;
  const auto expected = plain_loop(world.size());
  std::printf("step  %d ranks (DDP)  one rank, plain loop\n", world.size());
  for (std::size_t step = 0; step < found.size(); ++step) {
    if (step % 50 == 0 || step + 1 == found.size()) {
      std::printf("%4zu  %.8f     %.8f\n", step, found[step], expected[step]);
    }
    TESSERA_CHECK(found[step] == expected[step], tessera::ErrorKind::kNumeric,
                  "the losses of step ", step, " differ: found ", found[step], ", expected ",
                  expected[step]);
  }
  TESSERA_CHECK(found.back() < found.front() / 2, tessera::ErrorKind::kNumeric,
                "the loss did not fall: ", found.back());
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  return tessera::launch(ranks, run);
}
