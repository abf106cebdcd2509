#include "models/kept_activations.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "models/family.h"
#include "tessera/error.h"

namespace tessera::models {
namespace {

/// A tensor as autograd sees it: several may show one memory.
struct Value {
  std::size_t memory = 0;
  std::int64_t numel = 0;
  DType dtype = DType::kFloat32;
  bool wants = false;  ///< a gradient
};

/// What a layer leaves behind, by memory.
struct LayerKeeps {
  std::vector<std::size_t> inputs;    ///< what a checkpoint around it saves
  std::vector<std::size_t> saved;     ///< by its operations
  std::vector<std::size_t> products;  ///< the results of its weights' products
  bool has_graph = false;
};

/// The memories of one model's forward, and who saves them.
class Ledger {
 public:
  Value make(std::int64_t numel, DType dtype, bool wants = false) {
    bytes_.push_back(numel * size_of(dtype));
    return {bytes_.size() - 1, numel, dtype, wants};
  }
  /// As tensor.to(dtype): itself where nothing changes.
  Value cast(const Value& x, DType dtype) {
    return x.dtype == dtype ? x : make(x.numel, dtype, x.wants);
  }
  void save(const Value& x) { (layer_ ? layer_->saved : before_or_after()).push_back(x.memory); }
  void product(const Value& y) {
    if (layer_) layer_->products.push_back(y.memory);
  }
  void begin_layer(const std::vector<Value>& inputs) {
    layer_.emplace();
    for (const Value& input : inputs) layer_->inputs.push_back(input.memory);
  }
  void end_layer(const Value& result) {
    layer_->has_graph = result.wants;
    layers_.push_back(*std::exchange(layer_, std::nullopt));
  }

  KeptActivations::InMode in(RecomputeMode mode) const {
    std::set<std::size_t> kept(before_.begin(), before_.end());
    std::int64_t peak = 0;
    for (const LayerKeeps& layer : layers_) {
      if (!layer.has_graph) continue;
      add(kept, mode == RecomputeMode::kNone ? layer.saved : layer.inputs);
      if (mode == RecomputeMode::kSelective) add(kept, layer.products);
      // In its backward those behind it are gone, and what it saves is there again.
      std::set<std::size_t> with_it = kept;
      add(with_it, layer.saved);
      peak = std::max(peak, sum(with_it));
    }
    add(kept, after_);
    return {sum(kept), std::max(peak, sum(kept))};
  }

 private:
  std::vector<std::size_t>& before_or_after() { return layers_.empty() ? before_ : after_; }
  static void add(std::set<std::size_t>& to, const std::vector<std::size_t>& from) {
    to.insert(from.begin(), from.end());
  }
  std::int64_t sum(const std::set<std::size_t>& memories) const {
    std::int64_t bytes = 0;
    for (const std::size_t memory : memories) bytes += bytes_[memory];
    return bytes;
  }

  std::vector<std::int64_t> bytes_;  // by memory
  std::vector<std::size_t> before_, after_;
  std::vector<LayerKeeps> layers_;
  std::optional<LayerKeeps> layer_;
};

/// Tokens that a layer's experts get, and what the router says of them.
struct Routed {
  std::int64_t tokens = 0;
  Value indices, weights;  ///< [tokens, K]
};

class Forward {
 public:
  explicit Forward(const ForwardCase& of)
      : of_(of),
        spec_(of.spec),
        tp_(of.degrees.tp),
        cut_(tp_ > 1 && of.degrees.sequence == SequenceParallel::kYes),
        tokens_(of.rows * of.positions) {
    for (const GradContract& parameter : of.parameters) {
      by_name_.emplace(parameter.name, &parameter);
      for (const std::string& alias : parameter.aliases) by_name_.emplace(alias, &parameter);
    }
  }

  KeptActivations run() {
    const std::string text = spec_.gemma4 ? "model.language_model." : "model.";
    Value x = embedding(text + "embed_tokens");
    if (spec_.gemma4) {
      x = made_like(x);
      mask_ = ledger_.make(of_.positions * of_.positions, DType::kBool);
    }
    for (std::int64_t i = 0; i < spec_.num_hidden_layers; ++i) {
      const std::string layer = concat(text, "layers.", i, ".");
      x = spec_.gemma4 ? gemma_layer(x, i, layer) : decoder_layer(x, i, layer);
    }
    head(x, text + "norm");
    return {ledger_.in(RecomputeMode::kNone), ledger_.in(RecomputeMode::kFull),
            ledger_.in(RecomputeMode::kSelective)};
  }

