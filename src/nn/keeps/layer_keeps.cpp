#include "nn/keeps/layer_keeps.h"

#include <algorithm>
#include <utility>

#include "layout/sum_bytes.h"
#include "tessera/error.h"

namespace tessera::nn {

KeptValue KeepsLedger::make(std::int64_t numel, DType dtype, bool wants) {
  bytes_.push_back(numel * size_of(dtype));
  return {bytes_.size() - 1, numel, dtype, wants};
}

KeptValue KeepsLedger::cast(const KeptValue& x, DType dtype) {
  return x.dtype == dtype ? x : make(x.numel, dtype, x.wants);
}

void KeepsLedger::save(const KeptValue& x) {
  (layer_ ? layer_->saved : before_or_after()).push_back(x.memory);
}

void KeepsLedger::product(const KeptValue& y) {
  if (layer_) layer_->products.push_back(y.memory);
}

void KeepsLedger::put_off(const KeptValue& input, const KeptValue& product) {
  deferred_.insert(input.memory);
  deferred_gradients_ += product.numel * size_of(product.dtype);
}

std::int64_t KeepsLedger::deferred() const { return sum(deferred_) + deferred_gradients_; }

std::int64_t KeepsLedger::sum(const std::set<std::size_t>& memories) const {
  std::int64_t bytes = 0;
  for (const std::size_t memory : memories) bytes += bytes_[memory];
  return bytes;
}

void KeepsLedger::begin_layer(const std::vector<KeptValue>& inputs) {
  layer_.emplace();
  for (const KeptValue& input : inputs) layer_->inputs.push_back(input.memory);
}

void KeepsLedger::end_layer(const KeptValue& result) {
  layer_->has_graph = layer_->sends.has_graph = result.wants;
  layers_.push_back(*std::exchange(layer_, std::nullopt));
}

namespace {

void add(std::set<std::size_t>& to, const std::vector<std::size_t>& from) {
  to.insert(from.begin(), from.end());
}

std::set<std::size_t> kept_by(const KeptLayer& layer, RecomputeMode mode) {
  std::set<std::size_t> kept;
  if (!layer.has_graph) return kept;
  add(kept, mode == RecomputeMode::kNone ? layer.saved : layer.inputs);
  if (mode == RecomputeMode::kSelective) add(kept, layer.products);
  return kept;
}

}  // namespace

KeptBytes KeepsLedger::in(RecomputeMode mode) const {
  return in(std::vector<RecomputeMode>(layers_.size(), mode));
}

KeptBytes KeepsLedger::in(std::span<const RecomputeMode> modes) const {
  TESSERA_INVARIANT(modes.size() == layers_.size(), "modes of other layers");
  std::set<std::size_t> kept(before_.begin(), before_.end());
  std::int64_t peak = 0;
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const KeptLayer& layer = layers_[i];
    if (!layer.has_graph) continue;
    kept.merge(kept_by(layer, modes[i]));
    // In its backward those behind it are gone, and what it saves is there again.
    std::set<std::size_t> with_it = kept;
    add(with_it, layer.saved);
    peak = std::max(peak, sum(with_it));
  }
  add(kept, after_);
  return {sum(kept), std::max(peak, sum(kept))};
}

ForwardActivations KeepsLedger::by_layer() const {
  using Mode = RecomputeMode;
  std::set<std::size_t> beside(before_.begin(), before_.end());
  std::set<std::size_t> seen;
  for (const KeptLayer& layer : layers_) {
    std::set<std::size_t> all = kept_by(layer, Mode::kNone);
    all.merge(kept_by(layer, Mode::kSelective));
    for (const std::size_t memory : all) {
      if (!seen.insert(memory).second) beside.insert(memory);
    }
  }
  const auto own = [&](std::set<std::size_t> memories) {
    std::erase_if(memories, [&](std::size_t memory) { return beside.contains(memory); });
    return sum(memories);
  };
  ForwardActivations found;
  found.beside = sum(beside);
  found.after = own({after_.begin(), after_.end()});
  for (const KeptLayer& layer : layers_) {
    const auto again = [&](Mode mode) {
      std::set<std::size_t> with_it = kept_by(layer, mode);
      with_it.merge(kept_by(layer, Mode::kNone));
      return own(std::move(with_it));
    };
    found.units.push_back({.none = own(kept_by(layer, Mode::kNone)),
                           .selective = own(kept_by(layer, Mode::kSelective)),
                           .full = own(kept_by(layer, Mode::kFull)),
                           .selective_again = again(Mode::kSelective),
                           .full_again = again(Mode::kFull)});
  }
  return found;
}

