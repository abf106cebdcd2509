// One layer of the dense model of bench/fsdp2_compare, forward and backward, in fp32 on one rank
// and one thread, at 16, 64, 128 and 512 tokens: what it takes when products are written into their
// slots, when they are formed elsewhere and copied there (a `grad_dtype` that is theirs rounds nothing
// and asks for that), unsharded, replayed, and as a program written by hand (layer_program.h). In
// turns; prints a line of JSON for each number of tokens,
// with medians of CPU milliseconds, and median, least and largest ratio of neighbours.
//
//   layer_step [TURNS]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <tessera/tessera.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "layer_program.h"
#include "models/decoder_layer.h"
#include "nn/parameter.h"

namespace {

using tessera::models::DecoderLayer;

tessera::models::ModelSpec spec_of_dense() {
  tessera::models::ModelSpec spec;
  spec.family = tessera::models::Family::kQwen3;
  spec.vocab_size = 8192;
  spec.hidden_size = 384;
  spec.num_hidden_layers = 8;
  spec.num_attention_heads = 6;
  spec.num_key_value_heads = 2;
  spec.head_dim = 64;
  spec.intermediate_size = 1024;
  return spec;
}

std::shared_ptr<DecoderLayer> new_layer() {
  const auto spec = spec_of_dense();
  const auto rope =
      std::make_shared<tessera::nn::Rope>(tessera::nn::RopeOptions{.theta = 1e4}, spec.head_dim);
  auto layer = std::make_shared<DecoderLayer>(spec, 0, tessera::models::local_sizes(spec), rope);
  tessera::nn::materialize(*layer);
  const at::NoGradGuard no_grad;
  at::manual_seed(1);
  for (auto& item : layer->named_parameters()) item.value().uniform_(-0.05, 0.05);
  return layer;
}

double cpu_ms() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

struct Case {
  const char* name;
  std::function<void(const at::Tensor& x, const at::Tensor& grad)> step;
  std::function<void()> clear;
  std::vector<double> ms = {};
};

template <class M>
Case case_of(const char* name, std::shared_ptr<M> layer) {
  return {name,
          [layer](const at::Tensor& x, const at::Tensor& grad) {
            torch::autograd::backward({layer->forward(x, {}, {}).x}, {grad});
          },
          [layer] { layer->zero_grad(); }};
}

constexpr std::size_t kCases = 5;

/// The same numbers as the layer's own, to the bit.
Case case_of_program(const std::shared_ptr<DecoderLayer>& layer) {
  struct Programs {
    std::map<std::string, at::Tensor> weights;
    std::map<std::int64_t, std::unique_ptr<tessera::bench::LayerProgram>> by_tokens;
  };
  const auto programs = std::make_shared<Programs>();
  for (const auto& item : layer->named_parameters()) {
    programs->weights.emplace(item.key(), item.value().detach());
  }
  const auto step = [programs, layer](const at::Tensor& x, const at::Tensor& grad) {
    auto& program = programs->by_tokens[x.size(1)];
    if (program != nullptr) {
      program->step(x.detach(), grad);
      return;
    }
    const auto spec = spec_of_dense();
    const tessera::bench::LayerSizes sizes{.tokens = x.size(1),
                                           .hidden = spec.hidden_size,
                                           .heads = spec.num_attention_heads,
                                           .kv_heads = spec.num_key_value_heads,
                                           .head_dim = spec.head_dim,
                                           .inner = spec.intermediate_size,
                                           .eps = spec.rms_norm_eps};
    tessera::nn::Rope rope(tessera::nn::RopeOptions{.theta = 1e4}, spec.head_dim);
    program = std::make_unique<tessera::bench::LayerProgram>(
        sizes, programs->weights, rope.table(x.size(1), at::kFloat, at::kCPU));
    const auto [result, grad_x] = program->step(x.detach(), grad);
    const at::Tensor expected = layer->forward(x, {}).x;
    torch::autograd::backward({expected}, {grad});
    TORCH_CHECK(at::equal(result, expected) && at::equal(grad_x, x.grad()), "another result");
    for (const auto& item : layer->named_parameters()) {
      TORCH_CHECK(at::equal(program->slots().at(item.key()), item.value().grad()), item.key(),
                  ": another gradient");
    }
    layer->zero_grad();
  };
  return {"program", step, [] {}};
}

void measure(std::array<Case, kCases>& cases, std::int64_t tokens, int turns) {
  const at::Tensor x = at::randn({1, tokens, spec_of_dense().hidden_size});
  const at::Tensor grad = at::randn_like(x);
  constexpr int kWarm = 5;
  for (auto& one : cases) one.ms.clear();
  for (int turn = -kWarm; turn < turns; ++turn) {
    for (std::size_t i = 0; i < cases.size(); ++i) {
      auto& one = cases.at((i + static_cast<std::size_t>(turn + kWarm)) % cases.size());
      const at::Tensor leaf = x.detach().requires_grad_();
      const double begin = cpu_ms();
      one.step(leaf, grad);
      const double end = cpu_ms();
      if (turn >= 0) one.ms.push_back(end - begin);
      one.clear();
    }
  }
  std::printf("{\"tokens\": %lld", static_cast<long long>(tokens));
  for (const auto& one : cases) std::printf(", \"%s_ms\": %.3f", one.name, median(one.ms));
  for (std::size_t other = 1; other < cases.size(); ++other) {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < cases[0].ms.size(); ++i) {
      ratios.push_back(cases[0].ms[i] / cases.at(other).ms[i]);
    }
    const auto [least, largest] = std::ranges::minmax(ratios);
    std::printf(", \"%s_over_%s\": [%.3f, %.3f, %.3f]", cases[0].name, cases.at(other).name,
                median(ratios), least, largest);
  }
  std::printf("}\n");
  std::fflush(stdout);
}

void run(tessera::World& world, int turns) {
  at::set_num_threads(1);
  const auto mesh = world.mesh(tessera::MeshShape::dense(1, 1, world.size(), 1, 1));
  tessera::PrecisionRule asked;
  asked.match = {"*"};
  asked.grad_dtype = tessera::DType::kFloat32;
  tessera::PrecisionPolicy copied;
  copied.rules = {asked};
  const auto sharded = [&](const tessera::PrecisionPolicy& policy) {
    return std::make_shared<tessera::Sharded<DecoderLayer>>(
        tessera::fully_shard(new_layer(), mesh, policy));
  };
  const auto replayed = sharded({});
  tessera::compile(*replayed, {.mode = tessera::CompileMode::kReplay});
  std::array<Case, kCases> cases = {
      case_of("replayed", replayed), case_of_program(new_layer()), case_of("direct", sharded({})),
      case_of("copied", sharded(copied)), case_of("unsharded", new_layer())};
  for (const std::int64_t tokens : {16, 64, 128, 512}) measure(cases, tokens, turns);
}

}  // namespace

int main(int argc, char** argv) {
  const int turns = argc > 1 ? std::atoi(argv[1]) : 200;
  return tessera::launch(1, [&](tessera::World& world) { run(world, turns); });
}
