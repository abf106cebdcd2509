// What each key of [precision] does that changes how a checkpoint is read, and the family's pins.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "grad/contract_key.h"
#include "tessera/error.h"
#include "unit/grad/contract_cases.h"

namespace tessera::grad::testing::resolve_keys_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr DType kF64 = DType::kFloat64;
constexpr DType kF32 = DType::kFloat32;
constexpr DType kF16 = DType::kFloat16;
constexpr DType kBF16 = DType::kBFloat16;

std::string refusal(const ParameterMeta& meta, const PrecisionPolicy& policy) {
  try {
    resolve_only(meta, policy);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kContract) << error.what();
    return error.what();
  }
  return "";
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
  EXPECT_THAT(
      refusal(stored("w", kF32), policy),
      AllOf(HasSubstr("w: found float32 (as in the checkpoint)"),
            HasSubstr("[precision] storage_dtype (bfloat16)"), HasSubstr("on_narrower_request")));
  policy.storage_dtype.reset();
  policy.rules = {rule_for("w")};
  policy.rules[0].storage_dtype = kBF16;
  EXPECT_THAT(refusal(stored("w", kF32), policy), HasSubstr("storage_dtype of rule 1 (w)"));
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
  EXPECT_NE(refusal(stored("w", kBF16), policy), "");
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
  EXPECT_THAT(contract.reason(ContractField::kStorage), HasSubstr("pinned by rule 1 (w)"));
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
  EXPECT_THAT(unmoved.reason(ContractField::kCompute), HasSubstr("under float16 only"));
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
  EXPECT_THAT(refusal(scratch("w"), policy),
              AllOf(HasSubstr("w: found the compute dtype float16"), HasSubstr("loss scaler"),
                    HasSubstr("[precision] param_dtype")));
  EXPECT_NE(refusal(scratch("w", kF16), {}), "") << "a float16 module without a policy";
  policy.param_dtype = kBF16;
  policy.rules = {rule_for("w")};
  policy.rules[0].param_dtype = kF16;
  EXPECT_THAT(refusal(scratch("w"), policy), HasSubstr("param_dtype of rule 1 (w)"));
  policy.loss_scaling = true;
  EXPECT_EQ(refusal(scratch("w"), policy), "");
  policy.loss_scaling = false;
  policy.rules[0].frozen = FrozenRule::kYes;
  EXPECT_EQ(refusal(scratch("w"), policy), "") << "a frozen one has no gradient";
}

TEST(TiedParameters, AStoredAliasOfAnotherDtypeIsRefused) {
  ParameterMeta meta = stored("embed", kBF16);
  meta.aliases = {"lm_head"};
  meta.stored_aliases = {{"lm_head", kBF16}};
  EXPECT_EQ(refusal(meta, mixed_policy()), "");
  meta.stored_aliases = {{"lm_head", kF32}};
  EXPECT_THAT(refusal(meta, mixed_policy()),
              AllOf(HasSubstr("lm_head: found float32"), HasSubstr("expected bfloat16 as embed")));
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
              AllOf(HasSubstr("as compute: whole on every rank"), HasSubstr("float32")));
  policy.rules[0].pin = true;
  contract = resolve_only(meta, policy);
  EXPECT_EQ(contract.storage, Encoding{kF32});
  policy.rules[0].pin.reset();
  policy.rules[0].frozen = FrozenRule::kShard;
  EXPECT_EQ(resolve_only(meta, policy).storage, Encoding{kF32});
}

// Naive: with a storage dtype that narrows, the whole parameter has digits that the sharded one lost.
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
  EXPECT_THAT(contract.reason(ContractField::kCompute), HasSubstr("param_rounding"));
  EXPECT_EQ(key_of(contract).rounding, Rounding::kHalfAway);
  // Nothing is rounded between two of the same.
  EXPECT_EQ(resolve_only(stored("w", kBF16), policy).compute.rounding, Rounding::kNearestEven);
}

TEST(OptimizerMaster, IsBesideSixteenBitsUnlessNoneIsAskedFor) {
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
}  // namespace tessera::grad::testing::resolve_keys_test
