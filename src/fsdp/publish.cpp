// Gradients at the end of a backward: who used what, the replica sum, the final cast, `.grad` of the shards;
// and at the beginning of the next one what the user did to them.
#include <ATen/ATen.h>

#include <set>

#include "fsdp/runtime.h"
#include "tessera/error.h"

namespace tessera::fsdp {

/// One bitmap a step: a parameter that is used on any rank has a gradient on all (zeros elsewhere); one that
/// is used nowhere has none, and the optimizer skips it, as unsharded. [Note: unused]
void Runtime::agree_on_used() {
  if (data_group_ == nullptr) return;
  std::vector<std::uint8_t> used;
  for (const auto* unit : units_) {
    for (const auto& p : unit->parameters()) used.push_back(p->used ? 1 : 0);
  }
  if (used.empty()) return;
  std::string mine(used.begin(), used.end());
  for (const auto& other : comm::all_gather_bytes(*data_group_, mine, "used parameters")) {
    TESSERA_INVARIANT(other.size() == used.size(), "bitmaps of other lengths");
    for (std::size_t i = 0; i < used.size(); ++i) used[i] |= static_cast<std::uint8_t>(other[i]);
  }
  std::size_t i = 0;
  for (auto* unit : units_) {
    for (auto& p : unit->parameters()) p->used = used[i++] != 0;
  }
}

void Runtime::publish() {
  bool any = false;
  for (const auto* unit : units_) any = any || unit->reduced;
  if (!any) return;
  agree_on_used();
  std::vector<Bucket*> finals;
  for (auto* unit : units_) {
    if (!unit->reduced) continue;
    for (auto& bucket : unit->buckets()) {
      if (bucket->trainable() && bucket->has_sum()) finals.push_back(bucket.get());
    }
  }
  if (groups_.replicas != nullptr) {
    if (!requires_replica_reduce_) return;  // the partial sum waits in the accumulator
    comm::Batch batch;
    batch.label = {comm::Kind::kAllReduce, "replicas", 0, 0};
    for (auto* bucket : finals) bucket->begin_replica_reduce(batch);
    if (!batch.ops.empty()) queue().submit(*groups_.replicas, std::move(batch)).wait();
  }
  for (auto* bucket : finals) bucket->finish_final();
  for (auto* unit : units_) {
    if (!unit->reduced) continue;
    for (auto& p : unit->parameters()) {
      if (!p->contract.trainable || (!p->used && !p->published)) continue;
      auto& bucket = unit->bucket_of(*p);
      const auto owned = p->owned();
      const auto& flat = bucket.finish_final();
      auto grad = flat.narrow(0, owned.empty() ? 0 : bucket.plan().offset_in_slice(p->placed(), bucket.rank()),
                              owned.size());
      p->shard.mutable_grad() = grad;
      p->grad_impl = grad.unsafeGetTensorImpl();
      p->grad_version = static_cast<std::uint32_t>(grad._version());
      p->published = true;
      p->used = false;
    }
  }
}

void Runtime::import_user_changes() {
  const at::NoGradGuard no_grad;
  for (auto* unit : units_) {
    std::vector<bool> keeps(unit->buckets().size(), false);
    for (auto& p : unit->parameters()) {
      if (!p->contract.trainable) continue;
      auto& bucket = unit->bucket_of(*p);
      const auto& grad = p->shard.grad();
      if (!grad.defined()) {
        // zero_grad(set_to_none): a new sum begins. Without a publication the sum is one that still waits.
        if (p->published) bucket.reset_accumulator(p->place);
        keeps[p->bucket] = keeps[p->bucket] || (!p->published && bucket.has_sum());
        p->published = false;
        continue;
      }
      keeps[p->bucket] = true;
      const bool ours = p->published && grad.unsafeGetTensorImpl() == p->grad_impl;
      const bool unchanged = ours && static_cast<std::uint32_t>(grad._version()) == p->grad_version;
      if (unchanged || (ours && bucket.final_is_accumulator())) continue;
      TESSERA_CHECK(grad.sizes() == p->shard.sizes(), ErrorKind::kContract, "gradient of ",
                    p->contract.name, ": found shape ", grad.sizes(), " on the shard, expected ",
                    p->shard.sizes());
      bucket.import_accumulator(
          p->place, grad.to(bucket.accumulator().scalar_type()).mul(p->contract.reductions.divide_factor));
      p->published = true;
    }
    for (std::size_t i = 0; i < keeps.size(); ++i) {
      if (!keeps[i] && unit->buckets()[i]->trainable()) unit->buckets()[i]->reset_accumulator();
    }
  }
}

}  // namespace tessera::fsdp
