#include "unit/train/traffic_formulas.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "models/family.h"

namespace tessera::train {

Formulas::Formulas(const models::ModelSpec& spec, const Family& family, const Degrees& degrees,
                   int rank)
    : spec_(spec),
      family_(family),
      d_(degrees),
      rank_(rank),
      stream_(d_.positions_of_rank() * spec.hidden_size),
      e_(d_.dtypes == Dtypes::kFloat32 ? 4 : 2),
      w_(d_.dtypes == Dtypes::kBFloat16 ? 2 : 4) {
  chosen_.resize(kExperts);
  std::iota(chosen_.begin(), chosen_.end(), 0);
  if (d_.chosen == Chosen::kAll) return;
  // Equal scores: whichever libtorch prefers.
  const at::Tensor best =
      std::get<1>(at::topk(at::zeros({1, kExperts}), d_.experts_per_token(), 1));
  chosen_.assign(best.const_data_ptr<std::int64_t>(),
                 best.const_data_ptr<std::int64_t>() + best.numel());
}

Activations Formulas::of_step() {
  for (std::int64_t m = 0; m < d_.micro_batches; ++m) {
    embedding();
    for (std::int64_t layer = 0; layer < spec_.num_hidden_layers; ++layer) {
      forward(layer);
      if (d_.recompute != RecomputeMode::kNone) forward(layer);
      backward(layer);
    }
    head();
  }
  return sent_;
}

std::int64_t Formulas::expert_calls() const {
  if (family_.mlps == Mlps::kDense) return 0;
  return d_.micro_batches * (spec_.num_hidden_layers - family_.dense_layers) *
         (d_.recompute == RecomputeMode::kNone ? 1 : 2);
}

Formulas::Way Formulas::way() const {
  if (d_.tp == 1) return Way::kOwn;
  if (d_.etp > 1) return Way::kCut;
  if (d_.router == RouterTokens::kAll) return Way::kAllRouted;
  return d_.sequence ? Way::kOwn : Way::kSliced;
}

void Formulas::add(const std::string& what, std::int64_t bytes) {
  sent_[what].count += 1;
  sent_[what].bytes += bytes;
}

/// A of docs/communication.md.
std::int64_t Formulas::whole_sum() const {
  const std::int64_t in_sums = std::max<std::int64_t>(w_, 4);
  if (d_.tp == 2 || stream_ * w_ * d_.tp <= 256 * 1024) return (d_.tp - 1) * stream_ * w_;
  return part() * (w_ + in_sums);
}

void Formulas::enter() {
  if (d_.tp > 1 && d_.sequence) add("tp all_gather", part() * e_);
}
void Formulas::leave() {
  if (d_.tp == 1) return;
  d_.sequence ? add("tp reduce_scatter", part() * w_) : add("tp all_reduce", whole_sum());
}
void Formulas::norms_over_heads() {
  if (d_.tp == 1 || !models::traits(spec_.family).qk_norm_over_heads) return;
  for (int i = 0; i < 2; ++i) add("tp all_reduce", (d_.tp - 1) * d_.positions_of_rank() * 4);
}
void Formulas::enter_backward() { leave(); }
void Formulas::leave_backward() { enter(); }

Formulas::Attended Formulas::attended(std::int64_t layer) const {
  const std::int64_t dims = models::attention_of(spec_, layer).dims;
  const std::int64_t heads = spec_.num_attention_heads / d_.tp;
  if (spec_.mla) {
    return {heads * dims, heads * dims, spec_.mla->kv_lora_rank + spec_.mla->qk_rope_head_dim};
  }
  const auto all = models::key_value_heads(spec_);
  const std::int64_t groups = all[static_cast<std::size_t>(layer) % all.size()];
  const std::int64_t keys = std::max<std::int64_t>(1, groups / d_.tp) * dims;
  return {heads * dims, keys, keys};
}

std::int64_t Formulas::reached_by_others() const {
  const std::int64_t part = d_.positions / (2 * d_.cp);
  return part * (d_.cp - 1 + rank_ / d_.tp % d_.cp);
}

void Formulas::attend(std::int64_t layer) {
  if (d_.cp == 1) return;
  const Attended of = attended(layer);
  if (d_.form == ContextForm::kGather) {
    return add("cp all_to_all", reached_by_others() * of.gathered * e_);
  }
  // Queries, keys and values to heads, results back: all but the own part of the heads.
  const std::int64_t moved = d_.positions_of_rank() / d_.cp * (d_.cp - 1) * e_;
  const std::int64_t results =
      spec_.mla ? of.queries / models::attention_of(spec_, layer).dims * spec_.mla->v_head_dim
                : of.queries / 2;
  add("cp all_to_all", (of.queries + of.keys - results) * moved);
  add("cp all_to_all", results * moved);
}

void Formulas::attend_backward(std::int64_t layer) {
  if (d_.cp == 1) return;
  if (d_.form == ContextForm::kHeads) return attend(layer);
  const Attended of = attended(layer);
  const std::int64_t part = d_.positions / (2 * d_.cp);
  if (spec_.mla) {
    // A rank sums its addends: one reach, to the end of its tail.
    return add("cp all_to_all", part * (2 * d_.cp - 2 - rank_ / d_.tp % d_.cp) * of.gathered * 4);
  }
  add("cp all_to_all", reached_by_others() * of.gathered * e_);
  add("cp all_to_all", 2 * part * (d_.cp - 1) * of.gathered * 4);
}

void Formulas::embedding() {
  leave();
  leave_backward();
}

void Formulas::head() {
  enter();
  enter_backward();
  if (d_.tp > 1) add("tp all_gather", (d_.tp - 1) * d_.positions_of_rank() * 12);
}

bool Formulas::has_dense_block(std::int64_t layer) const {
  return !routed(layer) || family_.mlps == Mlps::kGemma ||
         (family_.mlps == Mlps::kRoutedAndShared && !sums_at_exit());
}

void Formulas::forward(std::int64_t layer) {
  enter();  // attention
  norms_over_heads();
  attend(layer);
  leave();
  if (has_dense_block(layer)) {
    enter();
    leave();
  }
  if (!routed(layer)) return;
  if (d_.ep > 1) add("ep all_to_all", (d_.ep - 1) * (kExperts / d_.ep + 1) * 8);
  dispatch();
  if (!sums_at_exit()) return;
  // Gemma 4's router sees another tensor than its experts.
  for (int i = 0; i < entries(); ++i) enter();
  leave();
}

void Formulas::backward(std::int64_t layer) {
  norms_over_heads();
  attend_backward(layer);
  enter_backward();
  leave_backward();
  if (has_dense_block(layer)) {
    enter_backward();
    leave_backward();
  }
  if (!routed(layer)) return;
  dispatch();
  if (!sums_at_exit()) return;
  leave_backward();
  const bool through_shared = way() == Way::kSliced && family_.mlps == Mlps::kRoutedAndShared;
  for (int i = 0; i < entries(); ++i) {
    if (way() == Way::kSliced && !through_shared) {
      // Slices of the tokens: the largest counts for all.
      const std::int64_t largest = (d_.positions_of_rank() + d_.tp - 1) / d_.tp;
      add("tp all_gather", (d_.tp - 1) * largest * spec_.hidden_size * e_);
    } else {
      enter_backward();
    }
  }
}

/// Rows to the experts of other ranks, and back to the tokens of other ranks.
void Formulas::dispatch() {
  if (d_.ep == 1) return;
  const int place = rank_ % (d_.shard * d_.cp * d_.tp) / d_.etp;  // within a replica, by ep
  const int own = place % d_.ep;
  const std::int64_t row = spec_.hidden_size * e_;
  std::int64_t out = 0;
  std::int64_t back = 0;
  for (int other = 0; other < d_.ep; ++other) {
    if (other == own) continue;
    out += tokens_of(rank_) * experts_here(other) * row;
    back += tokens_of(rank_ + (other - own) * d_.etp) * experts_here(own) * row;
  }
  add("ep all_to_all", out);
  add("ep all_to_all", back);
}

/// How many tokens a rank sends to experts.
std::int64_t Formulas::tokens_of(int rank) const {
  const std::int64_t own = d_.positions_of_rank();
  if (d_.tp == 1 || way() == Way::kCut) return own;
  const std::int64_t more = own % d_.tp;
  return own / d_.tp + (rank % d_.tp < more ? 1 : 0);
}

/// The experts that a token chooses and one rank of ep has.
std::int64_t Formulas::experts_here(int coordinate) const {
  const std::int64_t local = kExperts / d_.ep;
  return std::ranges::count_if(chosen_,
                               [&](std::int64_t expert) { return expert / local == coordinate; });
}

}  // namespace tessera::train
