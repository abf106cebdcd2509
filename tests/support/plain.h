// Makes what sharded results are compared with: the same modules unsharded, and sums formed rank
// by rank.
#pragma once

#include <torch/csrc/autograd/autograd.h>

#include "support/modules.h"
#include "support/quotient.h"
#include "support/test.h"
#include "tessera/optim.h"
#include "tessera/recompute.h"
#include "tessera/shard.h"

namespace tessera::test {

using Tensors = std::map<std::string, at::Tensor>;

inline void backward(const at::Tensor& loss) { torch::autograd::backward({loss}, {}); }
inline void backward_and_keep_graph(const at::Tensor& loss) {
  torch::autograd::backward({loss}, {}, /*retain_graph=*/true);
}

/// 16-bit shards are stepped as they are, without a master: what SGD does, here and in PyTorch.
PrecisionPolicy without_master();

/// Computes in bf16, for any dtype of storage.
PrecisionPolicy in_bfloat16();

/// Gradients are sums over the ranks.
ShardOptions undivided();

inline at::Tensor squares(const at::Tensor& y) { return y.to(at::kFloat).pow(2).sum(); }

inline at::Tensor input_of(int rank, int step, std::int64_t width) {
  return seeded(static_cast<std::uint64_t>(1000 + 100 * step + rank), {3, width});
}

/// Returns what each rank's `body` throws. One that fails ends the others' waits, so they may say
/// something else.
std::vector<std::string> errors_of(int count, const std::function<void(World&)>& body,
                                   ThreadBackend backend = ThreadBackend::kInProcess);

Tensors whole_gradients(const ShardedBase& handle);

Tensors whole_parameters(const ShardedBase& handle);

void expect_same(const Tensors& found, const Tensors& expected, const std::string& what = "");

/// One rank's raw gradients of the plain module; parameters that were not used are missing.
Tensors raw_gradients(torch::nn::Module& module, const std::function<void()>& forward_backward);

/// Returns sums over ranks in rank order in fp32, those of a replica first, over `divide`, in the
/// parameter's dtype; zeros where no rank used it.
Tensors plain_gradients(torch::nn::Module& module, int ranks, double divide,
                        const std::function<void(int rank)>& forward_backward, int replicas = 1);

/// The mean over ranks of what each one's squares(forward(input_of(rank, step, width))) gives.
template <class Module>
Tensors gradients_of_squares(Module& plain, int ranks, int step, std::int64_t width,
                             int replicas = 1) {
  const auto run = [&](int rank) { backward(squares(plain.forward(input_of(rank, step, width)))); };
  return plain_gradients(plain, ranks, ranks, run, replicas);
}

/// x + b relu(a x); its weights are needed in backward. Optionally recomputed inside
/// (unit(checkpoint(block))).
class Block : public torch::nn::Module {
 public:
  Block(std::uint64_t seed, std::int64_t width, at::ScalarType dtype = at::kFloat)
      : a(register_parameter("a", seeded(seed, {width + 1, width}, dtype))),
        b(register_parameter("b", seeded(seed + 1, {width, width + 1}, dtype))) {}

  at::Tensor forward(const at::Tensor& x);

  at::Tensor body(const at::Tensor& x) const;

  at::Tensor a, b;
  bool recomputes = false;
  double dropout = 0;  ///< from libtorch's process-wide generator: on one rank only
  int calls = 0;
  std::function<void()> before;  ///< runs inside the forward, before the block computes
};

/// block0, block1, ... and a scale of its own; blocks may be units.
class Chain : public torch::nn::Module {
 public:
  Chain(std::uint64_t seed, int count, std::int64_t width, at::ScalarType dtype = at::kFloat)
      : scale(register_parameter("scale", seeded(seed, {width}) + 1.0)) {
    for (int i = 0; i < count; ++i) {
      const auto block_seed = seed + 10 * static_cast<std::uint64_t>(i + 1);
      blocks.push_back(
          register_module(concat("block", i), std::make_shared<Block>(block_seed, width, dtype)));
    }
  }

  /// Every block a unit of its own from now on.
  void shard_blocks(const Mesh& mesh, const PrecisionPolicy& policy = {},
                    const ShardOptions& options = {});

  at::Tensor call(std::size_t i, const at::Tensor& x) {
    return handles.empty() ? blocks[i]->forward(x) : handles[i]->forward(x);
  }

  at::Tensor forward(const at::Tensor& x);

  std::vector<std::shared_ptr<Block>> blocks;
  std::vector<std::shared_ptr<Sharded<Block>>> handles;
  at::Tensor scale;
  int skip = -1;
  bool recomputes_outside = false;
};

/// A chain whose blocks are units inside a root unit.
struct ShardedChain {
  ShardedChain(const Mesh& mesh, std::uint64_t seed, int count, std::int64_t width,
               const PrecisionPolicy& policy = {}, const ShardOptions& root = {},
               const ShardOptions& inner = {})
      : chain(std::make_shared<Chain>(seed, count, width)),
        handle((chain->shard_blocks(mesh, policy, inner), fully_shard(chain, mesh, policy, root))) {
  }
  std::shared_ptr<Chain> chain;
  Sharded<Chain> handle;
};

SgdOptions sgd(double lr, double momentum = 0.0, double weight_decay = 0.0);

AdamWOptions adamw(double lr, double weight_decay = 0.1);

}  // namespace tessera::test
