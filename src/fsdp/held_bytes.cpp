#include "fsdp/held_bytes.h"

#include <algorithm>
#include <set>

#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"

namespace tessera::fsdp {
namespace {

/// Sums the storages of tensors, each once.
class Memories {
 public:
  void add(const at::Tensor& tensor) {
    if (!tensor.defined() || !seen_.insert(tensor.storage().unsafeGetStorageImpl()).second) return;
    bytes_ += static_cast<std::int64_t>(tensor.storage().nbytes());
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::set<const c10::StorageImpl*> seen_;
  std::int64_t bytes_ = 0;
};

}  // namespace

HeldBytes held_bytes(const ShardedBase& model) {
  HeldBytes held;
  Memories shards, gradients;
  Runtime& runtime = model.unit()->runtime();
  for (const Unit* unit : runtime.units()) {
    for (const auto& bucket : unit->buckets()) {
      shards.add(bucket->shard());
      gradients.add(bucket->accumulator());
      gradients.add(bucket->final_memory());
    }
  }
  for (const ShardView& view : model.shards()) gradients.add(view.shard.grad());
  held.unsharded = unsharded_bytes(model);
  held.shards = shards.bytes();
  held.gradients = gradients.bytes();
  held.pool = pool_bytes(model);
  return held;
}

std::int64_t unsharded_bytes(const ShardedBase& model) {
  std::int64_t bytes = 0;
  for (const Unit* unit : model.unit()->runtime().units()) {
    if (!unit->gathered() && !unit->gather_pending()) continue;
    for (const auto& bucket : unit->buckets()) {
      if (!bucket->aliases_shard()) bytes += layout::gathered_bytes(bucket->plan());
    }
  }
  return bytes;
}

std::int64_t pool_bytes(const ShardedBase& model) {
  return model.unit()->runtime().pool()->total_bytes();
}

OptimizerBytes held_bytes(const Optimizer& optimizer) {
  Memories moments, masters;
  const auto states = optimizer.states();
  for (const auto& state : optimizer.state()) {
    for (const auto& kept : state.kept) {
      const bool is_moment =
          std::ranges::any_of(states, [&](const auto& one) { return one.name == kept.name; });
      (is_moment ? moments : masters).add(kept.values);
    }
  }
  return {moments.bytes(), masters.bytes()};
}

}  // namespace tessera::fsdp
