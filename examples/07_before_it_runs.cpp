// Before it runs: counts what one rank holds and sends in a step of a custom module, in a world of
// any size, without the other ranks, and plans steps within a memory budget by it.
//
//   build/release/examples/07_before_it_runs
//
// Rank 0 prints the bytes of ranks in worlds of 2, 8 and 64. Then two ranks train with all
// activations kept, and under a budget that has no room for them: the losses are the same.
#include <tessera/tessera.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>

#include <cstdio>

namespace {

constexpr std::int64_t kRows = 512, kWidth = 64;
constexpr int kBlocks = 8;

/// x + down(tanh(up(x))), computed again in backward where a plan says so.
struct Block : torch::nn::Module, tessera::Recomputable {
  at::Tensor forward(const at::Tensor& x) {
    const auto run = [this](const std::vector<at::Tensor>& in) {
      return in[0] + down(at::tanh(up(in[0])));
    };
    return tessera::checkpoint(run, {x}, recompute());
  }
  torch::nn::Linear up{register_module("up", torch::nn::Linear(kWidth, 4 * kWidth))};
  torch::nn::Linear down{register_module("down", torch::nn::Linear(4 * kWidth, kWidth))};
};

struct Net : torch::nn::Module {
  explicit Net(const tessera::Mesh& mesh) {
    for (int i = 0; i < kBlocks; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i),
                                       std::make_shared<tessera::Sharded<Block>>(
                                           tessera::fully_shard(std::make_shared<Block>(), mesh))));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : blocks) x = block->forward(x);
    return x;
  }
  std::vector<std::shared_ptr<tessera::Sharded<Block>>> blocks;
};

/// The program: what a rank builds and what it does in a step, in a dry run as in training.
struct Program : tessera::DryModel {
  Program(tessera::World& world, const tessera::CompileOptions& options) {
    at::manual_seed(1);
    const auto mesh = world.mesh(tessera::MeshShape::dense(1, 1, world.size(), 1, 1));
    auto net = std::make_shared<tessera::Sharded<Net>>(
        tessera::fully_shard(std::make_shared<Net>(mesh), mesh));
    tessera::compile(*net, options);
    model = net;
    optimizer = tessera::make_adamw(*net, tessera::AdamWOptions());
    compute = [net, rank = world.rank(), loss = loss] {
      const auto x = at::sin(at::arange(kRows * kWidth, at::kFloat).view({kRows, kWidth}) + rank);
      tessera::StepScopeOptions opened;  // steps of a known order follow plans
      opened.reshard = tessera::StepReshard::kMicroBatch;
      opened.schedule = "one micro-batch";
      opened.micro_batches = 1;
      tessera::StepScope scope(*net, opened);
      scope.begin_forward(0, 0);
      const auto error = (net->forward(x) - x.flip({1})).square().mean();
      scope.begin_backward(0, 0);
      torch::autograd::backward({error}, {});
      scope.finish();
      *loss = error.item<double>();
    };
  }
  std::shared_ptr<double> loss = std::make_shared<double>(0.0);
};

double mib(std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

double trained(tessera::World& world, const tessera::CompileOptions& options) {
  const Program program(world, options);
  for (int step = 0; step < 20; ++step) {
    program.compute();
    program.optimizer->step();
    program.model->zero_grad();
  }
  return *program.loss;
}

void run(tessera::World& world) {
  tessera::CompileOptions options;
  const auto build = [&options](tessera::World& dry) -> tessera::DryModel {
    return Program(dry, options);
  };
  // 1. One rank of each world, on this thread.
  for (const int ranks : {2, 8, 64}) {
    const auto found = tessera::dry_run(build, 0, ranks);
    std::int64_t sent = 0;
    for (const auto& one : found.collectives) sent += one.sent_bytes;
    if (world.rank() > 0) continue;
    std::printf("%2d ranks: each holds %.2f MiB between steps, %.2f at its peak, and sends %.2f\n",
                ranks, mib(found.between_steps), mib(found.peak), mib(sent));
  }

  // 2. A budget of three quarters of the peak of two ranks. All ranks count the same rank.
  const auto eager = tessera::dry_run(build, 0, 2);
  const auto counted = tessera::dry_activations(build, 0, 2);
  options.mode = tessera::CompileMode::kPlan;
  options.activations = counted.forward;
  options.memory_budget = eager.peak * 3 / 4 - counted.others;
  const auto planned = tessera::dry_run(build, 0, 2);
  if (world.rank() == 0) {
    const auto& block = counted.forward.units.front();
    std::printf("%s leaves %.2f MiB, or %.2f where its forward runs again\n", block.unit.c_str(),
                mib(block.none), mib(block.full));
    std::printf("a budget of %.2f MiB: %.2f at the peak\n", mib(eager.peak * 3 / 4),
                mib(planned.peak));
  }
  TESSERA_CHECK(planned.peak <= eager.peak * 3 / 4, tessera::ErrorKind::kInternal,
                "the budget was not kept");

  // 3. The same bits, with less memory.
  const double expected = trained(world, {}), found = trained(world, options);
  TESSERA_CHECK(found == expected, tessera::ErrorKind::kNumeric, "found the loss ", found,
                ", expected ", expected);
  if (world.rank() == 0) std::printf("loss %.4f with it and without\n", found);
}

}  // namespace

int main() { return tessera::launch(2, run); }
