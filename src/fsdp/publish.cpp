// Gradients at the end of a backward: who used what, the replica sum, the final cast, `.grad` of
// the shards; and at the beginning of the next one what the user did to them.
#include <ATen/ATen.h>

#include <set>

#include "fsdp/integrity.h"
#include "fsdp/runtime.h"
#include "grad/torch_dtype.h"
#include "tessera/error.h"

namespace tessera::fsdp {
namespace {

void see(Parameter& p) {
  p.seen_grad = p.shard.grad();
  p.seen_version = static_cast<std::uint32_t>(p.seen_grad._version());
}

bool is_changed(const Parameter& p, const Bucket& bucket) {
  const auto& grad = p.shard.grad();
  if (!grad.is_same(p.seen_grad)) return true;
  // Changes of a view of the accumulator are in the sum already.
  if (bucket.final_is_accumulator() && bucket.accumulator().defined() &&
      grad.is_alias_of(bucket.accumulator()))
    return false;
  return static_cast<std::uint32_t>(grad._version()) != p.seen_version;
}

}  // namespace

/// One bitmap a step: a parameter that is used on any rank has a gradient on all (zeros elsewhere);
/// one that is used nowhere has none, and the optimizer skips it, as unsharded. [Note: unused]
void Runtime::agree_on_used() {
  if (data_group_ == nullptr) return;
  std::vector<bool> used;
  for (const auto* unit : units_) {
    for (const auto& p : unit->parameters()) used.push_back(p->used);
  }
  if (used.empty()) return;
  used = comm::any_of_ranks(*data_group_, used, "used parameters");
  std::size_t i = 0;
  for (auto* unit : units_) {
    for (auto& p : unit->parameters()) p->used = used[i++];
  }
}

void Runtime::publish() {
  const bool any =
      std::any_of(units_.begin(), units_.end(), [](const auto* unit) { return unit->unpublished; });
  // A partial sum over replicas waits in the accumulators.
  if (!any || (replicas_ != nullptr && !requires_replica_reduce_)) return;
  agree_on_used();
  std::vector<Bucket*> finals;
  for (auto* unit : units_) {
    if (!unit->unpublished) continue;
    for (auto& bucket : unit->buckets()) {
      if (bucket->trainable() && bucket->has_sum()) finals.push_back(bucket.get());
    }
  }
  if (replicas_ != nullptr) {
    comm::Batch batch;
    batch.label = {comm::Kind::kAllReduce, "replicas", 0, 0, controls()};
    for (auto* bucket : finals) bucket->begin_replica_reduce(batch);
    if (!batch.ops.empty()) queue().submit(*replicas_, std::move(batch)).wait();
    for (auto* bucket : finals) bucket->finish_replica_reduce();
  }
  for (auto* bucket : finals) bucket->finish_final(loss_scale_);
  for (auto* unit : units_) {
    if (!unit->unpublished) continue;
    unit->unpublished = false;
    for (auto& p : unit->parameters()) {
      if (!p->contract.trainable || (!p->used && !p->published)) continue;
      const auto& bucket = unit->bucket_of(*p);
      const auto owned = p->owned();
      const auto begin =
          owned.empty() ? 0 : bucket.plan().offset_in_slice(p->placed(), bucket.rank());
      // A version counter of its own: what the user changes is this gradient, not the whole bucket.
      p->shard.mutable_grad() =
          bucket.final_gradient().narrow(0, begin, owned.size()).variable_data();
      see(*p);
      p->published = true;
      p->used = false;
    }
  }
}

/// The user's `.grad` takes the place of the parameter's sum.
void Runtime::import_changed(Unit& unit, Parameter& p) {
  const auto& grad = p.shard.grad();
  auto& bucket = unit.bucket_of(p);
  TESSERA_CHECK(grad.sizes() == p.shard.sizes(), ErrorKind::kContract, "gradient of ",
                p.contract.name, ": found shape ", grad.sizes(), " on the shard, expected ",
                p.shard.sizes());
  const bool waiting = unit.unpublished || bucket.has_unpublished_arrivals();
  TESSERA_CHECK(!waiting || !grad.any().item<bool>(), ErrorKind::kUsage, "gradient of ",
                p.contract.name,
                ": found it changed while micro-batches of this step wait to be added to it, "
                "expected changes only "
                "after a backward that reduces; change it after the last micro-batch, or zero it");
  const auto factor = p.contract.reductions.divide_factor * loss_scale_;
  bucket.import_accumulator(p.place, grad.to(to_scalar_type(p.contract.accumulate)).mul(factor));
  p.published = true;
}

void Runtime::import_user_changes() {
  const at::NoGradGuard no_grad;
  for (auto* unit : units_) {
    check_integrity(*unit);
    std::vector<bool> keeps(unit->buckets().size(), false);
    for (auto& p : unit->parameters()) {
      if (!p->contract.trainable) continue;
      auto& bucket = unit->bucket_of(*p);
      const auto& grad = p->shard.grad();
      if (!grad.defined()) {
        // zero_grad(set_to_none): a new sum begins. Without a publication the sum is one that still
        // waits.
        if (p->published) {
          finish_reductions_of(*unit);
          bucket.reset_accumulator(p->place);
        }
        keeps[p->bucket] = keeps[p->bucket] || (!p->published && bucket.has_sum());
        p->published = false;
        p->seen_grad = at::Tensor();
        continue;
      }
      keeps[p->bucket] = true;
      if (p->published && !rescaled_ && !is_changed(*p, bucket)) continue;
      finish_reductions_of(*unit);
      import_changed(*unit, *p);
      see(*p);
    }
    for (std::size_t i = 0; i < keeps.size(); ++i) {
      if (!keeps[i] && unit->buckets()[i]->trainable()) unit->buckets()[i]->reset_accumulator();
    }
  }
  rescaled_ = false;
}

void Runtime::require_whole_sums(const char* what) {
  renew_after_failure();
  require_idle(what);
  require_synced(what);
}

void Runtime::require_synced(const char* what) const {
  require_reduced(what);
  for (const auto* unit : units_) {
    TESSERA_CHECK(!unit->owed && !unit->unpublished, ErrorKind::kUsage, what,
                  ": found micro-batches whose gradients wait to be reduced in ",
                  unit->shown_name(),
                  ", expected none; run the last one with set_requires_gradient_sync(true) and "
                  "set_requires_replica_reduce(true) first");
  }
}

void Runtime::set_loss_scale(double scale, const char* what) {
  if (scale == loss_scale_) return;
  require_whole_sums(what);
  loss_scale_ = scale;
  controls_changed();
  rescaled_ = true;
}

}  // namespace tessera::fsdp
