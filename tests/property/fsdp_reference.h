// The expected results of a Case: the unsharded model, rank by rank, with the contract's rounding
// points and the order of additions that the design promises (arrival order in the slot, rank order
// on the wire, replicas last).
#pragma once

#include <torch/csrc/autograd/autograd.h>

#include <map>
#include <set>
#include <vector>

#include "grad/torch_dtype.h"
#include "property/fsdp_case.h"
#include "support/quotient.h"

namespace tessera::test {

class Reference {
 public:
  /// `contracts` by parameter, `buffers` by node: as they are after loading.
  Reference(const Case& c, std::vector<GradContract> contracts, std::vector<at::Tensor> buffers)
      : case_(c),
        contracts_(std::move(contracts)),
        buffers_(std::move(buffers)),
        loss_scale_(c.loss_scale.value_or(1.0)),
        slots_(static_cast<std::size_t>(c.ranks)),
        sums_(static_cast<std::size_t>(c.replicas)) {
    for (std::size_t p = 0; p < case_.parameters.size(); ++p) {
      const auto kept = contracts_[p].storage.dtype;
      const auto through = contracts_[p].loaded_through.value_or(kept);
      shards_.push_back(
          case_.parameters[p].initial.clone().to(to_scalar_type(through)).to(to_scalar_type(kept)));
      masters_.push_back(shards_[p]);
    }
    make_masters();
    for (auto& slots : slots_) slots.resize(masters_.size());
    for (auto& sums : sums_) sums.resize(masters_.size());
    gradients_.resize(masters_.size());
    brings_.assign(masters_.size(), kNone);
    claim_below(0);
    claim(0);
  }

  /// After a step: what parameters are from now on. Gradients are none.
  void change(std::vector<GradContract> contracts) {
    contracts_ = std::move(contracts);
    for (std::size_t p = 0; p < shards_.size(); ++p) {
      // Kept as it computes from now on, and what an optimizer kept of it is gone.
      if (contracts_[p].replicated())
        masters_[p] = shards_[p] = shards_[p].to(to_scalar_type(contracts_[p].storage.dtype));
    }
    make_masters();
    forget_gradients();
  }

  /// The parameter as it is stored and gathered.
  const at::Tensor& value(std::size_t p) const { return shards_[p]; }
  /// Undefined where no rank used the parameter.
  const at::Tensor& gradient(std::size_t p) const { return gradients_[p]; }

  /// Whether the last step was made: its gradients were finite.
  bool stepped() const { return steps_; }
  double loss_scale() const { return loss_scale_; }

  at::Tensor evaluate(int rank, const at::Tensor& x) {
    const at::NoGradGuard no_grad;
    rank_ = rank;
    return call_unit(0, x);
  }

  void step(int number) {
    begin_step();
    for (int i = 0; i < case_.micro_batches; ++i) {
      const bool last = i + 1 == case_.micro_batches;
      for (rank_ = 0; rank_ < case_.ranks; ++rank_) {
        auto x = case_.batch(rank_, number, i);
        torch::autograd::backward(
            {case_loss(call_unit(0, x.requires_grad_(case_.input_requires_grad))) * loss_scale_},
            {});
      }
      if (case_.syncs_every || last) reduce();
      if (last) publish();
    }
    steps_ = std::all_of(gradients_.begin(), gradients_.end(), [](const at::Tensor& gradient) {
      return !gradient.defined() || gradient.isfinite().all().item<bool>();
    });
    if (!steps_) {
      if (case_.loss_scale) loss_scale_ /= 2;
      return;
    }
    const at::NoGradGuard no_grad;
    for (std::size_t p = 0; p < masters_.size(); ++p) {
      if (!gradients_[p].defined()) continue;
      const bool has_master = !masters_[p].is_same(shards_[p]);
      masters_[p].add_(has_master ? gradients_[p].to(at::kFloat) : gradients_[p], -kLr);
      if (has_master) shards_[p].copy_(rounded_to_shard(p));
    }
  }

  static constexpr double kLr = 0.5;  // a power of two: one rounding, however a kernel fuses

 private:
  int shard_ranks() const { return case_.ranks / case_.replicas; }
  at::ScalarType accumulate(std::size_t p) const {
    return to_scalar_type(contracts_[p].accumulate);
  }
  at::Tensor rounded_to_wire(std::size_t p, const at::Tensor& sum) const {
    return sum.to(to_scalar_type(contracts_[p].reduce)).to(accumulate(p));
  }

