// Buffers and units of a contract, and the one hash over all of it.
#include "tessera/model_contract.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "tessera/error.h"
#include "unit/grad/contract_cases.h"

namespace tessera::grad::testing::model_contract_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr DType kF32 = DType::kFloat32;
constexpr DType kBF16 = DType::kBFloat16;

ParameterMeta frozen(ParameterMeta meta) {
  meta.trainable = false;
  return meta;
}

BufferMeta buffer(std::string name, DType dtype = kF32) {
  BufferMeta meta;
  meta.name = std::move(name);
  meta.shape = {4};
  meta.dtype = dtype;
  return meta;
}

/// A frozen tower, a trained text part.
ModelContract resolve_buffers(const std::vector<BufferMeta>& buffers,
                              const PrecisionPolicy& policy = mixed_policy()) {
  return resolve_model_contract({frozen(scratch("tower.layers.0.w")), scratch("text.w")}, buffers,
                                {}, policy, {});
}

BufferContract resolve_buffer_only(const BufferMeta& meta,
                                   const PrecisionPolicy& policy = mixed_policy()) {
  return resolve_buffers({meta}, policy).buffers.front();
}

TEST(ResolveBuffers, OfAFrozenPartAreCastToTheComputeDtypeAndOthersStay) {
  for (const char* name : {"tower.std_bias", "tower.layers.0.scale"}) {
    const BufferContract contract = resolve_buffer_only(buffer(name));
    EXPECT_EQ(contract.storage, kF32) << name;
    EXPECT_EQ(contract.compute, kBF16) << name;
    EXPECT_EQ(contract.reason(BufferField::kCompute), "[precision] param_dtype, of a frozen part");
  }
  // "tower2" is no part of "tower"; the root has trained parameters; "other" has none at all.
  for (const char* name : {"text.scale", "tower2.scale", "scale", "other.scale"}) {
    EXPECT_EQ(resolve_buffer_only(buffer(name)).compute, kF32) << name;
  }
}

TEST(ResolveBuffers, AModelThatIsFrozenAsAWholeIsAFrozenPart) {
  const ModelContract all =
      resolve_model_contract({frozen(scratch("w"))}, {buffer("scale")}, {}, mixed_policy(), {});
  EXPECT_EQ(all.buffers.front().compute, kBF16);
  EXPECT_EQ(
      resolve_model_contract({}, {buffer("scale")}, {}, mixed_policy(), {}).buffers[0].compute,
      kF32)
      << "nothing says so";
}

// Naive: the adapter is trained, so its layer's buffer stays fp32 and its neighbour's does not.
TEST(ResolveBuffers, AnAdapterMakesNoTrainedPartOfItsFrozenLayer) {
  ParameterMeta base = frozen(scratch("layers.0.q.weight"));
  base.lora = LoraPart::kBase;
  ParameterMeta neighbour = frozen(scratch("layers.1.q.weight"));
  neighbour.lora = LoraPart::kBase;
  ParameterMeta adapter = scratch("layers.0.q.lora_A.weight");
  adapter.lora = LoraPart::kAdapter;
  const auto buffers =
      resolve_model_contract({base, adapter, neighbour},
                             {buffer("layers.0.scale"), buffer("layers.1.scale"), buffer("scale")},
                             {}, mixed_policy(), {})
          .buffers;
  for (const BufferContract& each : buffers) EXPECT_EQ(each.compute, kBF16) << each.name;
}

TEST(ResolveBuffers, APartIsFrozenByRulesToo) {
  PrecisionPolicy policy = mixed_policy();
  policy.rules = {rule_for("text"), rule_for("tower")};
  policy.rules[0].frozen = FrozenRule::kYes;
  policy.rules[1].frozen = FrozenRule::kNo;
  EXPECT_EQ(resolve_buffer_only(buffer("text.scale"), policy).compute, kBF16);
  EXPECT_EQ(resolve_buffer_only(buffer("tower.std_bias"), policy).compute, kF32);
}

TEST(ResolveBuffers, RopeTablesAndIntegersAreNeverCast) {
  for (const char* name : {"tower.rotary_emb.inv_freq", "tower.local_inv_freq", "tower.freqs_cis",
                           "tower.cos_cached", "tower.rotary_emb.table"}) {
    EXPECT_EQ(resolve_buffer_only(buffer(name)).compute, kF32) << name;
  }
  BufferMeta made = buffer("tower.angles");
  made.computed_table = true;
  EXPECT_EQ(resolve_buffer_only(made).compute, kF32);
  EXPECT_EQ(resolve_buffer_only(buffer("tower.ids", DType::kInt64)).compute, DType::kInt64);
}

