// Shared by the tests of runtime controls: a chain with its plain twin, and counts of collectives.
#pragma once

#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "support/plain.h"
#include "support/quotient.h"

namespace tessera::test {

/// Units entered by a chain of three blocks: the blocks and the root.
inline constexpr int kBlocks = 3;

struct Counts {
  std::int64_t gathers = 0;
  std::int64_t reductions = 0;
  bool operator==(const Counts&) const = default;
};

inline void PrintTo(const Counts& counts, std::ostream* out) {
  *out << counts.gathers << " gathers, " << counts.reductions << " reductions";
}

/// As plain_gradients of fp32 parameters; with replicas sums are formed over shards, then over
/// them.
inline Tensors plain_gradients_over(torch::nn::Module& module, World& world, int replicas,
                                    double divide,
                                    const std::function<void(int rank)>& forward_backward) {
  const int shards = world.size() / replicas;
  Tensors result;
  for (int replica = 0; replica < replicas; ++replica) {
    const auto sums = plain_gradients(
        module, shards, 1.0, [&](int shard) { forward_backward(replica * shards + shard); });
    for (const auto& [name, sum] : sums) {
      auto& total = result[name];
      total = total.defined() ? total + sum : sum;
    }
  }
  for (auto& [name, total] : result) total = over(total, divide);
  return result;
}

/// A chain of units and the same chain unsharded, which follows its weights.
class Twins {
 public:
  static constexpr std::int64_t kWidth = 5;

  explicit Twins(World& world, int replicas = 1, const PrecisionPolicy& policy = {})
      : world_(world),
        replicas_(replicas),
        plain(1, kBlocks, kWidth),
        model(data_mesh(world, replicas), 1, kBlocks, kWidth, policy) {}

  Sharded<Chain>& handle() { return model.handle; }
  Sharded<Block>& block(std::size_t i) { return *model.chain->handles.at(i); }

  at::Tensor input(int micro_batch) const { return input_of(world_.rank(), micro_batch, kWidth); }

  at::Tensor forward(int micro_batch) { return model.handle.forward(input(micro_batch)); }

  /// Forward and backward of one micro-batch; what they issued.
  Counts run(int micro_batch) {
    const auto before = issued();
    backward(squares(forward(micro_batch)));
    const auto after = issued();
    return {after.gathers - before.gathers, after.reductions - before.reductions};
  }

  /// The gradients of one micro-batch are the plain chain's with the weights of the shards.
  void expect_plain(int micro_batch, const std::string& what = "", double divide = 0) {
    follow();
    expect_same(whole_gradients(model.handle),
                plain_gradients_over(
                    plain, world_, replicas_, divide > 0 ? divide : world_.size(),
                    [&](int rank) {
                      backward(squares(plain.forward(input_of(rank, micro_batch, kWidth))));
                    }),
                concat(what, " micro-batch ", micro_batch));
  }

  /// One step, compared; what it issued.
  Counts step(int number, const std::string& what = "", double divide = 0) {
    model.handle.zero_grad();
    const auto counts = run(number);
    expect_plain(number, what, divide);
    return counts;
  }

  void follow() {
    const at::NoGradGuard no_grad;
    const auto now = whole_parameters(model.handle);
    for (auto& entry : plain.named_parameters()) entry.value().copy_(now.at(entry.key()));
  }

  Counts issued() {
    auto& runtime = model.handle.unit()->runtime();
    return {runtime.gathers_issued(), runtime.reductions_issued()};
  }

 private:
  World& world_;
  int replicas_;

 public:
  Chain plain;
  ShardedChain model;
};

}  // namespace tessera::test
