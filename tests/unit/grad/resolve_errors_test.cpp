// The refusals of resolution: each message names the parameter, both values and the key to change.
#include <limits>

#include "grad/contract_key.h"
#include "support/test.h"
#include "unit/grad/contract_cases.h"

namespace tessera::grad::testing::resolve_errors_test {
namespace {

/// The message of the kContract error, or "" when there is none.
std::string refusal(const std::vector<ParameterMeta>& parameters, const PrecisionPolicy& policy,
                    const ReductionPlan& reductions = {}) {
  return refusal_of(ErrorKind::kContract,
                    [&] { resolve_contracts(parameters, policy, reductions); });
}

TEST(ResolveErrors, PinOnANarrowFileNamesParameterPinAndKeys) {
  PrecisionPolicy policy = mixed_policy();
  policy.rules = {rule_for("mlp.gate")};
  policy.rules[0].pin = true;
  EXPECT_THAT(refusal({stored("mlp.gate.weight", DType::kBFloat16)}, policy),
              Says("mlp.gate.weight: found bfloat16 in the checkpoint", "rule 1 (mlp.gate)",
                   "expected float32", "widen = true", "storage_dtype"));
  ParameterMeta meta = stored("sinks", DType::kBFloat16);
  meta.strict_pin = "sinks";
  EXPECT_THAT(refusal({meta}, mixed_policy()),
              Says("by the model family (_keep_in_fp32_modules_strict: sinks)"));
  policy.storage_dtype = DType::kBFloat16;  // asking for the narrow storage changes nothing
  EXPECT_THAT(refusal({stored("mlp.gate.weight", DType::kBFloat16)}, policy), Says("widen = true"));
}

TEST(ResolveErrors, PinWithANarrowDtypeInOneRuleContradictsItself) {
  PrecisionPolicy policy;
  policy.rules = {rule_for("w")};
  policy.rules[0].pin = true;
  policy.rules[0].param_dtype = DType::kBFloat16;
  EXPECT_THAT(refusal({scratch("w")}, policy),
              Says("[[precision.rule]] 1 (w)", "param_dtype = bfloat16"));
}

TEST(ResolveErrors, TrainableIntegers) {
  EXPECT_THAT(refusal({scratch("tid2eid", DType::kInt32)}, {}),
              Says("tid2eid", "int32", "frozen = true"));
}

TEST(ResolveErrors, TrainablePackedStorage) {
  EXPECT_THAT(refusal({stored("w", DType::kFloat8E4M3)}, mixed_policy()),
              Says("w: found a trainable parameter stored as float8_e4m3fn", "storage_dtype"));
}

TEST(ResolveErrors, PackedComputeDtype) {
  ParameterMeta meta = scratch("w", DType::kFloat8E5M2);
  meta.trainable = false;
  EXPECT_THAT(refusal({meta}, {}), Says("w: found the compute dtype float8_e5m2", "param_dtype"));
}

TEST(ResolveErrors, Float16OnTheWire) {
  PrecisionPolicy policy;
  policy.reduce_dtype = DType::kFloat16;
  EXPECT_THAT(refusal({scratch("w")}, policy),
              Says("w: found the reduce dtype float16", "loss scaler", "[precision] reduce_dtype"));
  policy.reduce_dtype.reset();
  policy.rules = {rule_for("w")};
  policy.rules[0].reduce_dtype = DType::kFloat16;
  EXPECT_THAT(refusal({scratch("w")}, policy), Says("reduce_dtype of rule 1 (w)"));
  policy.loss_scaling = true;
  EXPECT_EQ(refusal({scratch("w")}, policy), "");
}

TEST(ResolveErrors, AccumulatorNarrowerThanTheWire) {
  PrecisionPolicy policy;
  policy.accumulate_dtype = DType::kBFloat16;
  EXPECT_THAT(refusal({scratch("w")}, policy),
              Says("w: found the accumulate dtype bfloat16", "expected float32 or wider",
                   "[precision] accumulate_dtype", "reduce_dtype"));
  policy.accumulate_dtype = DType::kFloat32;
  policy.rules = {rule_for("w")};
  policy.rules[0].reduce_dtype = DType::kFloat64;
  EXPECT_THAT(refusal({scratch("w")}, policy), Says("rule 1 (w)"));
  policy = {};
  policy.reduce_dtype = DType::kBFloat16;
  policy.accumulate_dtype = DType::kFloat16;  // not narrower in bytes, but does not hold it
  EXPECT_THAT(refusal({scratch("w")}, policy), Says("expected bfloat16 or wider"));
}

TEST(ResolveErrors, DtypesThatNothingComputesIn) {
  const std::vector<std::pair<const char*, std::optional<DType> PrecisionPolicy::*>> keys = {
      {"[precision] param_dtype", &PrecisionPolicy::param_dtype},
      {"[precision] reduce_dtype", &PrecisionPolicy::reduce_dtype},
      {"[precision] storage_dtype", &PrecisionPolicy::storage_dtype},
      {"[precision] accumulate_dtype", &PrecisionPolicy::accumulate_dtype},
      {"[precision] final_dtype", &PrecisionPolicy::final_dtype},
      {"[precision] output_dtype", &PrecisionPolicy::output_dtype},
  };
  for (const auto& [key, member] : keys) {
    for (const DType dtype : {DType::kInt64, DType::kFloat8E4M3}) {
      PrecisionPolicy policy;
      policy.*member = dtype;
      EXPECT_THAT(refusal({scratch("w")}, policy), Says(key, std::string(to_string(dtype))));
    }
  }
  PrecisionPolicy policy;
  policy.rules = {rule_for("w")};
  policy.rules[0].grad_dtype = DType::kBool;
  EXPECT_THAT(refusal({scratch("w")}, policy), Says("[[precision.rule]] 1 grad_dtype"));
  ParameterMeta meta = scratch("w");
  meta.user_grad_dtype = DType::kInt64;
  EXPECT_THAT(refusal({meta}, {}), Says("w: ", "grad_dtype int64"));
}

TEST(ResolveErrors, PatternThatMatchesNothingNamesTheNearest) {
  PrecisionPolicy policy;
  policy.rules = {rule_for("w"), rule_for("w")};
  policy.rules[1].match = {"w", "*nrom"};
  EXPECT_THAT(refusal({scratch("w"), scratch("model.norm.weight")}, policy),
              Says("[[precision.rule]] 2", "\"*nrom\"", "(nearest name: model.norm.weight)"));
  policy.rules[1].match = {"router"};
  const std::string message = refusal({scratch("w")}, policy);
  EXPECT_THAT(message, Says("\"router\", which matches none of 1 parameters"));
  EXPECT_THAT(message, Not(Says("nearest")));
}

TEST(ResolveErrors, MalformedPatterns) {
  for (const char* pattern : {"", ".", "a..b", ".weight", "norm."}) {
    PrecisionPolicy policy;
    policy.rules = {rule_for(pattern)};
    EXPECT_THAT(refusal({scratch("w")}, policy), Says("[[precision.rule]] 1")) << pattern;
  }
  PrecisionPolicy policy;
  policy.rules = {PrecisionRule{}};
  EXPECT_THAT(refusal({scratch("w")}, policy), Says("set match"));
}

TEST(ResolveErrors, OneNameForTwoParameters) {
  EXPECT_THAT(refusal({scratch("w"), scratch("w")}, {}), Says("found the name w also for w"));
  ParameterMeta meta = scratch("embed");
  meta.aliases = {"head"};
  EXPECT_THAT(refusal({scratch("head"), meta}, {}), Says("embed: ", "the name head"));
}

TEST(ResolveErrors, CheckpointOfAnotherKind) {
  EXPECT_THAT(refusal({stored("w", DType::kInt64)}, {}),
              Says("w: found int64 in the checkpoint", "float32"));
}

TEST(ResolveErrors, ShapesThatCannotBe) {
  ParameterMeta meta = scratch("w");
  meta.shape = {std::int64_t{1} << 40, std::int64_t{1} << 40};
  EXPECT_THAT(refusal({meta}, {}), Says("w: found more than 2^63 elements"));
  meta.shape = {0, -1};
  EXPECT_THAT(refusal({meta}, {}), Says("w: found a dimension of -1"));
}

TEST(ResolveErrors, ReductionsThatCountTwice) {
  EXPECT_THAT(refusal({scratch("w")}, {}, {{"dp_shard"}, {"dp_shard"}, 1}), Says("dp_shard"));
  for (const double factor : {0.0, -1.0, std::numeric_limits<double>::infinity(),
                              std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THAT(refusal({scratch("w")}, {}, {{"dp_shard"}, {}, factor}), Says("divide factor"));
  }
}

// The keys of [precision] that change how a checkpoint is read, and the family's pins.
constexpr DType kF64 = DType::kFloat64;
constexpr DType kF32 = DType::kFloat32;
constexpr DType kF16 = DType::kFloat16;
constexpr DType kBF16 = DType::kBFloat16;

std::string refused(const ParameterMeta& meta, const PrecisionPolicy& policy) {
  return refusal_of(ErrorKind::kContract, [&] { resolve_only(meta, policy); });
}

TEST(OnNarrowerRequest, KeepsNarrowsOrRefuses) {
  PrecisionPolicy policy = mixed_policy();
  policy.storage_dtype = kBF16;
  EXPECT_EQ(resolve_only(stored("w", kF32), policy).storage.dtype, kF32) << "the default keeps";
  policy.on_narrower_request = NarrowerRequest::kNarrow;
  const GradContract contract = resolve_only(stored("w", kF32), policy);
  EXPECT_EQ(contract.storage.dtype, kBF16);
  EXPECT_EQ(contract.compute.dtype, kF32) << "the file's record still counts";
  EXPECT_EQ(contract.master, Master::kRemainder);
  EXPECT_EQ(contract.reason(ContractField::kStorage),
            "[precision] storage_dtype, narrowed from float32 as [precision] on_narrower_request "
            "says");
  policy.on_narrower_request = NarrowerRequest::kError;
  EXPECT_THAT(refused(stored("w", kF32), policy),
              Says("w: found float32 (as in the checkpoint)",
                   "[precision] storage_dtype (bfloat16)", "on_narrower_request"));
  policy.storage_dtype.reset();
  policy.rules = {rule_for("w")};
  policy.rules[0].storage_dtype = kBF16;
  EXPECT_THAT(refused(stored("w", kF32), policy), Says("storage_dtype of rule 1 (w)"));
}

TEST(OnNarrowerRequest, OnlySpeaksOfRequestsThatLoseValues) {
  for (const auto what :
       {NarrowerRequest::kKeep, NarrowerRequest::kNarrow, NarrowerRequest::kError}) {
    PrecisionPolicy policy = mixed_policy();
    policy.on_narrower_request = what;
    policy.storage_dtype = kF32;
    EXPECT_EQ(resolve_only(stored("w", kBF16), policy).storage.dtype, kF32);
    EXPECT_EQ(resolve_only(stored("w", kF32), policy).storage.dtype, kF32);
    policy.storage_dtype = kBF16;
    ParameterMeta drawn = scratch("w");
    drawn.drawn = true;
    EXPECT_EQ(resolve_only(drawn, policy).storage.dtype, kBF16);
  }
}

TEST(OnNarrowerRequest, HalfTypesAreNarrowerThanEachOther) {
  PrecisionPolicy policy = mixed_policy();
  policy.storage_dtype = kF16;
  EXPECT_EQ(resolve_only(stored("w", kBF16), policy).storage.dtype, kF32);
  policy.on_narrower_request = NarrowerRequest::kNarrow;
  EXPECT_EQ(resolve_only(stored("w", kBF16), policy).storage.dtype, kF16);
  policy.on_narrower_request = NarrowerRequest::kError;
  EXPECT_NE(refused(stored("w", kBF16), policy), "");
}

// Naive: the pin is silently worth nothing, since the shard has lost the bits.
TEST(OnNarrowerRequest, APinnedTensorIsNeverNarrowed) {
  PrecisionPolicy policy = mixed_policy();
  policy.storage_dtype = kBF16;
  policy.on_narrower_request = NarrowerRequest::kNarrow;
  policy.rules = {rule_for("w")};
  policy.rules[0].pin = true;
  const GradContract contract = resolve_only(stored("w", kF32), policy);
  EXPECT_EQ(contract.storage.dtype, kF32);
  EXPECT_THAT(contract.reason(ContractField::kStorage), Says("pinned by rule 1 (w)"));
}

TEST(IntrinsicKey, DecidesWhichTensorsRecord) {
  struct Row {
    Intrinsic intrinsic;
    DType minority, uniform;
  };
  for (const Row& row : {Row{Intrinsic::kMinority, kF32, kBF16}, Row{Intrinsic::kAll, kF32, kF32},
                         Row{Intrinsic::kNone, kBF16, kBF16}}) {
    PrecisionPolicy policy = mixed_policy();
    policy.intrinsic = row.intrinsic;
    EXPECT_EQ(resolve_only(stored("w", kF32, kBF16), policy).compute.dtype, row.minority)
        << to_string(row.intrinsic);
    EXPECT_EQ(resolve_only(stored("w", kF32, kF32), policy).compute.dtype, row.uniform)
        << to_string(row.intrinsic);
  }
}

TEST(IntrinsicKey, AllRecordsTheDtypeOfTheFileThatTrainingBeganWithAndNeverNarrows) {
  PrecisionPolicy policy = mixed_policy();
  policy.intrinsic = Intrinsic::kAll;
  ParameterMeta later = stored("w", kF32, kF32);
  later.published = kBF16;
  EXPECT_EQ(resolve_only(later, policy).compute.dtype, kBF16);
  policy.param_dtype = kF32;
  EXPECT_EQ(resolve_only(stored("w", kBF16), policy).compute.dtype, kF32);
  policy.param_dtype = kBF16;
  policy.storage_dtype = kF32;
  EXPECT_EQ(resolve_only(stored("w", DType::kFloat8E4M3), policy).compute.dtype, kBF16)
      << "what is unpacked records nothing";
  EXPECT_EQ(resolve_only(scratch("w"), policy).compute.dtype, kBF16) << "nor what has no file";
}

TEST(FamilyPins, StrictOnesActUnderEveryDtypeAndTheOthersUnderFloat16Only) {
  ParameterMeta strict = stored("norm", kF32, kF32);
  strict.strict_pin = "norm";
  ParameterMeta other = stored("norm", kF32, kF32);
  other.pin16 = "norm";
  PrecisionPolicy policy = mixed_policy();
  EXPECT_EQ(resolve_only(strict, policy).compute.dtype, kF32);
  const GradContract unmoved = resolve_only(other, policy);
  EXPECT_EQ(unmoved.compute.dtype, kBF16);
  EXPECT_THAT(unmoved.reason(ContractField::kCompute), Says("under float16 only"));
  policy.param_dtype = kF16;
  EXPECT_EQ(resolve_only(strict, policy).compute.dtype, kF32);
  const GradContract pinned = resolve_only(other, policy);
  EXPECT_EQ(pinned.compute.dtype, kF32);
  EXPECT_EQ(pinned.reason(ContractField::kCompute),
            "pinned by the model family under float16 (_keep_in_fp32_modules: norm)");
  policy.rules = {rule_for("norm")};
  policy.rules[0].pin = false;
  policy.loss_scaling = true;
  EXPECT_EQ(resolve_only(other, policy).compute.dtype, kF16);
}

// Naive: small gradients of a trained parameter vanish in fp16 kernels, and nothing says so.
TEST(Float16Compute, IsRefusedForTrainedParametersWithoutALossScaler) {
  PrecisionPolicy policy;
  policy.param_dtype = kF16;
  EXPECT_THAT(refused(scratch("w"), policy),
              Says("w: found the compute dtype float16", "loss scaler", "[precision] param_dtype"));
  EXPECT_NE(refused(scratch("w", kF16), {}), "") << "a float16 module without a policy";
  policy.param_dtype = kBF16;
  policy.rules = {rule_for("w")};
  policy.rules[0].param_dtype = kF16;
  EXPECT_THAT(refused(scratch("w"), policy), Says("param_dtype of rule 1 (w)"));
  policy.loss_scaling = true;
  EXPECT_EQ(refused(scratch("w"), policy), "");
  policy.loss_scaling = false;
  policy.rules[0].frozen = FrozenRule::kYes;
  EXPECT_EQ(refused(scratch("w"), policy), "") << "a frozen one has no gradient";
}

TEST(TiedParameters, AStoredAliasOfAnotherDtypeIsRefused) {
  ParameterMeta meta = stored("embed", kBF16);
  meta.aliases = {"lm_head"};
  meta.stored_aliases = {{"lm_head", kBF16}};
  EXPECT_EQ(refused(meta, mixed_policy()), "");
  meta.stored_aliases = {{"lm_head", kF32}};
  EXPECT_THAT(refused(meta, mixed_policy()),
              Says("lm_head: found float32", "expected bfloat16 as embed"));
}

TEST(FrozenKey, SaysHowAFrozenParameterIsKept) {
  PrecisionPolicy policy = mixed_policy();
  policy.rules = {rule_for("w")};
  ParameterMeta meta = scratch("w");
  const auto kept = [&](std::optional<FrozenRule> rule) {
    policy.rules[0].frozen = rule;
    const GradContract contract = resolve_only(meta, policy);
    return contract.trainable ? std::nullopt : std::optional(contract.frozen_as);
  };
  EXPECT_EQ(kept({}), std::nullopt);
  EXPECT_EQ(kept(FrozenRule::kYes), FrozenAs::kShard);
  EXPECT_EQ(kept(FrozenRule::kShard), FrozenAs::kShard);
  EXPECT_EQ(kept(FrozenRule::kReplicate), FrozenAs::kReplicate);
  meta.trainable = false;
  meta.frozen_as = FrozenAs::kReplicate;
  EXPECT_EQ(kept({}), FrozenAs::kReplicate) << "as the model says";
  EXPECT_EQ(kept(FrozenRule::kYes), FrozenAs::kReplicate);
  EXPECT_EQ(kept(FrozenRule::kShard), FrozenAs::kShard);
  EXPECT_EQ(kept(FrozenRule::kNo), std::nullopt);
}

// Nothing gathers it, so nothing would cast it on the way.
TEST(FrozenKey, AWholeParameterIsKeptInItsComputeDtype) {
  PrecisionPolicy policy = mixed_policy();
  policy.param_rounding = Rounding::kHalfAway;
  policy.rules = {rule_for("w")};
  policy.rules[0].frozen = FrozenRule::kReplicate;
  ParameterMeta meta = stored("w", kF32);
  meta.checkpoint_bulk = kF32;
  GradContract contract = resolve_only(meta, policy);
  EXPECT_EQ(contract.storage, Encoding{kBF16}) << "its values are rounded once, as copies are";
  EXPECT_EQ(contract.compute, Encoding{kBF16});
  EXPECT_THAT(contract.reason(ContractField::kStorage),
              Says("as compute: whole on every rank", "float32"));
  policy.rules[0].pin = true;
  contract = resolve_only(meta, policy);
  EXPECT_EQ(contract.storage, Encoding{kF32});
  policy.rules[0].pin.reset();
  policy.rules[0].frozen = FrozenRule::kShard;
  EXPECT_EQ(resolve_only(meta, policy).storage, Encoding{kF32});
}

// Naive: with a narrower storage dtype the whole parameter has digits that the sharded one lost.
TEST(FrozenKey, AWholeParameterIsLoadedThroughTheStorageDtypeThatItWouldHave) {
  PrecisionPolicy policy = mixed_policy();
  policy.storage_dtype = kBF16;
  policy.param_dtype = kF32;
  policy.on_narrower_request = NarrowerRequest::kNarrow;
  policy.rules = {rule_for("w")};
  policy.rules[0].frozen = FrozenRule::kReplicate;
  const GradContract whole = resolve_only(stored("w", kF32), policy);
  EXPECT_EQ(whole.storage, Encoding{kF32});
  EXPECT_EQ(whole.loaded_through, kBF16);
  policy.rules[0].frozen = FrozenRule::kShard;
  EXPECT_EQ(resolve_only(stored("w", kF32), policy).loaded_through, std::nullopt);
  policy.rules[0].frozen = FrozenRule::kNo;
  EXPECT_EQ(resolve_only(stored("w", kF32), policy).loaded_through, std::nullopt);
  policy.rules[0].frozen = FrozenRule::kReplicate;
  policy.storage_dtype = kF32;
  EXPECT_EQ(resolve_only(stored("w", kF32), policy).loaded_through, std::nullopt);
  GradContract same = whole;
  same.loaded_through.reset();
  EXPECT_NE(hash({whole}), hash({same})) << "ranks that differ in it find out";
}

TEST(FinalKey, Float64StorageKeepsItsPrecisionThroughToTheOptimizer) {
  const GradContract contract = resolve_only(stored("w", kF64), mixed_policy());
  EXPECT_EQ(contract.final, kF64);
  EXPECT_EQ(contract.state, kF64);
}

TEST(ParamRounding, IsOfFloat32StorageThatIsGatheredInBFloat16) {
  PrecisionPolicy policy = mixed_policy();
  policy.param_rounding = Rounding::kHalfAway;
  const GradContract contract = resolve_only(scratch("w"), policy);
  EXPECT_EQ(contract.compute, (Encoding{kBF16, Rounding::kHalfAway}));
  EXPECT_THAT(contract.reason(ContractField::kCompute), Says("param_rounding"));
  EXPECT_EQ(key_of(contract).rounding, Rounding::kHalfAway);
  // Nothing is rounded between two of the same.
  EXPECT_EQ(resolve_only(stored("w", kBF16), policy).compute.rounding, Rounding::kNearestEven);
}

TEST(OptimizerMaster, IsWithSixteenBitsUnlessNoneIsAskedFor) {
  PrecisionPolicy policy;
  policy.loss_scaling = true;
  EXPECT_EQ(resolve_only(stored("w", kBF16), policy).master, Master::kRemainder);
  EXPECT_EQ(resolve_only(stored("w", DType::kFloat16), policy).master, Master::kCopy);
  EXPECT_EQ(resolve_only(stored("w", kF32), policy).master, Master::kStorage);
  policy.optimizer.master = MasterRequest::kNone;
  const GradContract contract = resolve_only(stored("w", kBF16), policy);
  EXPECT_EQ(contract.master, Master::kNone);
  EXPECT_EQ(contract.final, kBF16);
  EXPECT_EQ(contract.state, kBF16);
}

}  // namespace
}  // namespace tessera::grad::testing::resolve_errors_test
