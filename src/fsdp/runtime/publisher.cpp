#include "fsdp/runtime/publisher.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "comm/host_read.h"
#include "fsdp/runtime/integrity.h"
#include "fsdp/runtime/unit.h"
#include "grad/torch_dtype.h"
#include "tessera/error.h"
#include "tessera/world.h"

namespace tessera::fsdp {
namespace {

void record_published(Parameter& p) {
  p.seen_grad = p.shard.grad();
  p.seen_version = static_cast<std::uint32_t>(p.seen_grad._version());
}

/// Whether more gradients wait, which the next publication adds to the present one.
bool has_unpublished(const Unit& unit, const Parameter& p) {
  return unit.progress().unpublished || unit.buckets()[p.bucket]->has_arrivals(p.place);
}

/// Whether the user has set the gradient, or it no longer shows the parameter's sum.
bool is_changed(const Unit& unit, const Parameter& p) {
  const auto& grad = p.shard.grad();
  if (!grad.is_same(p.seen_grad)) return true;
  if (static_cast<std::uint32_t>(grad._version()) == p.seen_version) return false;
  // A change of a view of the accumulator changes the sum itself. But gradients that wait may be in
  // other memory, depending on the number of ranks.
  const auto& bucket = *unit.buckets()[p.bucket];
  const bool in_sum = bucket.final_is_accumulator() && bucket.accumulator().defined() &&
                      grad.is_alias_of(bucket.accumulator());
  return !in_sum || has_unpublished(unit, p);
}

// [Note: kept gradients] As in PyTorch a gradient is one tensor as long as it is on its shard:
// later micro-batches are added to it in place, and its version counter shows that. Once it is
// cleared or replaced it belongs to the user, if the user holds it, and the next gradient needs
// other memory. A bucket's gradients share one memory, which each step uses again. Where the user
// holds a part of it, its storage has more references than those of the bucket and of the present
// gradients: then the user keeps this memory for good, and the bucket takes other memory. A step in
// which no gradient is kept allocates and copies nothing.

/// Whether the gradient on the shard is the published one.
bool shows_published(const Parameter& p) {
  const auto& grad = p.shard.grad();
  return grad.defined() && grad.is_same(p.seen_grad);
}

bool is_kept(const Unit& unit, std::size_t bucket, const at::Tensor& memory) {
  if (!memory.defined()) return false;
  std::size_t ours = 1;
  for (const auto& p : unit.parameters()) {
    if (p->bucket == bucket && shows_published(*p) && p->shard.grad().is_alias_of(memory)) ++ours;
  }
  return memory.storage().use_count() > ours;
}

/// Returns the parameter's part of its bucket's final gradient.
at::Tensor final_of(const Unit& unit, const Parameter& p) {
  const auto& bucket = *unit.buckets()[p.bucket];
  const auto owned = p.owned();
  const auto begin = owned.empty() ? 0 : bucket.plan().offset_in_slice(p.placed(), bucket.rank());
  // The part has a separate version counter: the user changes this gradient, not the whole bucket.
  return bucket.final_gradient().narrow(0, begin, owned.size()).variable_data();
}

}  // namespace

/// Moves the sums out of memory that the user keeps, before anything is added to them.
void Publisher::leave_kept_sums(Unit& unit) {
  for (const auto& p : unit.parameters()) {
    if (!shows_published(*p)) p->seen_grad = at::Tensor();
  }
  for (std::size_t i = 0; i < unit.buckets().size(); ++i) {
    auto& bucket = *unit.buckets()[i];
    const auto is_kept_by_user = [&] {
      return bucket.final_is_accumulator() && is_kept(unit, i, bucket.accumulator());
    };
    if (!is_kept_by_user()) continue;
    reducer_.finish(unit);  // reductions under way write to the accumulator, too
    if (!is_kept_by_user()) continue;
    bucket.leave_accumulator();
    for (const auto& p : unit.parameters()) {
      if (p->bucket == i && shows_published(*p))
        p->shard.mutable_grad().set_data(final_of(unit, *p));
    }
  }
}

void Publisher::leave_shown_sums(const Unit& unit) {
  for (std::size_t i = 0; i < unit.buckets().size(); ++i) {
    auto& bucket = *unit.buckets()[i];
    if (bucket.groups().reduce == nullptr || !bucket.final_is_accumulator()) continue;
    const auto& sum = bucket.accumulator();
    const bool is_shown =
        sum.defined() &&
        std::any_of(unit.parameters().begin(), unit.parameters().end(), [&](const auto& p) {
          return p->bucket == i && shows_published(*p) && p->shard.grad().is_alias_of(sum);
        });
    if (is_shown) bucket.leave_accumulator();
  }
}

namespace {

void show_gradient(const Unit& unit, Parameter& p) {
  auto& grad = p.shard.mutable_grad();
  const auto next = final_of(unit, p);
  if (shows_published(p) && grad.scalar_type() == next.scalar_type()) {
    if (!grad.is_alias_of(next) || grad.storage_offset() != next.storage_offset())
      grad.set_data(next);
    grad.unsafeGetTensorImpl()->bump_version();
  } else {
    grad = next;
  }
  record_published(p);
}

}  // namespace

/// Agrees with one bitmap a step: a parameter that any rank used has a gradient on all ranks (zeros
/// elsewhere); one that no rank used has none, and the optimizer skips it, as without sharding.
/// [Note: unused]
void Publisher::agree_on_used() {
  if (groups_.data() == nullptr) return;
  std::vector<bool> used;
  for (const auto* unit : units_) {
    for (const auto& p : unit->parameters()) used.push_back(p->used);
  }
  used = comm::any_of_ranks(*groups_.data(), used, "used parameters");
  std::size_t i = 0;
  for (auto* unit : units_) {
    for (auto& p : unit->parameters()) p->used = used[i++];
  }
}

void Publisher::publish(const ModelControls& controls, const std::string& marks) {
  // Where there are replicas, the accumulators hold partial sums.
  const auto is_partial = [](const std::unique_ptr<Bucket>& bucket) {
    return bucket->trainable() && bucket->groups().replicas != nullptr;
  };
  const bool any_partial = std::ranges::any_of(
      units_, [&](const Unit* unit) { return std::ranges::any_of(unit->buckets(), is_partial); });
  if (any_partial && !controls.requires_replica_reduce) return;
  if (std::none_of(units_.begin(), units_.end(),
                   [](auto* unit) { return unit->progress().unpublished; }))
    return;
  agree_on_used();
  std::vector<Bucket*> finals;
  for (auto* unit : units_) {
    if (!unit->progress().unpublished) continue;
    for (std::size_t i = 0; i < unit->buckets().size(); ++i) {
      auto& bucket = *unit->buckets()[i];
      if (!bucket.trainable() || !bucket.has_sum()) continue;
      if (is_kept(*unit, i, bucket.final_memory())) bucket.leave_final_memory();
      finals.push_back(&bucket);
    }
  }
  // One batch for each group: the replicas first, then the stages with copies.
  std::vector<comm::Group*> partial_over;
  for (const auto* bucket : finals) {
    auto* group = bucket->groups().replicas;
    if (group == nullptr || std::ranges::find(partial_over, group) != partial_over.end()) continue;
    group == groups_.replicas()
        ? static_cast<void>(partial_over.insert(partial_over.begin(), group))
        : partial_over.push_back(group);
  }
  for (auto* group : partial_over) {
    comm::Batch batch;
    const bool is_replicas = group == groups_.replicas();
    batch.label = {comm::Kind::kAllReduce, is_replicas ? "replicas" : "copies", 0, 0,
                   is_replicas ? marks : ""};
    for (auto* bucket : finals) {
      if (bucket->groups().replicas == group) bucket->begin_replica_reduce(batch);
    }
    submit(groups_.world().queue(), *group, std::move(batch), [&] {
      for (const auto* bucket : finals) {
        if (bucket->groups().replicas == group) bucket->fill_replica_reduce();
      }
    }).wait();
  }
  for (auto* bucket : finals) bucket->finish_replica_reduce();
  for (auto* bucket : finals) bucket->finish_final(controls.loss_scale);
  for (auto* unit : units_) {
    if (!unit->progress().unpublished) continue;
    unit->progress_.unpublished = false;
    for (auto& p : unit->parameters()) {
      if (!p->contract.trainable || (!p->used && !p->published)) continue;
      show_gradient(*unit, *p);
      p->published = true;
      p->used = false;
    }
  }
}

/// Replaces the parameter's sum by the user's `.grad`.
void Publisher::import_changed(Unit& unit, Parameter& p, const ModelControls& controls) {
  const auto& grad = p.shard.grad();
  auto& bucket = unit.bucket_of(p);
  require_gradient_here(grad, p.shard, p.contract.name);
  TESSERA_CHECK(grad.sizes() == p.shard.sizes(), ErrorKind::kContract, "gradient of ",
                p.contract.name, ": found shape ", grad.sizes(), " on the shard, expected ",
                p.shard.sizes());
  // Zeros clear the gradients that wait. Other values are refused: whether they include those
  // gradients depends on the number of ranks.
  const auto is_zero = [&] {
    return !comm::read_on_host(grad.any(), "gradient of " + p.contract.name).item<bool>();
  };
  TESSERA_CHECK(!has_unpublished(unit, p) || is_zero(), ErrorKind::kUsage, "gradient of ",
                p.contract.name,
                ": found it changed while micro-batches of this step wait to be added to it, "
                "expected changes only "
                "after a backward that reduces; change it after the last micro-batch, or zero it");
  const auto factor = p.contract.reductions.divide_factor * controls.loss_scale;
  bucket.import_accumulator(p.place, grad.to(to_scalar_type(p.contract.accumulate)).mul(factor));
  p.published = true;
}

void Publisher::forget_cleared() {
  for (auto* unit : units_) {
    const auto& progress = unit->progress();
    if (progress.unpublished || progress.pending || progress.tickets > 0) continue;
    for (std::size_t i = 0; i < unit->buckets().size(); ++i) {
      auto& bucket = *unit->buckets()[i];
      if (!bucket.trainable() || bucket.has_arrivals() || bucket.is_reducing()) continue;
      const auto has_gradient_in_it = [&](const std::shared_ptr<Parameter>& p) {
        return p->bucket == i && p->shard.grad().defined();
      };
      if (std::ranges::any_of(unit->parameters(), has_gradient_in_it)) continue;
      for (const auto& p : unit->parameters()) {
        if (p->bucket != i) continue;
        p->used = p->published = false;
        p->seen_grad = at::Tensor();
      }
      bucket.reset_accumulator();
    }
  }
}

void Publisher::import_user_changes(const ModelControls& controls) {
  const at::NoGradGuard no_grad;
  forget_cleared();  // those cleared since the forward, so that no zeros are written
  for (auto* unit : units_) {
    check_integrity(*unit);
    leave_kept_sums(*unit);
    std::vector<bool> keeps(unit->buckets().size(), false);
    for (auto& p : unit->parameters()) {
      if (!p->contract.trainable) continue;
      auto& bucket = unit->bucket_of(*p);
      const auto& grad = p->shard.grad();
      if (!grad.defined()) {
        // After zero_grad(set_to_none) a new sum begins, without gradients that wait, on any number
        // of ranks. A sum that was never published stays: it still waits.
        if (p->published) {
          reducer_.finish(*unit);
          bucket.reset_accumulator(p->place);
          p->used = false;
        }
        keeps[p->bucket] = keeps[p->bucket] || (!p->published && bucket.has_sum());
        p->published = false;
        p->seen_grad = at::Tensor();
        continue;
      }
      keeps[p->bucket] = true;
      if (!p->published || rescaled_ || is_changed(*unit, *p)) {
        reducer_.finish(*unit);
        import_changed(*unit, *p, controls);
      }
      record_published(*p);
    }
    for (std::size_t i = 0; i < keeps.size(); ++i) {
      if (!keeps[i] && unit->buckets()[i]->trainable()) unit->buckets()[i]->reset_accumulator();
    }
  }
  rescaled_ = false;
}

void Publisher::require_as_seen(const char* what) const {
  for (const auto* unit : units_) {
    for (const auto& p : unit->parameters()) {
      if (!p->contract.trainable) continue;
      const auto& grad = p->shard.grad();
      const bool is_as_seen =
          grad.is_same(p->seen_grad) &&
          (!grad.defined() || static_cast<std::uint32_t>(grad._version()) == p->seen_version);
      TESSERA_CHECK(is_as_seen, ErrorKind::kUsage, what, ": found the gradient of ",
                    p->contract.name,
                    " changed or cleared inside the step, expected it as it stood when the step "
                    "began, since this step's sums are added to it; do it before the StepScope, or "
                    "after its finish()");
    }
  }
}

}  // namespace tessera::fsdp
