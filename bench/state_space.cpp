// The state-space dual of one Mamba-2 layer alone: nn::state_space, forward and backward.
//
//   state_space [ROUNDS [THREADS]]
//
// fp32, one row of 2048 positions, 64 heads of 64, 8 groups, state 128, the sizes of
// nemotron-3-nano. Prints one line of JSON, medians in ms by chunk. bench/state_space.py has the
// same sizes.
#include "nn/state/state_space.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr std::int64_t kPositions = 2048, kHeads = 64, kHeadDim = 64, kGroups = 8, kState = 128;

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + std::ssize(values) / 2, values.end());
  return values[values.size() / 2];
}

double ms_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

at::Tensor leaf(const at::Tensor& values) { return values.detach().requires_grad_(true); }

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 10;
  at::set_num_threads(argc > 2 ? std::atoi(argv[2]) : 1);
  at::manual_seed(1);
  const tessera::nn::StateSpaceInputs in{leaf(at::randn({1, kPositions, kHeads, kHeadDim})),
                                         leaf(at::rand({1, kPositions, kHeads}) * 0.1),
                                         leaf(-at::linspace(1, 16, kHeads)),
                                         leaf(at::randn({1, kPositions, kGroups, kState})),
                                         leaf(at::randn({1, kPositions, kGroups, kState})),
                                         leaf(at::randn({kHeads}))};
  const at::Tensor grad = at::randn_like(in.x);
  const char* separator = "{";
  for (const std::int64_t chunk : {64, 128, 256}) {
    std::vector<double> forward, backward;
    for (int round = -1; round < rounds; ++round) {
      const auto begin = std::chrono::steady_clock::now();
      const at::Tensor y = tessera::nn::state_space(in, chunk, {});
      const double taken = ms_since(begin);
      const auto then = std::chrono::steady_clock::now();
      y.backward(grad);
      if (round < 0) continue;
      forward.push_back(taken);
      backward.push_back(ms_since(then));
    }
    std::printf("%s\"%lld\": [%.2f, %.2f]", separator, static_cast<long long>(chunk),
                median(forward), median(backward));
    separator = ", ";
  }
  std::printf("}\n");
  return 0;
}