void KeepsLedger::send(const SentBytes& bytes) {
  SentBytes& to = layer_ ? layer_->sends.tensor : sent_beside_;
  to.forward += bytes.forward;
  to.backward += bytes.backward;
}

void KeepsLedger::send(const SentTokens& tokens) { layer_->sends.experts = tokens; }

std::vector<LayerSends> KeepsLedger::sends_of_layers() const {
  std::vector<LayerSends> sends;
  for (const KeptLayer& layer : layers_) sends.push_back(layer.sends);
  return sends;
}

LayerKeeps::LayerKeeps(const KeepsCase& of) : of_(of) {
  for (const GradContract& parameter : of.parameters) {
    by_name_.emplace(parameter.name, &parameter);
    for (const std::string& alias : parameter.aliases) by_name_.emplace(alias, &parameter);
  }
}

const GradContract* LayerKeeps::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

const GradContract& LayerKeeps::parameter(const std::string& name) const {
  const GradContract* found = find(name);
  TESSERA_INVARIANT(found != nullptr, "activations of a model without ", name);
  return *found;
}

bool LayerKeeps::trains(const std::string& name) const {
  const GradContract* found = find(name);
  return found != nullptr && found->trainable;
}

void LayerKeeps::save_if(bool condition, const KeptValue& x) {
  if (condition) ledger_.save(x);
}

KeptValue LayerKeeps::sum(const KeptValue& x, const KeptValue& y) {
  return ledger_.make(x.numel, x.dtype, x.wants || y.wants);
}

KeptValue LayerKeeps::linear(const KeptValue& x, const std::string& name,
                             std::optional<DType> asked, Deferral deferral) {
  const GradContract& weight = parameter(name + ".weight");
  const auto shape = weight.local_shape();
  const std::int64_t rows = x.numel / shape[1];
  const DType compute = asked.value_or(weight.compute.dtype);
  const bool wants = x.wants || weight.trainable || trains(name + ".bias");
  const KeptValue input = ledger_.cast(x, compute);
  save_if(weight.trainable, input);
  const KeptValue product = ledger_.make(rows * shape[0], compute, wants);
  ledger_.product(product);
  if (weight.trainable && deferral == Deferral::kMayBe) ledger_.put_off(input, product);
  const KeptValue y = ledger_.cast(product, x.dtype);
  const GradContract* a = find(name + ".lora_A.weight");
  if (a == nullptr) return y;
  const DType inside = a->compute.dtype;
  ledger_.save(x);
  ledger_.save(ledger_.make(rows * a->shape[0], inside));
  return ledger_.make(y.numel, y.dtype, true);
}

KeptValue LayerKeeps::norm(const KeptValue& x, std::int64_t columns, const std::string& name) {
  const bool wants = x.wants || (!name.empty() && trains(name + ".weight"));
  if (wants) {
    ledger_.save(x);
    ledger_.save(ledger_.make(x.numel / columns, DType::kFloat32));
    save_factor(name, columns);
  }
  return ledger_.make(x.numel, x.dtype, wants);
}

void LayerKeeps::save_factor(const std::string& norm_name, std::int64_t columns) {
  if (norm_name.empty() || of_.norms_add_one) {
    ledger_.save(ledger_.make(columns, DType::kFloat32));
  }
}

KeptValue LayerKeeps::rope_heads(const KeptValue& x, std::int64_t head_dim,
                                 const std::string& norm_name) {
  const bool normed = find(norm_name + ".weight") != nullptr;
  const bool wants = x.wants || trains(norm_name + ".weight");
  if (wants && normed) {
    ledger_.save(x);
    ledger_.save(ledger_.make(x.numel / head_dim, DType::kFloat32));
    save_factor(norm_name, head_dim);
  }
  return ledger_.make(x.numel, x.dtype, wants);
}

