// What sharding costs a unit in addition to its collectives: 200 x Linear(64, 64), each a unit of its own,
// on two Gloo ranks; in comparison, in the same process and in turns, c10d's bare collectives of the
// same sizes: two all-gathers and one reduce-scatter a unit. Prints one line of JSON, medians in ms
// a unit and step.
//
//   unit_overhead [UNITS] [STEPS]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <tessera/tessera.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "comm/group.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "plain_gloo.h"

namespace {

constexpr std::int64_t kWidth = 64;
constexpr std::int64_t kRows = 32;

struct Linear : torch::nn::Module {
  Linear()
      : weight(register_parameter("weight", at::randn({kWidth, kWidth}) * 0.1)),
        bias(register_parameter("bias", at::zeros({kWidth}))) {}
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight, bias); }
  at::Tensor weight, bias;
};

template <class Layer>
struct Chain : torch::nn::Module {
  std::vector<std::shared_ptr<Layer>> layers;
  void add(std::shared_ptr<Layer> layer) {
    layers.push_back(register_module(std::to_string(layers.size()), std::move(layer)));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = x;
    for (auto& layer : layers) y = layer->forward(y);
    return y;
  }
};

struct Case {
  const char* name;
  std::function<void()> run;
  std::vector<double> ms = {};
  double median() {
    std::sort(ms.begin(), ms.end());
    return ms[ms.size() / 2];
  }
};

void run(tessera::World& world, int units, int steps) {
  at::set_num_threads(1);
  const auto mesh = world.mesh(tessera::MeshShape::dense(1, 1, world.size(), 1, 1));
  auto plain = std::make_shared<Chain<Linear>>();
  auto inner = std::make_shared<Chain<tessera::Sharded<Linear>>>();
  for (int i = 0; i < units; ++i) {
    plain->add(std::make_shared<Linear>());
    inner->add(std::make_shared<tessera::Sharded<Linear>>(
        tessera::fully_shard(std::make_shared<Linear>(), mesh)));
  }
  auto sharded = tessera::fully_shard(inner, mesh);
  const auto rows = at::randn({kRows, kWidth});
  const auto gloo = bench::plain_gloo(world);
  const auto numel = kWidth * kWidth + kWidth;
  auto whole = at::zeros({numel});
  auto shard = at::zeros({numel / world.size()});

  const auto train = [&](auto& model) {
    torch::autograd::backward({model.forward(rows).sum()}, {});
    model.zero_grad();
  };
  Case cases[] = {{"tessera", [&] { train(sharded); }},
                  {"collectives",
                   [&] {
                     for (int i = 0; i < 2 * units; ++i)
                       gloo->_allgather_base(whole, shard)->wait();
                     for (int i = 0; i < units; ++i)
                       gloo->_reduce_scatter_base(shard, whole)->wait();
                   }},
                  {"unsharded", [&] { train(*plain); }}};
  auto& runtime = sharded.unit()->runtime();
  for (int step = -3; step < steps; ++step) {
    for (auto& one : cases) {
      tessera::comm::barrier(world.control(), "bench");
      const auto begin = std::chrono::steady_clock::now();
      one.run();
      const std::chrono::duration<double, std::milli> elapsed =
          std::chrono::steady_clock::now() - begin;
      if (step >= 0) one.ms.push_back(elapsed.count() / units);
    }
  }
  if (world.rank() != 0) return;
  std::printf("{\"units\": %d, \"gathers_a_step\": %.1f, \"reductions_a_step\": %.1f", units,
              static_cast<double>(runtime.gathers_issued()) / (steps + 3),
              static_cast<double>(runtime.reductions_issued()) / (steps + 3));
  for (auto& one : cases) std::printf(", \"%s_ms\": %.4f", one.name, one.median());
  std::printf(", \"ratio\": %.3f}\n", cases[0].median() / cases[1].median());
}

}  // namespace

int main(int argc, char** argv) {
  const int units = argc > 1 ? std::atoi(argv[1]) : 200;
  const int steps = argc > 2 ? std::atoi(argv[2]) : 20;
  return tessera::launch(2, [&](tessera::World& world) { run(world, units, steps); });
}