 private:
  // --- operations, each with what its autograd function saves ---

  const GradContract* find(const std::string& name) const {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : found->second;
  }
  const GradContract& parameter(const std::string& name) const {
    const GradContract* found = find(name);
    TESSERA_INVARIANT(found != nullptr, "activations of a model without ", name);
    return *found;
  }
  bool trains(const std::string& name) const {
    const GradContract* found = find(name);
    return found != nullptr && found->trainable;
  }

  Value made_like(const Value& x) { return ledger_.make(x.numel, x.dtype, x.wants); }
  void save_if(bool condition, const Value& x) {
    if (condition) ledger_.save(x);
  }

  /// nn/linear.cpp and nn/lora.cpp. `compute`: another dtype than the weight's.
  Value linear(const Value& x, const std::string& name, std::optional<DType> asked = {}) {
    const GradContract& weight = parameter(name + ".weight");
    const auto shape = weight.local_shape();
    const std::int64_t rows = x.numel / shape[1];
    const DType compute = asked.value_or(weight.compute.dtype);
    const bool wants = x.wants || weight.trainable || trains(name + ".bias");
    save_if(weight.trainable, ledger_.cast(x, compute));
    Value product = ledger_.make(rows * shape[0], compute, wants);
    ledger_.product(product);
    const Value y = ledger_.cast(product, x.dtype);
    const GradContract* a = find(name + ".lora_A.weight");
    if (a == nullptr) return y;
    const DType inside = a->compute.dtype;
    ledger_.save(x);
    ledger_.save(ledger_.make(rows * a->shape[0], inside));
    return ledger_.make(y.numel, y.dtype, true);
  }

  /// A norm's rows are as long as its weight; one without a weight keeps a row of ones instead.
  Value norm(const Value& x, std::int64_t columns, const std::string& name) {
    const bool wants = x.wants || (!name.empty() && trains(name + ".weight"));
    if (wants) {
      ledger_.save(x);
      ledger_.save(ledger_.make(x.numel / columns, DType::kFloat32));
      if (name.empty()) ledger_.save(ledger_.make(columns, DType::kFloat32));
    }
    return ledger_.make(x.numel, x.dtype, wants);
  }
  Value norm(const Value& x, const std::string& name) { return norm(x, spec_.hidden_size, name); }

  Value sum(const Value& x, const Value& y) {
    return ledger_.make(x.numel, x.dtype, x.wants || y.wants);
  }

  /// Without a norm the gradient needs the tables only.
  Value rope_heads(const Value& x, std::int64_t head_dim, const std::string& norm_name) {
    const bool normed = find(norm_name + ".weight") != nullptr;
    const bool wants = x.wants || trains(norm_name + ".weight");
    if (wants && normed) {
      ledger_.save(x);
      ledger_.save(ledger_.make(x.numel / head_dim, DType::kFloat32));
    }
    return ledger_.make(x.numel, x.dtype, wants);
  }

  /// kernels/cpu/attention.cpp: the weights of blocks of 256 queries, each with the keys before its
  /// end; values by group.
  Value causal_attention(const Value& q, const Value& k, const Value& v, std::int64_t heads,
                         std::int64_t groups) {
    const bool wants = q.wants || k.wants || v.wants;
    if (wants) {
      ledger_.save(q);
      ledger_.save(k);
      ledger_.save(groups == 1 || of_.positions == 1 ? v : made_like(v));
      constexpr std::int64_t kBlock = 256;
      std::int64_t seen = 0;
      for (std::int64_t begin = 0; begin < of_.positions; begin += kBlock) {
        const std::int64_t end = std::min(of_.positions, begin + kBlock);
        seen += (end - begin) * end;
      }
      ledger_.save(ledger_.make(of_.rows * heads * seen, q.dtype));
    }
    return ledger_.make(v.numel / groups * heads, q.dtype, wants);
  }

  /// nn/masked_attention.cpp, its own function: nothing but inputs.
  Value windowed_attention(const Value& q, const Value& k, const Value& v, bool sinks_train) {
    const bool wants = q.wants || k.wants || v.wants || sinks_train;
    for (const Value& each : {q, k, v}) save_if(wants, each);
    return ledger_.make(q.numel, q.dtype, wants);
  }