/// Of queries or keys, normed each alone or all together.
KeptValue LayerKeeps::normed_heads(const KeptValue& x, std::int64_t head_dim,
                                   const std::string& norm_name) {
  if (!of_.qk_norm_over_heads) return rope_heads(x, head_dim, norm_name);
  const std::int64_t columns = parameter(norm_name + ".weight").local_shape()[0];
  const KeptValue normed = norm(x, columns, norm_name);
  if (of_.tp > 1) {
    // A sum of one number per row, in the dtype that norms compute in; also for its gradient.
    const DType inside = promote(x.dtype, DType::kFloat32);
    const std::int64_t bytes = sum_bytes(x.numel / columns, inside, std::nullopt);
    ledger_.send(SentBytes{.forward = bytes, .backward = normed.wants ? bytes : 0});
  }
  return ledger_.make(normed.numel, normed.dtype, normed.wants);
}

/// Values by group, and two numbers a row of scores.
KeptValue LayerKeeps::causal_attention(const KeptValue& q, const KeptValue& k, const KeptValue& v,
                                       std::int64_t heads, std::int64_t groups) {
  const bool wants = q.wants || k.wants || v.wants;
  if (wants) {
    ledger_.save(q);
    ledger_.save(k);
    ledger_.save(groups == 1 || of_.positions == 1 ? v : made_like(v));
    ledger_.save(ledger_.make(2 * of_.rows * heads * of_.positions, DType::kFloat32));
  }
  return ledger_.make(v.numel / groups * heads, q.dtype, wants);
}

KeptValue LayerKeeps::windowed_attention(const KeptValue& q, const KeptValue& k, const KeptValue& v,
                                         bool sinks_train) {
  const bool wants = q.wants || k.wants || v.wants || sinks_train;
  for (const KeptValue& each : {q, k, v}) save_if(wants, each);
  return ledger_.make(q.numel, q.dtype, wants);
}

KeptValue LayerKeeps::self_attention(const KeptValue& stream, std::int64_t head_dim,
                                     Windowed windowed, const std::string& name) {
  const KeptValue x = enter(stream);
  const auto heads_of = [&](const char* projection) {
    return parameter(name + projection + ".weight").local_shape()[0] / head_dim;
  };
  const std::int64_t heads = heads_of("q_proj"), groups = heads_of("k_proj");
  const KeptValue q = normed_heads(linear(x, name + "q_proj"), head_dim, name + "q_norm");
  const KeptValue k = normed_heads(linear(x, name + "k_proj"), head_dim, name + "k_norm");
  const KeptValue v = linear(x, name + "v_proj");
  const bool sinks = find(name + "sinks") != nullptr;
  const KeptValue mixed = sinks || windowed == Windowed::kYes
                              ? windowed_attention(q, k, v, trains(name + "sinks"))
                              : causal_attention(q, k, v, heads, groups);
  return leave(linear(mixed, name + "o_proj"));
}

KeptValue LayerKeeps::latent_attention(const KeptValue& stream, const Latent& of,
                                       const std::string& name) {
  const KeptValue x = enter(stream);
  const std::int64_t heads = of.heads / of_.tp;
  KeptValue q = x;
  if (of.q_lora_rank) {
    const KeptValue latent = linear(x, name + "q_a_proj");
    q = linear(norm(latent, *of.q_lora_rank, name + "q_a_layernorm"), name + "q_b_proj");
  } else {
    q = linear(x, name + "q_proj");
  }
  const KeptValue both = linear(x, name + "kv_a_proj_with_mqa");
  // A part of each row, made contiguous for the norm.
  const KeptValue latent = ledger_.make(tokens() * of.kv_lora_rank, both.dtype, both.wants);
  const KeptValue kv =
      linear(norm(latent, of.kv_lora_rank, name + "kv_a_layernorm"), name + "kv_b_proj");
  const KeptValue queries = made_like(q);
  const KeptValue keys = ledger_.make(q.numel, q.dtype, kv.wants || both.wants);
  const KeptValue values = ledger_.make(tokens() * heads * of.v_head_dim, kv.dtype, kv.wants);
  return leave(linear(causal_attention(queries, keys, values, heads, heads), name + "o_proj"));
}

KeptValue LayerKeeps::swiglu(const KeptValue& gate, const KeptValue& up) {
  const bool wants = gate.wants || up.wants;
  save_if(wants, gate);
  save_if(wants, up);
  return ledger_.make(gate.numel, gate.dtype, wants);
}

