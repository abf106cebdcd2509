#include "models/gemma4/gemma4_keeps.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera::models {

using nn::KeptValue;

namespace {

class Gemma4Keeps : public TextKeeps {
 public:
  explicit Gemma4Keeps(ModelKeeps& of) : TextKeeps(of), layers_(of.layers()), spec_(of.of().spec) {}

  std::string prefix() const override { return "model.language_model."; }
  /// A copy of the ids is looked up, in which images are padding, and the result scaled.
  KeptValue embedding(const std::string& name) override {
    return layers_.made_like(layers_.embedding(name, nn::LayerKeeps::Ids::kCopied));
  }
  void enter_layers() override {
    const std::int64_t positions = model().of().positions;
    mask_ = layers_.ledger().make(positions * positions, DType::kBool);
  }
  KeptValue layer(const KeptValue& x, std::int64_t number, const std::string& name) override;
  nn::LayerKeeps::Softcap softcap() const override {
    return spec_.gemma4->final_logit_softcapping ? nn::LayerKeeps::Softcap::kYes
                                                 : nn::LayerKeeps::Softcap::kNo;
  }

 private:
  bool sees_window(const Gemma4Layer& layer) const;
  KeptValue attention(const KeptValue& stream, const Gemma4Layer& layer, const std::string& name);
  moe::KeptRouting route(const KeptValue& x, const std::string& name);
  KeptValue experts(const KeptValue& x, const std::string& name);

  nn::LayerKeeps& layers_;
  const ModelSpec& spec_;
  KeptValue mask_;  ///< of sliding layers, one for all
};

bool Gemma4Keeps::sees_window(const Gemma4Layer& layer) const {
  return layer.type == LayerType::kSliding && model().of().positions > spec_.gemma4->sliding_window;
}

KeptValue Gemma4Keeps::attention(const KeptValue& stream, const Gemma4Layer& layer,
                                 const std::string& name) {
  const KeptValue x = layers_.enter(stream);
  const auto heads_of = [&](const char* projection) {
    return layers_.parameter(name + projection + ".weight").local_shape()[0] / layer.head_dim;
  };
  const std::int64_t heads = heads_of("q_proj"), groups = heads_of("k_proj");
  const KeptValue keys = layers_.linear(x, name + "k_proj");
  const KeptValue raw = layer.key_is_value ? keys : layers_.linear(x, name + "v_proj");
  const KeptValue q =
      layers_.rope_heads(layers_.linear(x, name + "q_proj"), layer.head_dim, name + "q_norm");
  const KeptValue k = layers_.rope_heads(keys, layer.head_dim, name + "k_norm");
  const KeptValue v = layers_.norm(raw, layer.head_dim, "");
  const KeptValue mixed = sees_window(layer) ? layers_.masked_attention(q, k, v, heads, groups)
                                             : layers_.causal_attention(q, k, v, heads, groups);
  return layers_.leave(layers_.linear(mixed, name + "o_proj"));
}

moe::KeptRouting Gemma4Keeps::route(const KeptValue& x, const std::string& name) {
  nn::KeepsLedger& ledger = layers_.ledger();
  const DType inside =
      promote(layers_.parameter(name + "proj.weight").compute.dtype, DType::kFloat32);
  const KeptValue normed = ledger.cast(layers_.norm(x, spec_.hidden_size, ""), inside);
  const bool scales = layers_.trains(name + "scale");
  layers_.save_if(scales, normed);
  const KeptValue scaled = ledger.make(x.numel, inside, x.wants || scales);
  const KeptValue scores = layers_.linear(scaled, name + "proj", inside);
  moe::KeptRouting routed = model().experts().route(scores, promote(scores.dtype, DType::kFloat32));
  // Each expert's factor, looked up: the choice is kept for it already.
  const bool wants = layers_.trains(name + "per_expert_scale");
  layers_.save_if(wants, routed.indices);
  const KeptValue factors = ledger.make(routed.weights.numel, routed.weights.dtype, wants);
  layers_.save_if(routed.weights.wants, factors);
  layers_.save_if(wants, routed.weights);
  routed.weights = layers_.sum(routed.weights, factors);  // a product, whose result is like a sum's
  return routed;
}

KeptValue Gemma4Keeps::experts(const KeptValue& x, const std::string& name) {
  const KeptValue normed = layers_.norm(x, name + "pre_feedforward_layernorm_2");
  const KeptValue entered = model().enter_experts(normed);
  const moe::KeptRouting routing =
      route(model().routed_part(model().enter_experts(x)), name + "router.");
  const KeptValue given =
      model().through_experts(model().routed_part(entered), routing, name + "experts.");
  return layers_.norm(model().leave_experts(given), name + "post_feedforward_layernorm_2");
}

KeptValue Gemma4Keeps::layer(const KeptValue& x, std::int64_t number, const std::string& name) {
  const Gemma4Layer& layer = spec_.gemma4->layers.at(static_cast<std::size_t>(number));
  layers_.ledger().begin_layer(sees_window(layer) ? std::vector{x, mask_} : std::vector{x});
  const KeptValue attended =
      attention(layers_.norm(x, name + "input_layernorm"), layer, name + "self_attn.");
  const KeptValue middle =
      layers_.sum(x, layers_.norm(attended, name + "post_attention_layernorm"));
  KeptValue fed = layers_.mlp(layers_.norm(middle, name + "pre_feedforward_layernorm"),
                              name + "mlp.", nn::LayerKeeps::Gate::kGelu);
  if (spec_.moe) {
    const KeptValue given = experts(middle, name);
    fed = layers_.sum(layers_.norm(fed, name + "post_feedforward_layernorm_1"), given);
  }
  const KeptValue result =
      layers_.sum(middle, layers_.norm(fed, name + "post_feedforward_layernorm"));
  layers_.ledger().end_layer(result);
  return layers_.made_like(result);
}

}  // namespace

std::unique_ptr<TextKeeps> keeps_of_gemma4(ModelKeeps& model) {
  return std::make_unique<Gemma4Keeps>(model);
}

}  // namespace tessera::models