  /// The same file, out of ATen operations.
  Value masked_attention(const Value& q, const Value& k, const Value& v, std::int64_t heads,
                         std::int64_t groups) {
    const bool wants = q.wants || k.wants || v.wants;
    if (wants) {
      const std::int64_t scores = of_.rows * heads * of_.positions * of_.positions;
      const Value weights = ledger_.make(scores, promote(q.dtype, DType::kFloat32), true);
      ledger_.save(q);
      ledger_.save(k);
      ledger_.save(ledger_.make(of_.positions * of_.positions, DType::kBool));
      ledger_.save(weights);
      ledger_.save(ledger_.cast(weights, q.dtype));
      ledger_.save(groups == 1 ? v : made_like(v));
    }
    return ledger_.make(q.numel, q.dtype, wants);
  }

  Value swiglu(const Value& gate, const Value& up) {
    const bool wants = gate.wants || up.wants;
    save_if(wants, gate);
    save_if(wants, up);
    return ledger_.make(gate.numel, gate.dtype, wants);
  }
  Value geglu(const Value& gate, const Value& up) {
    const Value opened = made_like(gate);
    save_if(gate.wants, gate);
    save_if(gate.wants, up);
    save_if(up.wants, opened);
    return ledger_.make(gate.numel, gate.dtype, gate.wants || up.wants);
  }

  // --- transitions of tensor parallelism, which save nothing (nn/tensor_region.h) ---

  std::int64_t own_tokens() const { return cut_ ? tokens_ / tp_ : tokens_; }
  Value enter(const Value& x) { return cut_ ? ledger_.make(x.numel * tp_, x.dtype, x.wants) : x; }
  Value leave(const Value& addend) {
    if (tp_ == 1) return addend;
    return ledger_.make(cut_ ? addend.numel / tp_ : addend.numel, addend.dtype, addend.wants);
  }

  // --- parts of a model ---

  /// Ids belong to the batch. Of a vocabulary over several ranks each looks up its own tokens, an
  /// equal part of them as far as anybody knows.
  Value embedding(const std::string& name) {
    const GradContract& weight = parameter(name + ".weight");
    const bool wants = weight.trainable;
    const DType dtype = weight.compute.dtype;
    if (tp_ > 1 && wants) {
      ledger_.save(ledger_.make(tokens_ / tp_, DType::kInt64));
      ledger_.save(ledger_.make(tokens_ / tp_, DType::kInt64));
      ledger_.save(ledger_.make(tokens_ / tp_ * spec_.hidden_size, dtype));
    }
    // Gemma looks up a copy of the ids, in which images are padding.
    save_if(tp_ == 1 && wants && spec_.gemma4, ledger_.make(tokens_, DType::kInt64));
    return leave(ledger_.make(tokens_ * spec_.hidden_size, dtype, wants));
  }

  void head(const Value& x, const std::string& norm_name) {
    Value logits = linear(enter(norm(x, norm_name)), "lm_head");
    if (!logits.wants) return;
    if (spec_.gemma4 && spec_.gemma4->final_logit_softcapping) {
      logits = made_like(logits);
      ledger_.save(logits);
    }
    ledger_.save(logits);
    ledger_.save(ledger_.make(tokens_, promote(logits.dtype, DType::kFloat32)));
    if (tp_ == 1) return;
    ledger_.save(ledger_.make(tokens_, DType::kInt64));
    ledger_.save(ledger_.make(2 * tokens_, DType::kBool));
  }

  Value attention(const Value& stream, std::int64_t number, const std::string& name) {
    const Value x = enter(stream);
    const auto heads_of = [&](const char* projection) {
      return parameter(name + projection + ".weight").local_shape()[0] / spec_.head_dim;
    };
    const std::int64_t heads = heads_of("q_proj"), groups = heads_of("k_proj");
    const Value q = rope_heads(linear(x, name + "q_proj"), spec_.head_dim, name + "q_norm");
    const Value k = rope_heads(linear(x, name + "k_proj"), spec_.head_dim, name + "k_norm");
    const Value v = linear(x, name + "v_proj");
    const bool sinks = find(name + "sinks") != nullptr;
    const bool windowed = spec_.is_sliding(number) && of_.positions > spec_.sliding_window;
    const Value mixed = sinks || windowed ? windowed_attention(q, k, v, trains(name + "sinks"))
                                          : causal_attention(q, k, v, heads, groups);
    return leave(linear(mixed, name + "o_proj"));
  }

