// What it costs that a unit's parameters have two dtypes: units that compute half of their elements
// in bf16 and half in fp32, compared with units of the same tensors all in bf16, and all in fp32. Those
// two together gather, reduce and hold exactly twice what a mixed one does, so the ratio is
// 2 x mixed / (bf16 + fp32), taken round by round, the three in turns. Nothing is computed: a
// forward reads its parameters, a backward hands over gradients that are there. Prints one line of
// JSON; leaves with 3 where the median ratio of times is above 1.05 or that of bytes above 1.03.
//
//   mixed_unit [UNITS] [ROUNDS]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <tessera/tessera.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "comm/group.h"
#include "fsdp/runtime/runtime.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int kTensors = 8;  // of each half
constexpr std::int64_t kRows = 256;
constexpr std::int64_t kColumns = 512;
constexpr double kMostTime = 1.05;
constexpr double kMostBytes = 1.03;

/// x, as far as values go; the gradient of the parameter is `ready`.
struct Probe : torch::autograd::Function<Probe> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& /*parameter*/, const at::Tensor& ready) {
    context->saved_data["ready"] = ready;
    return x.clone();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {gradients[0], context->saved_data["ready"].toTensor(), at::Tensor()};
  }
};

struct Layer : torch::nn::Module {
  Layer() {
    for (int i = 0; i < kTensors; ++i) {
      for (const char* half : {"narrow", "wide"}) {
        parameters_here.push_back(
            register_parameter(half + std::to_string(i), at::randn({kRows, kColumns})));
      }
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    if (ready.empty()) {
      for (const auto& parameter : parameters_here) ready.push_back(at::ones_like(parameter));
    }
    auto y = x;
    for (std::size_t i = 0; i < ready.size(); ++i)
      y = Probe::apply(y, parameters_here[i], ready[i]);
    return y;
  }
  variable_list parameters_here;
  variable_list ready;  // in the compute dtypes
};

struct Chain : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    auto y = x;
    for (auto& layer : layers) y = layer->forward(y);
    return y;
  }
  std::vector<std::shared_ptr<tessera::Sharded<Layer>>> layers;
};

/// Bytes that this thread took from libtorch's allocator and has not freed.
struct Held : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void* /*ptr*/, std::int64_t bytes, std::size_t /*allocated*/,
                         std::size_t /*reserved*/, c10::Device /*device*/) override {
    now += bytes;
    most = std::max(most, now);
  }
  bool memoryProfilingEnabled() const override { return true; }
  std::int64_t now = 0;
  std::int64_t most = 0;
};

struct Case {
  const char* name;
  tessera::PrecisionPolicy policy;
  std::shared_ptr<tessera::Sharded<Chain>> model = {};
  std::shared_ptr<Held> held = std::make_shared<Held>();
  std::vector<double> ms = {};

  void make(const tessera::Mesh& mesh, int units) {
    const c10::DebugInfoGuard counts(c10::DebugInfoKind::PROFILER_STATE, held);
    auto chain = std::make_shared<Chain>();
    for (int i = 0; i < units; ++i) {
      chain->layers.push_back(std::make_shared<tessera::Sharded<Layer>>(
          tessera::fully_shard(std::make_shared<Layer>(), mesh, policy)));
      chain->register_module(std::to_string(i), chain->layers.back());
    }
    model = std::make_shared<tessera::Sharded<Chain>>(tessera::fully_shard(chain, mesh));
    held->most = held->now;  // the modules' own values are gone
  }
  void step(const at::Tensor& x) const {
    const c10::DebugInfoGuard counts(c10::DebugInfoKind::PROFILER_STATE, held);
    torch::autograd::backward({model->forward(x).sum()}, {});
    model->zero_grad();
  }
};

double at_part(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(part * static_cast<double>(values.size() - 1))];
}

tessera::PrecisionPolicy in_bfloat16() {
  tessera::PrecisionPolicy policy;
  policy.param_dtype = tessera::DType::kBFloat16;
  return policy;
}

tessera::PrecisionPolicy half_in_float32() {
  auto policy = in_bfloat16();
  tessera::PrecisionRule wide;
  wide.match = {"wide*"};
  wide.param_dtype = tessera::DType::kFloat32;
  policy.rules = {wide};
  return policy;
}

int run(tessera::World& world, int units, int rounds) {
  at::set_num_threads(1);
  const auto mesh = world.mesh(tessera::MeshShape::dense(1, 1, world.size(), 1, 1));
  Case cases[] = {{"mixed", half_in_float32()}, {"bf16", in_bfloat16()}, {"fp32", {}}};
  const auto x = at::ones({4}).set_requires_grad(true);
  for (auto& one : cases) one.make(mesh, units);
  for (int round = -3; round < rounds; ++round) {
    for (auto& one : cases) {
      tessera::comm::barrier(world.control(), "bench");
      const auto begin = std::chrono::steady_clock::now();
      one.step(x);
      tessera::comm::barrier(world.control(), "bench");
      const std::chrono::duration<double, std::milli> elapsed =
          std::chrono::steady_clock::now() - begin;
      if (round >= 0) one.ms.push_back(elapsed.count() / units);
    }
  }
  const auto& [mixed, narrow, wide] = cases;
  std::vector<double> ratios;
  for (std::size_t i = 0; i < mixed.ms.size(); ++i) {
    ratios.push_back(2 * mixed.ms[i] / (narrow.ms[i] + wide.ms[i]));
  }
  const double bytes = 2 * static_cast<double>(mixed.held->most) /
                       static_cast<double>(narrow.held->most + wide.held->most);
  if (world.rank() == 0) {
    std::printf("{\"units\": %d, \"rounds\": %d", units, rounds);
    for (const auto& one : cases) {
      std::printf(", \"%s_ms\": %.3f, \"%s_held_mib\": %.2f", one.name, at_part(one.ms, 0.5),
                  one.name, static_cast<double>(one.held->most) / (1 << 20));
    }
    std::printf(", \"time_ratio\": %.3f, \"p10\": %.3f, \"p90\": %.3f, \"bytes_ratio\": %.4f}\n",
                at_part(ratios, 0.5), at_part(ratios, 0.1), at_part(ratios, 0.9), bytes);
    if (at_part(ratios, 0.5) > kMostTime || bytes > kMostBytes) return 3;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const int units = argc > 1 ? std::atoi(argv[1]) : 4;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 30;
  static int code = 0;
  const int launched =
      tessera::launch(2, [&](tessera::World& world) { code = run(world, units, rounds); });
  return launched != 0 ? launched : code;
}
