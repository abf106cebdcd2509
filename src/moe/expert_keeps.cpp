#include "moe/expert_keeps.h"

namespace tessera::moe {

using nn::KeptValue;

KeptRouting ExpertKeeps::route(const KeptValue& scores, DType weights_dtype) {
  nn::KeepsLedger& ledger = layers_.ledger();
  const std::int64_t tokens = scores.numel / of_.num_experts;
  const std::int64_t slots = tokens * of_.experts_per_token;
  const bool wants = scores.wants;
  const KeptValue wide = ledger.cast(scores, promote(scores.dtype, DType::kFloat32));
  const KeptValue probabilities = layers_.made_like(wide);
  layers_.save_if(wants && (of_.softmax_of_all || of_.router_probabilities), probabilities);
  KeptRouting routed{tokens, ledger.make(slots, DType::kInt64), {}};
  layers_.save_if(wants, routed.indices);
  layers_.save_if(wants,
                  of_.softmax_of_all ? probabilities : wide);  // gather() keeps what it reads
  routed.weights = ledger.make(slots, wide.dtype, wants);
  if (!of_.softmax_of_all) {
    routed.weights = layers_.made_like(routed.weights);
    layers_.save_if(wants, routed.weights);
  }
  if (of_.norm_topk) {
    layers_.save_if(wants, routed.weights);
    layers_.save_if(wants, ledger.make(tokens, wide.dtype));
    routed.weights = layers_.made_like(routed.weights);
  }
  if (of_.scaled) routed.weights = layers_.made_like(routed.weights);
  routed.weights = ledger.cast(routed.weights, weights_dtype);
  return routed;
}

KeptValue ExpertKeeps::grouped(const KeptValue& x, std::int64_t rows, std::int64_t out,
                               const std::string& name) {
  nn::KeepsLedger& ledger = layers_.ledger();
  const GradContract& weight = layers_.parameter(name);
  const DType compute = weight.compute.dtype;
  const KeptValue input = ledger.cast(x, compute);
  layers_.save_if(weight.trainable, input);
  const bool wants = x.wants || weight.trainable || layers_.trains(name + "_bias");
  const KeptValue product = ledger.make(rows * out, compute, wants);
  ledger.product(product);
  if (weight.trainable) ledger.put_off(input, product);
  const KeptValue y = ledger.cast(product, x.dtype);
  const GradContract* a = layers_.find(name + ".lora_A.weight");
  if (a == nullptr) return y;
  ledger.save(x);
  ledger.save(ledger.make(rows * a->shape[1], a->compute.dtype));
  return ledger.make(y.numel, y.dtype, true);
}

KeptValue ExpertKeeps::gate(const KeptValue& both) {
  const std::int64_t inner = both.numel / 2;
  layers_.save_if(both.wants, both);
  if (of_.geglu) layers_.save_if(both.wants, layers_.ledger().make(inner, both.dtype));
  return layers_.ledger().make(inner, both.dtype, both.wants);
}

KeptValue ExpertKeeps::experts(const KeptValue& x, const KeptRouting& routed,
                               const std::string& name) {
  nn::KeepsLedger& ledger = layers_.ledger();
  const std::int64_t hidden = layers_.of().hidden;
  const std::int64_t slots = x.numel / hidden * of_.experts_per_token;
  const KeptValue slot_of_row = ledger.make(slots, DType::kInt64);
  const KeptValue row_of_slot = ledger.make(slots, DType::kInt64);
  layers_.save_if(x.wants, row_of_slot);
  KeptValue rows = ledger.make(slots * hidden, x.dtype, x.wants);
  const auto times_weights = [&](const KeptValue& to) {
    const bool wants = to.wants || routed.weights.wants;
    for (const KeptValue& each : {to, routed.weights, slot_of_row, row_of_slot}) {
      layers_.save_if(wants, each);
    }
    return wants;
  };
  if (of_.score_before_experts) {
    rows.wants = times_weights(rows);
    rows = layers_.made_like(rows);
  }
  // Rows that come from ranks are put in the order of this rank's experts, if it has several.
  const bool moves = of_.ep > 1;
  const bool sorts = moves && of_.num_experts / of_.ep > 1;
  const bool rows_want = rows.wants;
  if (moves) rows = layers_.made_like(rows);
  layers_.save_if(sorts && rows.wants, ledger.make(slots, DType::kInt64));
  if (sorts) rows = layers_.made_like(rows);
  const std::int64_t inner = of_.intermediate_size / of_.etp;
  const KeptValue both = grouped(rows, slots, 2 * inner, name + "gate_up_proj");
  KeptValue out = grouped(gate(both), slots, hidden, name + "down_proj");
  layers_.save_if(sorts && out.wants, ledger.make(slots, DType::kInt64));
  if (moves) out = layers_.made_like(out);
  if (moves) {
    ledger.send(nn::SentTokens{
        .tokens = x.numel / hidden,
        .row_bytes = hidden * size_of(out.dtype),
        .count_bytes = (of_.ep - 1) * (of_.num_experts / of_.ep + 1) * size_of(DType::kInt64),
        .outputs_want = out.wants,
        .inputs_want = rows_want});
  }
  bool wants = out.wants;
  if (of_.score_before_experts) {
    layers_.save_if(out.wants, slot_of_row);
  } else {
    wants = times_weights(out);
  }
  return ledger.make(x.numel, x.dtype, wants);
}

}  // namespace tessera::moe