  /// nn/mla.cpp. What is turned is written beside what is not: queries and keys are new memory.
  Value latent_attention(const Value& stream, const std::string& name) {
    const MlaSpec& mla = *spec_.mla;
    const Value x = enter(stream);
    const std::int64_t heads = spec_.num_attention_heads / tp_;
    Value q = x;
    if (mla.q_lora_rank) {
      const Value latent = linear(x, name + "q_a_proj");
      q = linear(norm(latent, *mla.q_lora_rank, name + "q_a_layernorm"), name + "q_b_proj");
    } else {
      q = linear(x, name + "q_proj");
    }
    const Value both = linear(x, name + "kv_a_proj_with_mqa");
    // A part of each row, made contiguous for the norm.
    const Value latent = ledger_.make(tokens_ * mla.kv_lora_rank, both.dtype, both.wants);
    const Value kv =
        linear(norm(latent, mla.kv_lora_rank, name + "kv_a_layernorm"), name + "kv_b_proj");
    const Value queries = made_like(q);
    const Value keys = ledger_.make(q.numel, q.dtype, kv.wants || both.wants);
    const Value values = ledger_.make(tokens_ * heads * mla.v_head_dim, kv.dtype, kv.wants);
    return leave(linear(causal_attention(queries, keys, values, heads, heads), name + "o_proj"));
  }

  enum class Gate : std::uint8_t { kSilu, kGelu };
  /// Between enter and leave.
  Value inner_mlp(const Value& x, const std::string& name, Gate gate) {
    const Value first = linear(x, name + "gate_proj");
    const Value up = linear(x, name + "up_proj");
    return linear(gate == Gate::kSilu ? swiglu(first, up) : geglu(first, up), name + "down_proj");
  }
  Value mlp(const Value& x, const std::string& name, Gate gate) {
    return leave(inner_mlp(enter(x), name, gate));
  }

  // models/expert_tokens.h: which tokens a rank routes and which it sends.
  enum class Way : std::uint8_t { kOwn, kSliced, kAllCut, kAllRouted };
  Way way() const {
    if (tp_ == 1) return Way::kOwn;
    if (of_.degrees.etp > 1) return Way::kAllCut;
    if (of_.degrees.router == RouterTokens::kAll) return Way::kAllRouted;
    return cut_ ? Way::kOwn : Way::kSliced;
  }
  /// A part of the rows: the same memory.
  Value part(Value x) const {
    x.numel /= tp_;
    return x;
  }
  Value enter_experts(const Value& x) { return way() == Way::kOwn ? x : enter(x); }
  Value routed_part(const Value& entered) const {
    return way() == Way::kSliced ? part(entered) : entered;
  }

  /// moe/routing.cpp, of scores [tokens, E].
  Routed route(const Value& scores, DType weights_dtype) {
    const MoeSpec& moe = *spec_.moe;
    const std::int64_t tokens = scores.numel / moe.num_experts;
    const std::int64_t slots = tokens * moe.experts_per_token;
    const bool wants = scores.wants;
    const bool all_first = moe.scores == ExpertScores::kSoftmaxOfAll;
    const Value wide = ledger_.cast(scores, promote(scores.dtype, DType::kFloat32));
    const Value probabilities = made_like(wide);
    save_if(wants && (all_first || of_.router_probabilities), probabilities);
    Routed routed{tokens, ledger_.make(slots, DType::kInt64), {}};
    save_if(wants, routed.indices);
    save_if(wants, all_first ? probabilities : wide);  // gather() keeps what it reads
    routed.weights = ledger_.make(slots, wide.dtype, wants);
    if (!all_first) {
      routed.weights = made_like(routed.weights);
      save_if(wants, routed.weights);
    }
    if (moe.norm_topk_prob) {
      save_if(wants, routed.weights);
      save_if(wants, ledger_.make(tokens, wide.dtype));
      routed.weights = made_like(routed.weights);
    }
    if (moe.routed_scaling_factor != 1.0) routed.weights = made_like(routed.weights);
    routed.weights = ledger_.cast(routed.weights, weights_dtype);
    return routed;
  }

  Value grouped(const Value& x, std::int64_t rows, std::int64_t out, const std::string& name) {
    const GradContract& weight = parameter(name);
    const DType compute = weight.compute.dtype;
    save_if(weight.trainable, ledger_.cast(x, compute));
    const bool wants = x.wants || weight.trainable || trains(name + "_bias");
    const Value product = ledger_.make(rows * out, compute, wants);
    ledger_.product(product);
    return ledger_.cast(product, x.dtype);
  }

  /// What two halves of one product become.
  Value expert_gate(const Value& both) {
    const std::int64_t inner = both.numel / 2;
    save_if(both.wants, both);
    if (spec_.moe->activation == ExpertActivation::kGeglu) {
      save_if(both.wants, ledger_.make(inner, both.dtype));
    }
    return ledger_.make(inner, both.dtype, both.wants);
  }