  /// Makes the masters of parameters that are trained for the first time; one that was trained
  /// before continues from its own.
  void make_masters() {
    for (std::size_t p = 0; p < shards_.size(); ++p) {
      const auto master = contracts_[p].master;
      const bool has_master = master == Master::kRemainder || master == Master::kCopy;
      if (has_master && !case_.steps_by_hand && masters_[p].is_same(shards_[p]))
        masters_[p] = shards_[p].to(at::kFloat);
    }
  }

  at::Tensor rounded_to_shard(std::size_t p) const {
    return contracts_[p].master == Master::kRemainder ? rounded_half_away(masters_[p])
                                                      : masters_[p].to(at::kHalf);
  }
  /// To bf16: half of the last place is added to the magnitude, the digits behind it are cut.
  static at::Tensor rounded_half_away(const at::Tensor& values) {
    const auto bits = values.contiguous().view(at::kInt);
    return bits.add(0x8000).bitwise_right_shift(16).to(at::kShort).view(at::kBFloat16);
  }

  // --- which unit brings a parameter: the first that is sharded, inner ones before outer ---

  void claim_below(std::size_t number) {
    for (const auto& child : case_.nodes[number].children) {
      claim_below(child.node);
      if (child.handle) claim(child.node);
    }
  }
  void claim(std::size_t unit) {
    for (const auto object : objects_of_unit(unit)) {
      auto& owner = brings_[case_.objects[object].parameter];
      if (owner == kNone) owner = unit;
    }
  }

  void begin_step() {
    if (case_.zero != CaseZero::kKeep) forget_gradients();
  }
  void forget_gradients() {
    for (auto& sums : sums_) std::fill(sums.begin(), sums.end(), at::Tensor());
    if (shard_ranks() == 1) {
      for (auto& slots : slots_) std::fill(slots.begin(), slots.end(), at::Tensor());
    }
    std::fill(gradients_.begin(), gradients_.end(), at::Tensor());
  }

  // --- forward: one alias a tensor object, renewed wherever a unit begins and ends ---

  void renew(std::size_t object) {
    const auto p = case_.objects[object].parameter;
    const auto& compute = contracts_[p].compute;
    const auto rounded = compute.rounding == Rounding::kHalfAway
                             ? rounded_half_away(shards_[p])
                             : shards_[p].to(to_scalar_type(compute.dtype));
    auto alias = rounded.detach().clone(at::MemoryFormat::Contiguous);
    if (contracts_[p].trainable && at::GradMode::is_enabled()) {
      alias.set_requires_grad(true);
      alias.set_grad_dtype(std::nullopt);
      alias.register_hook([this, p, rank = static_cast<std::size_t>(rank_)](const at::Tensor& raw) {
        arrive(rank, p, raw);
      });
    }
    aliases_[object] = alias;
  }

  void arrive(std::size_t rank, std::size_t p, const at::Tensor& raw) {
    const at::NoGradGuard no_grad;
    const auto value = contracts_[p].grad ? raw.to(to_scalar_type(*contracts_[p].grad)) : raw;
    auto& slot = slots_[rank][p];
    if (slot.defined()) {
      slot.add_(value);
    } else {
      slot = value.to(accumulate(p)).clone();
    }
  }

  std::vector<std::size_t> objects_of_unit(std::size_t unit) const {
    std::vector<std::size_t> result;
    for (const auto& node : case_.nodes) {
      if (node.unit == unit) result.insert(result.end(), node.objects.begin(), node.objects.end());
    }
    return result;
  }

  bool used_outside(std::size_t unit, std::size_t object) const {
    return std::any_of(case_.nodes.begin(), case_.nodes.end(), [&](const auto& node) {
      return node.unit != unit && std::count(node.objects.begin(), node.objects.end(), object) > 0;
    });
  }

  at::Tensor call_unit(std::size_t unit, const at::Tensor& x) {
    for (const auto object : objects_of_unit(unit)) renew(object);
    const auto& policy = case_.policies[unit];
    const bool casts =
        policy.cast_forward_inputs && policy.param_dtype && !all_wider(unit, *policy.param_dtype);
    const auto y = call_node(unit, casts ? x.to(to_scalar_type(*policy.param_dtype)) : x);
    // The code around the unit uses an alias of its own.
    for (const auto object : objects_of_unit(unit)) {
      if (used_outside(unit, object)) renew(object);
    }
    // Only what leaves the outermost unit is cast.
    return unit == 0 && policy.output_dtype ? y.to(to_scalar_type(*policy.output_dtype)) : y;
  }

