// Attention of one layer, alone: nn::causal_attention and PyTorch's scaled_dot_product_attention on
// the same values, forward and backward, in turns. Then rows that are packed of documents, compared with
// PyTorch's on the documents as rows of a batch.
//
//   attention [ROUNDS [THREADS]]
//
// Prints one line a case: medians in ms and their ratio (ours / PyTorch's).
#include "nn/attention/attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

namespace {

constexpr std::int64_t kHeads = 8, kGroups = 4, kHeadDim = 64, kTokens = 4096;

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + std::ssize(values) / 2, values.end());
  return values[values.size() / 2];
}

double ms(const std::function<void()>& act) {
  const auto begin = std::chrono::steady_clock::now();
  act();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

at::Tensor leaf(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::randn(sizes).to(dtype).requires_grad_(true);
}

std::function<void()> ours(std::int64_t rows, std::int64_t positions, at::ScalarType dtype,
                           const at::Tensor& starts) {
  const at::Tensor q = leaf({rows, kGroups, positions, kHeads / kGroups, kHeadDim}, dtype);
  const at::Tensor k = leaf({rows, kGroups, positions, 1, kHeadDim}, dtype);
  const at::Tensor v = leaf({rows, positions, kGroups * kHeadDim}, dtype);
  const at::Tensor grad = at::randn({rows, positions, kHeads * kHeadDim}).to(dtype);
  return [=] { tessera::nn::causal_attention(q, k, v, 0.125, {.begins = starts}).backward(grad); };
}

std::function<void()> theirs(std::int64_t rows, std::int64_t positions, at::ScalarType dtype) {
  const at::Tensor q = leaf({rows, kHeads, positions, kHeadDim}, dtype);
  const at::Tensor k = leaf({rows, kGroups, positions, kHeadDim}, dtype);
  const at::Tensor v = leaf({rows, kGroups, positions, kHeadDim}, dtype);
  const at::Tensor grad = at::randn({rows, kHeads, positions, kHeadDim}).to(dtype);
  return [=] {
    at::scaled_dot_product_attention(q, k, v, /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                     /*is_causal=*/true, 0.125, /*enable_gqa=*/true)
        .backward(grad);
  };
}

/// `documents` of one length in each row; 1: rows are not packed.
void compare(std::int64_t positions, std::int64_t documents, at::ScalarType dtype, int rounds) {
  const std::int64_t rows = kTokens / positions, length = positions / documents;
  at::Tensor starts;
  if (documents > 1) {
    starts = (at::arange(positions).div(length, "floor") * length).expand({rows, positions});
    starts = starts.contiguous();
  }
  const std::function<void()> sides[] = {ours(rows, positions, dtype, starts),
                                         theirs(rows * documents, length, dtype)};
  std::vector<double> times[2];
  for (int round = -2; round < rounds; ++round) {
    for (int side = 0; side < 2; ++side) {
      const double taken = ms(sides[side]);
      if (round >= 0) times[side].push_back(taken);
    }
  }
  const double own = median(times[0]), other = median(times[1]);
  std::printf("%-8s %3lld rows of %5lld, %3lld documents: %8.2f ms, PyTorch %8.2f ms, %.2f\n",
              dtype == at::kFloat ? "fp32" : "bf16", static_cast<long long>(rows),
              static_cast<long long>(positions), static_cast<long long>(documents), own, other,
              own / other);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 15;
  at::set_num_threads(argc > 2 ? std::atoi(argv[2]) : 1);
  at::manual_seed(1);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t positions : {64, 256, 512, 2048}) compare(positions, 1, dtype, rounds);
    for (const std::int64_t documents : {4, 16, 64}) compare(2048, documents, dtype, rounds);
  }
  return 0;
}
