#include "tessera/contract.h"

#include "grad/contract_key.h"
#include "support/test.h"
#include "tessera/model_contract.h"
#include "unit/grad/contract_cases.h"

namespace tessera::grad::testing::contract_test {
namespace {

TEST(Contract, NumelOfScalarsAndOfEmptyShapes) {
  ParameterMeta meta = scratch("w");
  EXPECT_EQ(meta.numel(), 12);
  meta.shape = {};
  EXPECT_EQ(meta.numel(), 1);
  meta.shape = {0, std::int64_t{1} << 62, std::int64_t{1} << 62};
  EXPECT_ANY_THROW(meta.numel());
  meta.shape = {5, 0};
  EXPECT_EQ(meta.numel(), 0);
}

TEST(Contract, KeyCarriesEveryDtypeOfATrainableParameter) {
  PrecisionPolicy policy = mixed_policy();
  policy.final_dtype = DType::kFloat64;
  policy.reduce_dtype = DType::kBFloat16;
  const ReductionPlan reductions{{"dp_shard"}, {}, 2};
  const GradContract contract = resolve_contracts({scratch("w")}, policy, reductions).front();
  const layout::BucketKey key = key_of(contract);
  EXPECT_EQ(key.storage, DType::kFloat32);
  EXPECT_EQ(key.compute, DType::kBFloat16);
  EXPECT_EQ(key.accumulate, DType::kFloat32);
  EXPECT_EQ(key.reduce, DType::kBFloat16);
  EXPECT_EQ(key.final, DType::kFloat64);
  EXPECT_TRUE(key.trainable);
  EXPECT_EQ(key.reductions, reductions);
}

TEST(Contract, FrozenParametersShareABucketForAnyGradientDtypes) {
  PrecisionPolicy policy = mixed_policy();
  policy.rules = {rule_for("a"), rule_for("*")};
  policy.rules[0].reduce_dtype = DType::kBFloat16;
  policy.rules[1].frozen = FrozenRule::kYes;
  const auto contracts = resolve_contracts({scratch("a"), scratch("b")}, policy, {});
  EXPECT_EQ(key_of(contracts[0]), key_of(contracts[1]));
  policy.rules.pop_back();
  const auto trained = resolve_contracts({scratch("a"), scratch("b")}, policy, {});
  EXPECT_FALSE(key_of(trained[0]) == key_of(trained[1]));
}

TEST(Contract, WholeFrozenParametersHaveABucketOfOneSliceInTheirComputeDtype) {
  PrecisionPolicy policy = mixed_policy();
  policy.rules = {rule_for("a"), rule_for("b")};
  policy.rules[0].frozen = FrozenRule::kShard;
  policy.rules[1].frozen = FrozenRule::kReplicate;
  const auto contracts =
      resolve_contracts({scratch("a"), scratch("b")}, policy, {{"dp_shard"}, {"dp_replicate"}, 2});
  EXPECT_FALSE(key_of(contracts[0]).replicated);
  const layout::BucketKey key = key_of(contracts[1]);
  EXPECT_TRUE(key.replicated);
  EXPECT_EQ(key.storage, DType::kBFloat16) << "cast once after loading";
  EXPECT_TRUE(key.reductions.shard_axes.empty() && key.reductions.replica_axes.empty());
}

const AxisPlacement kOnTp{"tp", 2, {PlacementKind::kShard, 0}, {PlacementKind::kShard, 0}};

// A rank's tensor is a part of the parameter; dtypes, decay and names are those of the whole.
TEST(Contract, LayoutGivesLocalShapeReductionsAndAColumn) {
  ParameterMeta cut = scratch("w");
  cut.layout.axes = {kOnTp};
  ParameterMeta copied = scratch("norm");
  copied.layout.axes = {{"tp", 2, {PlacementKind::kReplicate}, {PlacementKind::kPartial}}};
  const DataAxes data(MeshShape::dense(1, 1, 4, 1, 2));
  const auto contracts = resolve_contracts({cut, copied}, mixed_policy(), data);
  EXPECT_EQ(contracts[0].local_shape(), (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(contracts[0].numel(), 12);
  EXPECT_EQ(contracts[0].local_numel(), 6);
  EXPECT_EQ(to_string(contracts[0].reductions), "sum over dp_shard, / 4");
  EXPECT_EQ(to_string(contracts[1].reductions), "sum over dp_shard x tp, / 4");
  EXPECT_EQ(contracts[1].local_numel(), 12);
  EXPECT_FALSE(key_of(contracts[0]) == key_of(contracts[1]));
  const auto table = to_string(contracts);
  EXPECT_THAT(table, Says("placement", "tp 2 S(0), gradient S(0)", "tp 2 R, gradient P"));
}

TEST(Contract, HashChangesWithEveryFieldButNotWithReasons) {
  const GradContract base = resolve_only(scratch("w"), mixed_policy());
  const std::vector<std::function<void(GradContract&)>> changes = {
      [](GradContract& c) { c.name = "v"; },
      [](GradContract& c) { c.shape = {3, 4}; },
      [](GradContract& c) { c.shape = {12}; },
      [](GradContract& c) { c.storage.dtype = DType::kBFloat16; },
      [](GradContract& c) { c.compute.dtype = DType::kFloat32; },
      [](GradContract& c) { c.loaded_through = DType::kBFloat16; },
      [](GradContract& c) { c.grad = DType::kFloat32; },
      [](GradContract& c) { c.accumulate = DType::kFloat64; },
      [](GradContract& c) { c.reduce = DType::kBFloat16; },
      [](GradContract& c) { c.final = DType::kBFloat16; },
      [](GradContract& c) { c.trainable = false; },
      [](GradContract& c) { c.frozen_as = FrozenAs::kReplicate; },
      [](GradContract& c) { c.master = Master::kCopy; },
      [](GradContract& c) { c.compute.rounding = Rounding::kHalfAway; },
      [](GradContract& c) { c.state = DType::kBFloat16; },
      [](GradContract& c) { c.decays = true; },
      [](GradContract& c) { c.decays = false; },
      [](GradContract& c) { c.raw_sum_by_autograd = true; },
      [](GradContract& c) { c.reductions.shard_axes = {"dp_shard"}; },
      [](GradContract& c) { c.reductions.replica_axes = {"dp_shard"}; },
      [](GradContract& c) { c.reductions.divide_factor = 2; },
      [](GradContract& c) { c.aliases = {"v"}; },
      [](GradContract& c) { c.layout.mesh = MeshKind::kSparse; },
      [](GradContract& c) { c.layout.sharded_shape = {2, 2, 3}; },
      [](GradContract& c) { c.layout.sections = {1, 3}; },
      [](GradContract& c) { c.layout.axes = {kOnTp}; },
      [](GradContract& c) { c.layout.axes = {kOnTp, kOnTp}; },
      [](GradContract& c) { (c.layout.axes = {kOnTp}).front().size = 4; },
      [](GradContract& c) { (c.layout.axes = {kOnTp}).front().parameter.dim = 1; },
  };
  std::set<std::uint64_t> seen = {hash({base}), hash(std::vector<GradContract>{}),
                                  hash({base, base})};
  for (const auto& change : changes) {
    GradContract changed = base;
    change(changed);
    seen.insert(hash({changed}));
  }
  EXPECT_EQ(seen.size(), changes.size() + 3);
  GradContract told = base;
  told.reason(ContractField::kCompute) = "another reason";
  EXPECT_EQ(hash({told}), hash({base}));
}

TEST(Contract, TableIsAlignedAndNumbersItsReasons) {
  PrecisionPolicy policy = mixed_policy();
  policy.rules = {rule_for("head")};
  policy.rules[0].frozen = FrozenRule::kYes;
  ParameterMeta head = stored("head.weight", DType::kFloat32);
  head.aliases = {"embed.weight"};
  const std::string text = to_string(
      resolve_contracts({stored("w", DType::kBFloat16), head}, policy, {{"dp_shard"}, {}, 2}));
  EXPECT_EQ(
      text,
      "parameter                   shape  trained        storage       compute       grad    "
      " accumulate   reduce       final        master         state        decay       "
      " reductions\n"
      "w                           4x3    trainable (1)  bfloat16 (2)  bfloat16 (3)  "
      "raw (4)  float32 (5)  float32 (6)  float32 (7)  remainder (8)  float32 (7)  "
      "unknown (9)  sum over dp_shard, / 2\n"
      "head.weight = embed.weight  4x3    frozen (10)    float32 (2)   float32 (11)  -        "
      "-            -            -            -              -            -           "
      " -\n"
      "(1) the model\n"
      "(2) as in the checkpoint\n"
      "(3) [precision] param_dtype\n"
      "(4) nothing asks for rounding on arrival; where one forward uses it more than once, "
      "the sum of the uses is autograd's, in bfloat16\n"
      "(5) float32 unless asked otherwise\n"
      "(6) [precision] reduce_dtype\n"
      "(7) as the master\n"
      "(8) storage is bfloat16\n"
      "(9) the optimizer's own no_decay says\n"
      "(10) rule 1 (head)\n"
      "(11) recorded by the checkpoint (float32, most of it bfloat16)\n");
}

TEST(Contract, FieldsHaveTheNamesOfTheTable) {
  EXPECT_EQ(to_string(ContractField::kStorage), "storage");
  EXPECT_EQ(to_string(ContractField::kTrainable), "trainable");
}

TEST(Contract, PatternsAreThoseOfTheRules) {
  EXPECT_TRUE(matches_name("*norm", "model.layers.0.input_layernorm.weight"));
  EXPECT_FALSE(matches_name("norm", "model.layers.0.input_layernorm.weight"));
}

// Buffers and units of a contract, and the one hash over all of it.
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

// Naive: a rule for the experts alone, which are most of a layer, makes its activations float32.
TEST(ResolveUnits, ActivationOfAMixedInnerUnitIsParamDtypeForAnyDtypeOfTheRest) {
  PrecisionPolicy policy = mixed_policy();
  policy.cast_forward_inputs = false;
  ParameterMeta large = stored("large", kF32);
  large.shape = {100};
  UnitMeta inner;
  inner.nested = true;
  const UnitContract mixed = resolve_one({stored("w", kBF16), large}, policy, inner);
  EXPECT_EQ(mixed.activation, kBF16);
  EXPECT_EQ(mixed.reason(UnitField::kActivation),
            "[precision] param_dtype, which some of its parameters compute in");
  EXPECT_EQ(resolve_one({large}, policy, inner).activation, kF32);
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
  EXPECT_THAT(to_lines(whole()), Says("parameter w reduce float32\n", "buffer b compute float32\n",
                                      "unit (root) input bfloat16\n"));
  ModelContract odd = whole();
  odd.parameters[0].name = "a\nparameter b";
  EXPECT_THAT(to_lines(odd), Says("a\\x0aparameter b"));
}

TEST(ModelContract, TablesOfBuffersAndUnitsShareTheNumbersOfReasons) {
  EXPECT_THAT(to_string(whole()),
              Says("buffer  shape  storage", "unit    input", "(root)  bfloat16 (3)  bfloat16",
                   "(3) [precision] param_dtype\n"));
}

TEST(ModelContract, EveryValueHasAReason) {
  const ModelContract model = whole();
  for (const auto& reason : model.buffers[0].reasons) EXPECT_NE(reason, "");
  for (const auto& reason : model.units[0].reasons) EXPECT_NE(reason, "");
}

}  // namespace
}  // namespace tessera::grad::testing::contract_test