  /// Whether each floating parameter that the unit brings computes in more than `dtype`.
  bool all_wider(std::size_t unit, DType dtype) const {
    bool any = false;
    for (std::size_t p = 0; p < brings_.size(); ++p) {
      if (brings_[p] != unit) continue;
      const auto compute = contracts_[p].compute.dtype;
      if (!is_floating(compute)) continue;
      any = true;
      if (compute == dtype || !represents(compute, dtype)) return false;
    }
    return any;
  }

  at::Tensor call_node(std::size_t number, at::Tensor x) {
    const auto& node = case_.nodes[number];
    x = apply_node(case_, node, rank_, x, buffers_[number],
                   [this](auto object) { return aliases_.at(object); });
    for (const auto& child : node.children) {
      for (int i = 0; i < child.repeats; ++i) x = call_child(child, x);
    }
    return x;
  }

  at::Tensor call_child(const CaseChild& child, const at::Tensor& x) {
    if (!child.recomputes || !at::GradMode::is_enabled()) {
      return child.handle ? call_unit(child.node, x) : call_node(child.node, x);
    }
    // A recomputed body has a backward of its own: its uses do not meet those outside before the
    // slot.
    std::set<std::size_t> below, entered;
    subtree(child, below, entered);
    std::map<std::size_t, at::Tensor> outside;
    for (const auto object : below) {
      outside[object] = aliases_[object];
      renew(object);
    }
    const auto y = child.handle ? call_unit(child.node, x) : call_node(child.node, x);
    for (const auto& [object, alias] : outside) {
      if (entered.count(object) > 0) {
        renew(object);
      } else {
        aliases_[object] = alias;
      }
    }
    return y;
  }

  /// Objects of the nodes below, and those among them that belong to units which are entered there.
  void subtree(const CaseChild& child, std::set<std::size_t>& below,
               std::set<std::size_t>& entered) const {
    const auto& node = case_.nodes[child.node];
    below.insert(node.objects.begin(), node.objects.end());
    if (child.handle) {
      const auto objects = objects_of_unit(child.node);
      below.insert(objects.begin(), objects.end());
      entered.insert(objects.begin(), objects.end());
    }
    for (const auto& next : node.children) subtree(next, below, entered);
  }

  // --- sums ---

  void reduce() {
    if (shard_ranks() == 1) return;  // slot and accumulator are one
    for (std::size_t p = 0; p < masters_.size(); ++p) {
      for (std::size_t replica = 0; replica < sums_.size(); ++replica) {
        const auto group = static_cast<std::size_t>(shard_ranks());
        at::Tensor total;
        for (std::size_t s = 0; s < group; ++s) {
          auto slot = std::exchange(slots_[replica * group + s][p], at::Tensor());
          if (!slot.defined())
            slot = at::zeros(masters_[p].sizes(), at::TensorOptions().dtype(accumulate(p)));
          const auto wire = rounded_to_wire(p, slot);
          total = total.defined() ? total + wire : wire;
        }
        auto& sum = sums_[replica][p];
        sum = sum.defined() ? sum + total : total;
      }
    }
  }

  void publish() {
    for (std::size_t p = 0; p < masters_.size(); ++p) {
      if (!contracts_[p].trainable || case_.parameters[p].used_by == -1) continue;
      at::Tensor total;
      for (std::size_t replica = 0; replica < sums_.size(); ++replica) {
        auto part = shard_ranks() == 1 ? slots_[replica][p] : sums_[replica][p];
        if (!part.defined())
          part = at::zeros(masters_[p].sizes(), at::TensorOptions().dtype(accumulate(p)));
        if (sums_.size() > 1) part = rounded_to_wire(p, part);
        total = total.defined() ? total + part : part;
      }
      gradients_[p] = divided(total, contracts_[p].reductions.divide_factor * loss_scale_,
                              to_scalar_type(contracts_[p].final));
    }
  }

  const Case& case_;
  std::vector<GradContract> contracts_;
  std::vector<at::Tensor> buffers_;
  double loss_scale_;
  bool steps_ = true;
  std::vector<at::Tensor> shards_;   // in storage
  std::vector<at::Tensor> masters_;  // what is stepped: the same tensor, or an fp32 one
  std::vector<at::Tensor> gradients_;
  std::vector<std::vector<at::Tensor>> slots_;  // [rank][parameter]
  std::vector<std::vector<at::Tensor>> sums_;   // [replica][parameter]
  std::map<std::size_t, at::Tensor> aliases_;
  int rank_ = 0;
  static constexpr std::size_t kNone = ~std::size_t{0};
  std::vector<std::size_t> brings_;  // by parameter: a unit
};

}  // namespace tessera::test