KeptValue LayerKeeps::geglu(const KeptValue& gate, const KeptValue& up) {
  const KeptValue opened = made_like(gate);
  save_if(gate.wants, gate);
  save_if(gate.wants, up);
  save_if(up.wants, opened);
  return ledger_.make(gate.numel, gate.dtype, gate.wants || up.wants);
}

KeptValue LayerKeeps::inner_mlp(const KeptValue& x, const std::string& name, Gate gate) {
  const KeptValue first = linear(x, name + "gate_proj");
  const KeptValue up = linear(x, name + "up_proj");
  return linear(gate == Gate::kSilu ? swiglu(first, up) : geglu(first, up), name + "down_proj");
}

KeptValue LayerKeeps::mlp(const KeptValue& x, const std::string& name, Gate gate) {
  return leave(inner_mlp(enter(x), name, gate));
}

std::int64_t LayerKeeps::sum_bytes(std::int64_t numel, DType dtype,
                                   std::optional<DType> sums) const {
  const DType wire = sums.value_or(dtype);
  return layout::sum_sent_bytes({.numel = numel,
                                 .addend_bytes = size_of(wire),
                                 .sum_bytes = size_of(promote(wire, DType::kFloat32))},
                                of_.tp, of_.tp_rank);
}

KeptValue LayerKeeps::enter(const KeptValue& x) {
  if (of_.tp == 1) return x;
  if (!of_.cut) {
    ledger_.send(SentBytes{.backward = x.wants ? sum_bytes(x.numel, x.dtype, of_.sums) : 0});
    return x;
  }
  const std::int64_t to_others = (of_.tp - 1) * x.numel;
  ledger_.send(
      SentBytes{.forward = to_others * size_of(x.dtype),
                .backward = x.wants ? to_others * size_of(of_.sums.value_or(x.dtype)) : 0});
  return ledger_.make(x.numel * of_.tp, x.dtype, x.wants);
}

KeptValue LayerKeeps::leave(const KeptValue& addend) {
  if (of_.tp == 1) return addend;
  if (!of_.cut) {
    ledger_.send(SentBytes{.forward = sum_bytes(addend.numel, addend.dtype, of_.sums)});
    return ledger_.make(addend.numel, addend.dtype, addend.wants);
  }
  const std::int64_t part = addend.numel / of_.tp;
  const std::int64_t to_others = (of_.tp - 1) * part;
  ledger_.send(SentBytes{.forward = to_others * size_of(of_.sums.value_or(addend.dtype)),
                         .backward = addend.wants ? to_others * size_of(addend.dtype) : 0});
  return ledger_.make(part, addend.dtype, addend.wants);
}

KeptValue LayerKeeps::embedding(const std::string& name, Ids ids) {
  const GradContract& weight = parameter(name + ".weight");
  const bool wants = weight.trainable;
  const DType dtype = weight.compute.dtype;
  if (of_.tp > 1 && wants) {
    const std::int64_t own = tokens() / of_.tp;
    ledger_.save(ledger_.make(own, DType::kInt64));
    ledger_.save(ledger_.make(own, DType::kInt64));
    ledger_.save(ledger_.make(own * of_.hidden, dtype));
  }
  save_if(of_.tp == 1 && wants && ids == Ids::kCopied, ledger_.make(tokens(), DType::kInt64));
  return leave(ledger_.make(tokens() * of_.hidden, dtype, wants));
}

void LayerKeeps::loss(const KeptValue& normed, const std::string& name, Softcap softcap) {
  KeptValue logits = linear(enter(normed), name, {}, Deferral::kNever);
  // Each rank sends three numbers a position in forward, none in backward.
  const DType inside = promote(logits.dtype, DType::kFloat32);
  ledger_.send(SentBytes{.forward = 3 * tokens() * (of_.tp - 1) * size_of(inside)});
  if (!logits.wants) return;
  if (softcap == Softcap::kYes) {
    logits = made_like(logits);
    ledger_.save(logits);
  }
  ledger_.save(logits);
  ledger_.save(ledger_.make(tokens(), promote(logits.dtype, DType::kFloat32)));
  if (of_.tp == 1) return;
  ledger_.save(ledger_.make(tokens(), DType::kInt64));
  ledger_.save(ledger_.make(2 * tokens(), DType::kBool));
}

}  // namespace tessera::nn
