// The gated delta rule of one layer of Qwen3-Next, alone: forward and backward of
// nn::gated_delta_rule. bench/delta_rule.py compares it with transformers' chunked form.
//
//   delta_rule [ROUNDS] [POSITIONS] [THREADS]
//
// fp32, 1 row, 16 key heads, 32 value heads, heads of 128. Prints one line of JSON: medians in ms, and
// the MiB by which the process grew over its inputs and their gradients.
#include "nn/state/delta_rule.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

namespace nn = tessera::nn;

constexpr std::int64_t kKeyHeads = 16, kHeads = 32, kHeadDim = 128;

double ms_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double peak_mib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024.0;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 5;
  const std::int64_t positions = argc > 2 ? std::atoi(argv[2]) : 2048;
  at::set_num_threads(argc > 3 ? std::atoi(argv[3]) : 2);
  at::manual_seed(0);
  const std::vector<std::int64_t> keys{1, positions, kKeyHeads, kHeadDim};
  const std::vector<std::int64_t> values{1, positions, kHeads, kHeadDim};
  const std::vector<std::int64_t> gates{1, positions, kHeads};
  const nn::DeltaInputs in{at::randn(keys).requires_grad_(), at::randn(keys).requires_grad_(),
                           at::randn(values).requires_grad_(),
                           at::rand(gates).mul_(-0.2).requires_grad_(),
                           at::rand(gates).requires_grad_()};
  const at::Tensor grad = at::randn(values);
  for (const at::Tensor& x : {in.q, in.k, in.v, in.decay, in.beta}) {
    x.mutable_grad() = at::zeros_like(x);
  }
  const double before = peak_mib();
  std::vector<double> forward, backward;
  for (int round = 0; round < rounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    const at::Tensor out = nn::gated_delta_rule(in, {});
    forward.push_back(ms_since(begin));
    const auto middle = std::chrono::steady_clock::now();
    out.backward(grad);
    backward.push_back(ms_since(middle));
  }
  std::printf("{\"forward\": %.1f, \"backward\": %.1f, \"mib\": %.0f}\n", median(forward),
              median(backward), peak_mib() - before);
  return 0;
}
