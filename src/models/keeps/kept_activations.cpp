#include "models/keeps/kept_activations.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <string>

#include "layout/range.h"
#include "models/family.h"
#include "tessera/error.h"

namespace tessera::models {

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

namespace {

/// What another stage made. It wants a gradient where anything before it is trained.
nn::KeptValue received(nn::LayerKeeps& layers, const ForwardCase& forward, std::int64_t begin,
                       const TextKeeps::Names& names) {
  const std::string layer = concat(names.layers, begin, ".");
  const auto border = std::ranges::find_if(forward.parameters, [&](const GradContract& each) {
    return each.name.starts_with(layer) || each.name == names.norm + ".weight";
  });
  const bool wants =
      std::any_of(forward.parameters.begin(), border, std::mem_fn(&GradContract::trainable));
  const std::int64_t parts = layers.of().cut ? layers.of().tp : 1;
  return layers.ledger().make(layers.tokens() / parts * forward.spec.hidden_size,
                              layers.parameter(names.embedding + ".weight").compute.dtype, wants);
}

}  // namespace

KeptActivations kept_activations(const ForwardCase& forward) {
  ModelKeeps model(forward);
  nn::LayerKeeps& layers = model.layers();
  const auto own = traits(forward.spec.family).keeps;
  const auto of_text = own != nullptr ? own(model) : std::make_unique<TextKeeps>(model);
  const TextKeeps::Names names = of_text->names();
  const StageLayers stage =
      forward.stage.value_or(StageLayers{true, {0, forward.spec.num_hidden_layers}, true});
  nn::KeptValue x = stage.embedding ? of_text->embedding(names.embedding)
                                    : received(layers, forward, stage.layers.begin, names);
  const std::int64_t stream = x.numel * size_of(x.dtype);
  const bool input_wants = !stage.embedding && x.wants;
  for (std::int64_t i = stage.layers.begin; i < stage.layers.end; ++i) {
    x = of_text->layer(x, i, concat(names.layers, i, "."));
  }
  if (stage.head) layers.loss(of_text->norm(x, names.norm), "lm_head", of_text->softcap());
  return {.none = layers.ledger().in(RecomputeMode::kNone),
          .full = layers.ledger().in(RecomputeMode::kFull),
          .selective = layers.ledger().in(RecomputeMode::kSelective),
          .deferred = layers.ledger().deferred(),
          .stream = stream,
          .input_wants = input_wants,
          .ledger = layers.ledger()};
}

namespace {

using nn::KeptValue;

nn::KeepsCase layers_of(const ForwardCase& of) {
  const bool cut = of.degrees.tp > 1 && of.degrees.sequence == SequenceParallel::kYes;
  const FamilyTraits& family = traits(of.spec.family);
  return {.parameters = of.parameters,
          .rows = of.rows,
          .positions = of.positions,
          .hidden = of.spec.hidden_size,
          .tp = of.degrees.tp,
          .tp_rank = of.tp_rank,
          .cut = cut,
          .sums = of.activation_reduce,
          .norms_add_one = family.norm_adds_one,
          .qk_norm_over_heads = family.qk_norm_over_heads};
}

/// Of a model without experts nobody asks.
moe::ExpertKeepsCase experts_of(const ForwardCase& of) {
  if (!of.spec.moe) return {};
  const MoeSpec& moe = *of.spec.moe;
  return {.num_experts = moe.num_experts,
          .experts_per_token = moe.experts_per_token,
          .intermediate_size = moe.moe_intermediate_size,
          .ep = of.degrees.ep,
          .etp = of.degrees.etp,
          .softmax_of_all = moe.scores == ExpertScores::kSoftmaxOfAll,
          .norm_topk = moe.norm_topk_prob,
          .scaled = moe.routed_scaling_factor != 1.0,
          .geglu = moe.activation == ExpertActivation::kGeglu,
          .score_before_experts = of.score_before_experts || moe.scores_before_experts,
          .router_probabilities = of.router_probabilities};
}

}  // namespace

ModelKeeps::ModelKeeps(const ForwardCase& of)
    : of_(of), layers_(layers_of(of)), experts_(layers_, experts_of(of)) {}

ModelKeeps::Way ModelKeeps::way() const {
  if (of_.degrees.tp == 1) return Way::kOwn;
  if (of_.degrees.etp > 1) return Way::kAllCut;
  if (of_.degrees.router == RouterTokens::kAll) return Way::kAllRouted;
  return layers_.of().cut ? Way::kOwn : Way::kSliced;
}

/// This rank's rows of `x`, in the same memory.
KeptValue ModelKeeps::part(KeptValue x) const {
  const std::int64_t rows = layers_.tokens();
  x.numel = x.numel / rows * layout::part_of(rows, of_.degrees.tp, of_.tp_rank).size();
  return x;
}

bool ModelKeeps::slices_stream() const {
  return way() == Way::kSliced && of_.spec.moe->shared_intermediate_size == 0;
}

KeptValue ModelKeeps::enter_experts(const KeptValue& x) {
  return way() == Way::kOwn || slices_stream() ? x : layers_.enter(x);
}

KeptValue ModelKeeps::routed_part(const KeptValue& entered) {
  if (way() != Way::kSliced) return entered;
  if (slices_stream() && entered.wants) {
    const std::int64_t largest = layout::part_of(layers_.tokens(), of_.degrees.tp, 0).size();
    layers_.ledger().send(nn::SentBytes{.backward = (of_.degrees.tp - 1) * largest *
                                                    of_.spec.hidden_size * size_of(entered.dtype)});
  }
  return part(entered);
}

KeptValue ModelKeeps::leave_experts(const KeptValue& y) {
  return way() == Way::kOwn ? y : layers_.leave(y);
}

KeptValue ModelKeeps::through_experts(const KeptValue& routed, const moe::KeptRouting& routing,
                                      const std::string& name) {
  KeptValue given;
  if (way() == Way::kAllRouted) {
    const std::int64_t own = layout::part_of(routing.tokens, of_.degrees.tp, of_.tp_rank).size();
    const moe::KeptRouting sent{own, part(routing.indices), part(routing.weights)};
    given = experts_.experts(part(routed), sent, name);
  } else {
    given = experts_.experts(routed, routing, name);
  }
  // The addend of all tokens, or the stream's own.
  if (way() == Way::kOwn || way() == Way::kAllCut) return given;
  return layers_.ledger().make(layers_.tokens() * of_.spec.hidden_size, given.dtype, given.wants);
}

KeptValue ModelKeeps::attention(const KeptValue& x, std::int64_t number, const std::string& name) {
  if (of_.spec.mla) {
    const MlaSpec& mla = *of_.spec.mla;
    return layers_.latent_attention(
        x, {mla.q_lora_rank, mla.kv_lora_rank, mla.v_head_dim, of_.spec.num_attention_heads}, name);
  }
  const bool windowed = of_.spec.is_sliding(number) && of_.positions > of_.spec.sliding_window;
  using Windowed = nn::LayerKeeps::Windowed;
  return layers_.self_attention(x, of_.spec.head_dim, windowed ? Windowed::kYes : Windowed::kNo,
                                name);
}

KeptValue ModelKeeps::moe_layer(const KeptValue& x, const std::string& name) {
  const MoeSpec& moe = *of_.spec.moe;
  const KeptValue entered = enter_experts(x);
  const KeptValue routed = routed_part(entered);
  const std::string router = concat(name, traits(of_.spec.family).router_module);
  const DType own = layers_.parameter(router + ".weight").compute.dtype;
  const DType inside =
      moe.router_dtype == RouterDtype::kFloat32 ? promote(own, DType::kFloat32) : own;
  const KeptValue scores = layers_.linear(layers_.ledger().cast(routed, inside), router, inside);
  const moe::KeptRouting routing = experts_.route(
      scores, moe.wide_weights ? promote(scores.dtype, DType::kFloat32) : scores.dtype);
  KeptValue y = through_experts(routed, routing, name + "experts.");
  if (moe.shared_intermediate_size > 0) {
    const std::string shared = concat(name, traits(of_.spec.family).shared_module, ".");
    constexpr auto kSilu = nn::LayerKeeps::Gate::kSilu;
    y = layers_.sum(y, way() == Way::kOwn ? layers_.mlp(x, shared, kSilu)
                                          : layers_.inner_mlp(entered, shared, kSilu));
  }
  return leave_experts(y);
}

KeptValue ModelKeeps::embedding(const std::string& name) {
  const KeptValue embedded = layers_.embedding(name, nn::LayerKeeps::Ids::kOfBatch);
  return traits(of_.spec.family).scaled_embedding ? layers_.made_like(embedded) : embedded;
}

KeptValue ModelKeeps::decoder_layer(const KeptValue& x, std::int64_t number,
                                    const std::string& name) {
  using Gate = nn::LayerKeeps::Gate;
  const FamilyTraits& family = traits(of_.spec.family);
  const bool before = family.norms != NormPlacement::kAfter;
  const bool after = family.norms != NormPlacement::kBefore;
  const auto normed = [&](bool there, const KeptValue& of, const char* norm) {
    return there ? layers_.norm(of, name + norm) : of;
  };
  layers_.ledger().begin_layer({x});
  const KeptValue attended =
      attention(normed(before, x, "input_layernorm"), number, name + "self_attn.");
  const KeptValue middle = layers_.sum(x, normed(after, attended, "post_attention_layernorm"));
  const KeptValue fed_input =
      normed(before, middle, after ? "pre_feedforward_layernorm" : "post_attention_layernorm");
  const KeptValue fed = of_.spec.is_moe(number)
                            ? moe_layer(fed_input, concat(name, family.moe_names.module, "."))
                            : layers_.mlp(fed_input, concat(name, family.mlp_module, "."),
                                          family.gelu_mlp ? Gate::kGelu : Gate::kSilu);
  const KeptValue result = layers_.sum(middle, normed(after, fed, "post_feedforward_layernorm"));
  layers_.ledger().end_layer(result);
  return result;
}

}  // namespace tessera::models
