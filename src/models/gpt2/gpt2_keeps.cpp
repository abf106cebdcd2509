#include "models/gpt2/gpt2_keeps.h"

#include <string>

namespace tessera::models {
namespace {

using nn::KeptValue;

class Gpt2Keeps : public TextKeeps {
 public:
  explicit Gpt2Keeps(ModelKeeps& of) : TextKeeps(of), layers_(of.layers()) {}

  Names names() const override { return {"wte", "h.", "ln_f"}; }
  KeptValue embedding(const std::string& name) override {
    const KeptValue tokens = layers_.embedding(name, nn::LayerKeeps::Ids::kOfBatch);
    return layers_.ledger().make(tokens.numel, tokens.dtype,
                                 tokens.wants || layers_.trains("wpe.weight"));
  }
  KeptValue layer(const KeptValue& x, std::int64_t number, const std::string& name) override;
  KeptValue norm(const KeptValue& x, const std::string& name) override;

 private:
  /// gpt2_parts.cpp: the matrix stands [in, out], and its product is never put off. Where ranks
  /// share the columns of a whole one, a copy of the own ones is kept.
  KeptValue linear(const KeptValue& x, const std::string& name, std::int64_t out_ranks = 1);
  KeptValue attention(const KeptValue& stream, const std::string& name);

  nn::LayerKeeps& layers_;
};

KeptValue Gpt2Keeps::norm(const KeptValue& x, const std::string& name) {
  const bool wants = x.wants || layers_.trains(name + ".weight") || layers_.trains(name + ".bias");
  const std::int64_t rows = x.numel / layers_.of().hidden;
  layers_.save_if(wants, x);
  layers_.save_if(wants, layers_.ledger().make(rows, DType::kFloat32));
  layers_.save_if(wants, layers_.ledger().make(rows, DType::kFloat32));
  return layers_.ledger().make(x.numel, x.dtype, wants);
}

KeptValue Gpt2Keeps::linear(const KeptValue& x, const std::string& name, std::int64_t out_ranks) {
  nn::KeepsLedger& ledger = layers_.ledger();
  const GradContract& weight = layers_.parameter(name + ".weight");
  const auto shape = weight.local_shape();
  const DType compute = weight.compute.dtype;
  const KeptValue input = ledger.cast(x, compute);
  layers_.save_if(weight.trainable, input);
  const std::int64_t out = shape[1] / out_ranks;
  const bool wants = x.wants || weight.trainable || layers_.trains(name + ".bias");
  layers_.save_if(wants && out_ranks > 1, ledger.make(shape[0] * out, compute));
  const KeptValue product = ledger.make(x.numel / shape[0] * out, compute, wants);
  ledger.product(product);
  return ledger.cast(product, x.dtype);
}

KeptValue Gpt2Keeps::attention(const KeptValue& stream, const std::string& name) {
  nn::KeepsLedger& ledger = layers_.ledger();
  const std::int64_t heads =
      model().of().spec.num_attention_heads / static_cast<std::int64_t>(layers_.of().tp);
  const KeptValue all = linear(layers_.enter(stream), name + "c_attn", layers_.of().tp);
  const auto part = [&] { return ledger.make(all.numel / 3, all.dtype, all.wants); };
  const KeptValue q = part(), k = part(), v = part();
  return layers_.leave(linear(layers_.causal_attention(q, k, v, heads, heads), name + "c_proj"));
}

KeptValue Gpt2Keeps::layer(const KeptValue& x, std::int64_t /*number*/, const std::string& name) {
  layers_.ledger().begin_layer({x});
  const KeptValue middle = layers_.sum(x, attention(norm(x, name + "ln_1"), name + "attn."));
  const KeptValue opened = linear(layers_.enter(norm(middle, name + "ln_2")), name + "mlp.c_fc");
  layers_.save_if(opened.wants, opened);
  const KeptValue fed = linear(layers_.made_like(opened), name + "mlp.c_proj");
  const KeptValue result = layers_.sum(middle, layers_.leave(fed));
  layers_.ledger().end_layer(result);
  return result;
}

}  // namespace

std::unique_ptr<TextKeeps> keeps_of_gpt2(ModelKeeps& model) {
  return std::make_unique<Gpt2Keeps>(model);
}

}  // namespace tessera::models
