// What autograd keeps, beside the formulas of docs/performance.md worked out by hand; real bytes
// are counted in tests/unit/train/memory_table_test.cpp.
#include "models/keeps/kept_activations.h"

#include "support/test.h"
#include "unit/models/small_spec.h"

namespace tessera::models::kept_activations_test {
namespace {

constexpr std::int64_t kHidden = 32, kInner = 80, kVocabulary = 128;
constexpr std::int64_t kHeads = 4, kGroups = 2, kHeadDim = 16;
constexpr std::int64_t kQ = kHeads * kHeadDim, kK = kGroups * kHeadDim;
constexpr std::int64_t kRows = 3, kPositions = 300, kTokens = kRows * kPositions;

struct Contracts {
  DType compute = DType::kFloat32;
  bool trainable = true;
  std::vector<GradContract> all = {};

  void add(const std::string& name, std::vector<std::int64_t> shape) {
    GradContract& contract = all.emplace_back();
    contract.name = name;
    contract.shape = std::move(shape);
    contract.compute = {compute};
    contract.trainable = trainable;
  }
};

/// Of a small Qwen3.
void add_layer(Contracts& contracts, std::int64_t number) {
  const std::string name = concat("model.layers.", number, ".");
  contracts.add(name + "self_attn.q_proj.weight", {kQ, kHidden});
  contracts.add(name + "self_attn.k_proj.weight", {kK, kHidden});
  contracts.add(name + "self_attn.v_proj.weight", {kK, kHidden});
  contracts.add(name + "self_attn.o_proj.weight", {kHidden, kQ});
  contracts.add(name + "self_attn.q_norm.weight", {kHeadDim});
  contracts.add(name + "self_attn.k_norm.weight", {kHeadDim});
  contracts.add(name + "mlp.gate_proj.weight", {kInner, kHidden});
  contracts.add(name + "mlp.up_proj.weight", {kInner, kHidden});
  contracts.add(name + "mlp.down_proj.weight", {kHidden, kInner});
  contracts.add(name + "input_layernorm.weight", {kHidden});
  contracts.add(name + "post_attention_layernorm.weight", {kHidden});
}

KeptActivations of_layers(std::int64_t layers, Contracts contracts) {
  ModelSpec spec = small();
  spec.num_hidden_layers = layers;
  contracts.add("model.embed_tokens.weight", {kVocabulary, kHidden});
  for (std::int64_t i = 0; i < layers; ++i) add_layer(contracts, i);
  contracts.add("model.norm.weight", {kHidden});
  contracts.add("lm_head.weight", {kVocabulary, kHidden});
  return kept_activations({.spec = spec,
                           .degrees = {},
                           .parameters = contracts.all,
                           .rows = kRows,
                           .positions = kPositions});
}

// What one layer more adds: each of its tensors once, its scales in fp32 whatever it computes in.
TEST(KeptActivations, ADenseLayerKeepsWhatItsFormulaSays) {
  for (const DType compute : {DType::kFloat32, DType::kBFloat16}) {
    const Contracts contracts{.compute = compute};
    const auto two = of_layers(2, contracts);
    const auto one = of_layers(1, contracts);
    const std::int64_t width = size_of(compute);
    const std::int64_t input = kTokens * kHidden * width;
    const std::int64_t products = kTokens * (2 * kHidden + kQ + 2 * kK + 2 * kInner) * width;
    const std::int64_t all = kTokens * (4 * kHidden + 3 * kQ + 3 * kK + 3 * kInner) * width +
                             kTokens * (2 + 3 * kHeads + kGroups) * 4;
    EXPECT_EQ(two.none.kept - one.none.kept, all);
    EXPECT_EQ(two.full.kept - one.full.kept, input);
    EXPECT_EQ(two.selective.kept - one.selective.kept, input + products);
    EXPECT_EQ(two.none.peak, two.none.kept);
  }
}

// Beside the layers: the last one's result, the norm's and the logits, each once; scales in fp32.
TEST(KeptActivations, TheHeadKeepsItsLogitsInEveryMode) {
  const auto none = of_layers(0, {});
  constexpr std::int64_t head = kTokens * (2 * kHidden + kVocabulary + 2) * 4;
  for (const auto& mode : {none.none, none.full, none.selective}) EXPECT_EQ(mode.kept, head);
}

// Naive: what was kept at the end of forward. In backward one layer's tensors come on top of the
// inputs, but the head's are gone by then.
TEST(KeptActivations, ThePeakHasOneLayerAgainAndNoLogits) {
  const auto found = of_layers(6, {});
  const auto one = of_layers(1, {});
  constexpr std::int64_t head = kTokens * (2 * kHidden + kVocabulary + 2) * 4;
  constexpr std::int64_t input = kTokens * kHidden * 4;
  EXPECT_EQ(found.full.peak, 5 * input + (one.none.kept - head));
  EXPECT_GT(found.full.peak, found.full.kept);
  EXPECT_LT(found.selective.peak, found.none.peak);
}

// A graph begins where something is trained.
TEST(KeptActivations, FrozenLayersBeforeTheFirstTrainedParameterKeepNothing) {
  Contracts contracts;
  contracts.trainable = false;
  const auto frozen = of_layers(4, contracts);
  for (const auto& mode : {frozen.none, frozen.full, frozen.selective}) {
    EXPECT_EQ(mode.kept, 0);
    EXPECT_EQ(mode.peak, 0);
  }
}

}  // namespace
}  // namespace tessera::models::kept_activations_test