  /// moe/experts.cpp and moe/expert_parallel.cpp. `x` are the tokens that are sent.
  Value experts(const Value& x, const Routed& routed, const std::string& name) {
    const MoeSpec& moe = *spec_.moe;
    const std::int64_t hidden = spec_.hidden_size;
    const std::int64_t slots = x.numel / hidden * moe.experts_per_token;
    const Value slot_of_row = ledger_.make(slots, DType::kInt64);
    const Value row_of_slot = ledger_.make(slots, DType::kInt64);
    save_if(x.wants, row_of_slot);
    Value rows = ledger_.make(slots * hidden, x.dtype, x.wants);
    const auto times_weights = [&](const Value& to) {
      const bool wants = to.wants || routed.weights.wants;
      for (const Value& each : {to, routed.weights, slot_of_row, row_of_slot}) {
        save_if(wants, each);
      }
      return wants;
    };
    if (of_.score_before_experts) {
      rows.wants = times_weights(rows);
      rows = made_like(rows);
    }
    // Rows that come from ranks are put in the order of this rank's experts, if it has several.
    const bool moves = of_.degrees.ep > 1;
    const bool sorts = moves && moe.num_experts / of_.degrees.ep > 1;
    if (moves) rows = made_like(rows);
    save_if(sorts && rows.wants, ledger_.make(slots, DType::kInt64));
    if (sorts) rows = made_like(rows);
    const std::int64_t inner = moe.moe_intermediate_size / of_.degrees.etp;
    const Value both = grouped(rows, slots, 2 * inner, name + "gate_up_proj");
    Value out = grouped(expert_gate(both), slots, hidden, name + "down_proj");
    save_if(sorts && out.wants, ledger_.make(slots, DType::kInt64));
    if (moves) out = made_like(out);
    bool wants = out.wants;
    if (of_.score_before_experts) {
      save_if(out.wants, slot_of_row);
    } else {
      wants = times_weights(out);
    }
    return ledger_.make(x.numel, x.dtype, wants);
  }

  /// The addend of all tokens, or the stream's own.
  Value returned(const Value& given) {
    const Way how = way();
    if (how == Way::kOwn || how == Way::kAllCut) return given;
    return ledger_.make(tokens_ * spec_.hidden_size, given.dtype, given.wants);
  }
  Value leave_experts(const Value& y) { return way() == Way::kOwn ? y : leave(y); }

  Routed sent(const Routed& routed) const {
    if (way() != Way::kAllRouted) return routed;
    return {routed.tokens / tp_, part(routed.indices), part(routed.weights)};
  }
  Value sent(const Value& tokens) const { return way() == Way::kAllRouted ? part(tokens) : tokens; }

  /// models/moe_layer.cpp.
  Value moe(const Value& x, const std::string& name) {
    const MoeSpec& moe = *spec_.moe;
    const Value entered = enter_experts(x);
    const Value routed = routed_part(entered);
    const std::string router = concat(name, traits(spec_.family).router_module);
    const DType own = parameter(router + ".weight").compute.dtype;
    const DType inside =
        moe.router_dtype == RouterDtype::kFloat32 ? promote(own, DType::kFloat32) : own;
    const Value scores = linear(ledger_.cast(routed, inside), router, inside);
    const Routed routing = route(scores, scores.dtype);
    Value y = returned(experts(sent(routed), sent(routing), name + "experts."));
    if (moe.shared_intermediate_size > 0) {
      const std::string shared = name + "shared_experts.";
      y = sum(y, way() == Way::kOwn ? mlp(x, shared, Gate::kSilu)
                                    : inner_mlp(entered, shared, Gate::kSilu));
    }
    return leave_experts(y);
  }

  /// models/decoder_layer.cpp.
  Value decoder_layer(const Value& x, std::int64_t number, const std::string& name) {
    ledger_.begin_layer({x});
    const Value normed = norm(x, name + "input_layernorm");
    const std::string self = name + "self_attn.";
    const Value attended =
        spec_.mla ? latent_attention(normed, self) : attention(normed, number, self);
    const Value middle = sum(x, attended);
    const Value fed_input = norm(middle, name + "post_attention_layernorm");
    const std::string feed = name + "mlp.";
    const Value fed =
        spec_.is_moe(number) ? moe(fed_input, feed) : mlp(fed_input, feed, Gate::kSilu);
    const Value result = sum(middle, fed);
    ledger_.end_layer(result);
    return result;
  }