TEST(ResolveBuffers, KeepListsAndRecordsAreRespected) {
  BufferMeta listed = buffer("tower.std_bias");
  listed.strict_pin = "std_bias";
  EXPECT_EQ(resolve_buffer_only(listed).compute, kF32);
  listed.strict_pin.reset();
  listed.pin16 = "std_bias";
  EXPECT_EQ(resolve_buffer_only(listed).compute, kF32) << "either list keeps a buffer";
  BufferMeta recorded = buffer("tower.std_bias");
  recorded.checkpoint = kF32;
  recorded.checkpoint_bulk = kBF16;
  EXPECT_EQ(resolve_buffer_only(recorded).compute, kF32);
  recorded.checkpoint_bulk = kF32;
  EXPECT_EQ(resolve_buffer_only(recorded).compute, kBF16)
      << "a uniformly fp32 file records nothing";
}

TEST(ResolveBuffers, ARuleMayNameOneWithAnyParameterNamedByNone) {
  PrecisionPolicy policy = mixed_policy();
  policy.rules = {rule_for("tower.std_bias")};
  policy.rules[0].pin = true;
  EXPECT_EQ(resolve_buffer_only(buffer("tower.std_bias"), policy).compute, kF32);
  policy.rules[0].pin.reset();
  policy.rules[0].param_dtype = DType::kFloat64;
  EXPECT_EQ(resolve_buffer_only(buffer("tower.std_bias"), policy).compute, DType::kFloat64);
}

TEST(ResolveBuffers, OneNameForAParameterAndABuffer) {
  EXPECT_THROW(resolve_buffers({buffer("text.w")}), Error);
}

UnitContract resolve_one(const std::vector<ParameterMeta>& parameters,
                         const PrecisionPolicy& policy, UnitMeta unit = {}) {
  for (std::size_t i = 0; i < parameters.size(); ++i) unit.parameters.push_back(i);
  return resolve_model_contract(parameters, {}, {unit}, policy, {}).units.front();
}

TEST(ResolveUnits, InputsAreCastToParamDtypeUnlessTheUnitComputesWider) {
  const PrecisionPolicy policy = mixed_policy();
  const ParameterMeta bulk = stored("w", kBF16);
  const ParameterMeta wide = stored("norm", kF32);
  EXPECT_EQ(resolve_one({bulk}, policy).input, kBF16);
  EXPECT_EQ(resolve_one({bulk, wide}, policy).input, kBF16) << "its norms cast by themselves";
  EXPECT_EQ(resolve_one({}, policy).input, kBF16);
  const UnitContract alone = resolve_one({wide}, policy);
  EXPECT_EQ(alone.input, std::nullopt);
  EXPECT_EQ(alone.activation, kF32);
  EXPECT_EQ(alone.reason(UnitField::kInput),
            "its parameters compute in float32, wider than param_dtype");
  PrecisionPolicy pinned = policy;
  pinned.rules = {rule_for("w")};
  pinned.rules[0].pin = true;
  EXPECT_EQ(resolve_one({scratch("w")}, pinned).input, std::nullopt);
}

TEST(ResolveUnits, NothingIsCastWhereNothingAsks) {
  PrecisionPolicy policy = mixed_policy();
  policy.cast_forward_inputs = false;
  EXPECT_EQ(resolve_one({scratch("w")}, policy).input, std::nullopt);
  EXPECT_EQ(resolve_one({scratch("w")}, policy).activation, kBF16);
  EXPECT_EQ(resolve_one({scratch("w")}, {}).input, std::nullopt);
  UnitMeta by_itself;
  by_itself.casts_inputs = false;
  EXPECT_EQ(resolve_one({scratch("w")}, mixed_policy(), by_itself).input, std::nullopt);
  EXPECT_EQ(resolve_one({}, {}).activation, std::nullopt);
}

// Naive: each inner unit makes its outputs float32, so that activations between them are.
TEST(ResolveUnits, OnlyTheOutermostCastsItsOutputsUnlessAUnitItselfIsAsked) {
  PrecisionPolicy policy = mixed_policy();
  policy.output_dtype = kF32;
  UnitMeta unit;
  EXPECT_EQ(resolve_one({scratch("w")}, policy, unit).output, kF32);
  unit.nested = true;
  const UnitContract nested = resolve_one({scratch("w")}, policy, unit);
  EXPECT_EQ(nested.output, std::nullopt);
  EXPECT_EQ(nested.activation, kBF16);
  unit.asked_output = DType::kFloat64;
  EXPECT_EQ(resolve_one({scratch("w")}, policy, unit).output, DType::kFloat64);
}

TEST(ResolveUnits, ActivationIsTheInputElseTheOutputElseWhatMostElementsComputeIn) {
  PrecisionPolicy policy = mixed_policy();
  policy.cast_forward_inputs = false;
  ParameterMeta large = stored("large", kF32);
  large.shape = {100};
  EXPECT_EQ(resolve_one({stored("w", kBF16), large}, policy).activation, kF32);
  EXPECT_EQ(resolve_one({stored("w", kBF16)}, policy).activation, kBF16);
  policy.output_dtype = kF32;
  EXPECT_EQ(resolve_one({stored("w", kBF16)}, policy).activation, kF32);
}

ModelContract whole() {
  UnitMeta unit;
  unit.parameters = {0};
  return resolve_model_contract({scratch("w")}, {buffer("b")}, {unit}, mixed_policy(), {});
}

TEST(ModelContract, HashChangesWithEveryFieldOfBuffersAndUnitsButNotWithReasons) {
  const ModelContract base = whole();
  const std::vector<std::function<void(ModelContract&)>> changes = {
      [](ModelContract& m) { m.parameters[0].reduce = kBF16; },
      [](ModelContract& m) { m.buffers[0].name = "c"; },
      [](ModelContract& m) { m.buffers[0].shape = {2, 2}; },
      [](ModelContract& m) { m.buffers[0].storage = kBF16; },
      [](ModelContract& m) { m.buffers[0].compute = kBF16; },
      [](ModelContract& m) { m.buffers[0].stored = false; },
      [](ModelContract& m) { m.units[0].name = "u"; },
      [](ModelContract& m) { m.units[0].nested = true; },
      [](ModelContract& m) { m.units[0].input = kF32; },
      [](ModelContract& m) { m.units[0].input.reset(); },
      [](ModelContract& m) { m.units[0].activation = kF32; },
      [](ModelContract& m) { m.units[0].output = kF32; },
      [](ModelContract& m) { m.parameters.clear(); },
      [](ModelContract& m) { m.buffers.clear(); },
      [](ModelContract& m) { m.units.clear(); },
      [](ModelContract& m) { m.units.push_back(m.units[0]); },
  };
  std::set<std::uint64_t> seen = {hash(base), hash(ModelContract{})};
  std::set<std::string> lines = {to_lines(base), to_lines(ModelContract{})};
  for (const auto& change : changes) {
    ModelContract changed = base;
    change(changed);
    seen.insert(hash(changed));
    lines.insert(to_lines(changed));
  }
  EXPECT_EQ(seen.size(), changes.size() + 2);
  EXPECT_EQ(lines.size(), changes.size() + 2);
  ModelContract told = base;
  told.units[0].reason(UnitField::kInput) = "another reason";
  told.buffers[0].reason(BufferField::kCompute) = "another reason";
  EXPECT_EQ(hash(told), hash(base));
  EXPECT_EQ(to_lines(told), to_lines(base));
}

TEST(ModelContract, LinesNameTheTensorTheFieldAndTheValue) {
  EXPECT_THAT(to_lines(whole()), AllOf(HasSubstr("parameter w reduce float32\n"),
                                       HasSubstr("buffer b compute float32\n"),
                                       HasSubstr("unit (root) input bfloat16\n")));
  ModelContract odd = whole();
  odd.parameters[0].name = "a\nparameter b";
  EXPECT_THAT(to_lines(odd), HasSubstr("a\\x0aparameter b"));
}

TEST(ModelContract, TablesOfBuffersAndUnitsShareTheNumbersOfReasons) {
  EXPECT_THAT(to_string(whole()),
              AllOf(HasSubstr("buffer  shape  storage"), HasSubstr("unit    input"),
                    HasSubstr("(root)  bfloat16 (3)  bfloat16"),
                    HasSubstr("(3) [precision] param_dtype\n")));
}

TEST(ModelContract, EveryValueHasAReason) {
  const ModelContract model = whole();
  for (const auto& reason : model.buffers[0].reasons) EXPECT_NE(reason, "");
  for (const auto& reason : model.units[0].reasons) EXPECT_NE(reason, "");
}

}  // namespace
}  // namespace tessera::grad::testing::model_contract_test