  // --- models/gemma4/gemma4_layer.cpp ---

  Value gemma_attention(const Value& stream, const Gemma4Layer& layer, const std::string& name) {
    const Value x = enter(stream);
    const auto heads_of = [&](const char* projection) {
      return parameter(name + projection + ".weight").local_shape()[0] / layer.head_dim;
    };
    const std::int64_t heads = heads_of("q_proj"), groups = heads_of("k_proj");
    const Value keys = linear(x, name + "k_proj");
    const Value raw = layer.key_is_value ? keys : linear(x, name + "v_proj");
    const Value q = rope_heads(linear(x, name + "q_proj"), layer.head_dim, name + "q_norm");
    const Value k = rope_heads(keys, layer.head_dim, name + "k_norm");
    const Value v = norm(raw, layer.head_dim, "");
    return leave(linear(sees_window(layer) ? masked_attention(q, k, v, heads, groups)
                                           : causal_attention(q, k, v, heads, groups),
                        name + "o_proj"));
  }
  bool sees_window(const Gemma4Layer& layer) const {
    return layer.type == LayerType::kSliding && of_.positions > spec_.gemma4->sliding_window;
  }

  Routed gemma_route(const Value& x, const std::string& name) {
    const DType inside = promote(parameter(name + "proj.weight").compute.dtype, DType::kFloat32);
    const Value normed = ledger_.cast(norm(x, spec_.hidden_size, ""), inside);
    const bool scales = trains(name + "scale");
    save_if(scales, normed);
    const Value scaled = ledger_.make(x.numel, inside, x.wants || scales);
    const Value scores = linear(scaled, name + "proj", inside);
    Routed routed = route(scores, promote(scores.dtype, DType::kFloat32));
    // Each expert's factor, looked up: the choice is kept for it already.
    const bool wants = trains(name + "per_expert_scale");
    save_if(wants, routed.indices);
    const Value factors = ledger_.make(routed.weights.numel, routed.weights.dtype, wants);
    save_if(routed.weights.wants, factors);
    save_if(wants, routed.weights);
    routed.weights = sum(routed.weights, factors);  // a product, whose result is like a sum's
    return routed;
  }

  Value gemma_experts(const Value& x, const std::string& name) {
    const Value normed = norm(x, name + "pre_feedforward_layernorm_2");
    const Value entered = enter_experts(normed);
    const Routed routing = gemma_route(routed_part(enter_experts(x)), name + "router.");
    const Value given = experts(sent(routed_part(entered)), sent(routing), name + "experts.");
    return norm(leave_experts(returned(given)), name + "post_feedforward_layernorm_2");
  }

  Value gemma_layer(const Value& x, std::int64_t number, const std::string& name) {
    const Gemma4Layer& layer = spec_.gemma4->layers.at(static_cast<std::size_t>(number));
    ledger_.begin_layer(sees_window(layer) ? std::vector{x, mask_} : std::vector{x});
    const Value attended =
        gemma_attention(norm(x, name + "input_layernorm"), layer, name + "self_attn.");
    const Value middle = sum(x, norm(attended, name + "post_attention_layernorm"));
    Value fed = mlp(norm(middle, name + "pre_feedforward_layernorm"), name + "mlp.", Gate::kGelu);
    if (spec_.moe) {
      const Value given = gemma_experts(middle, name);
      fed = sum(norm(fed, name + "post_feedforward_layernorm_1"), given);
    }
    const Value result = sum(middle, norm(fed, name + "post_feedforward_layernorm"));
    ledger_.end_layer(result);
    return made_like(result);
  }

  const ForwardCase& of_;
  const ModelSpec& spec_;
  const std::int64_t tp_;
  const bool cut_;             ///< between layers a rank has a part of the positions
  const std::int64_t tokens_;  ///< of all positions
  std::map<std::string, const GradContract*, std::less<>> by_name_;
  Value mask_;  ///< of Gemma's sliding layers, one for all
  Ledger ledger_;
};

}  // namespace

const KeptActivations::InMode& KeptActivations::in(RecomputeMode mode) const {
  switch (mode) {
    case RecomputeMode::kFull:
      return full;
    case RecomputeMode::kSelective:
      return selective;
    case RecomputeMode::kNone:
      break;
  }
  return none;
}

KeptActivations kept_activations(const ForwardCase& forward) { return Forward(forward).run(); }

}  // namespace tessera::models
