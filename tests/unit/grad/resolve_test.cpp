// Resolution against the truth table: what each parameter becomes, and why.
#include "grad/resolve_rules.h"
#include "support/test.h"
#include "tessera/contract.h"
#include "unit/grad/contract_cases.h"

namespace tessera::grad::testing::resolve_test {
namespace {

constexpr DType kF64 = DType::kFloat64;
constexpr DType kF32 = DType::kFloat32;
constexpr DType kF16 = DType::kFloat16;
constexpr DType kBF16 = DType::kBFloat16;

struct Row {
  const char* what;
  std::optional<DType> checkpoint;
  std::optional<DType> requested;
  std::optional<DType> param_dtype;
  DType storage;
  DType compute;
};

TEST(Resolve, TruthTableOfStorageAndCompute) {
  const std::vector<Row> rows = {
      {"bf16 file, as it is", kBF16, {}, kBF16, kBF16, kBF16},
      {"bf16 file, bf16 asked", kBF16, kBF16, kBF16, kBF16, kBF16},
      {"bf16 file, fp32 storage", kBF16, kF32, kBF16, kF32, kBF16},
      {"fp32 tensor of a bf16 file", kF32, {}, kBF16, kF32, kF32},
      {"fp32 tensor, bf16 asked, is kept", kF32, kBF16, kBF16, kF32, kF32},
      {"fp32 tensor, fp32 asked", kF32, kF32, kBF16, kF32, kF32},
      {"from scratch, fp32", {}, kF32, kBF16, kF32, kBF16},
      {"no policy", kBF16, {}, {}, kBF16, kBF16},
      {"no policy, fp32 tensor", kF32, {}, {}, kF32, kF32},
      {"fp32 policy over a bf16 file", kBF16, kF32, kF32, kF32, kF32},
      {"fp16 policy, bf16 file: the bulk records nothing", kBF16, {}, kF16, kBF16, kF16},
      {"fp16 policy, recorded fp32", kF32, {}, kF16, kF32, kF32},
      {"fp64 policy is not narrowed by a record", kF32, {}, kF64, kF32, kF64},
  };
  for (const Row& row : rows) {
    ParameterMeta meta = scratch("w");
    if (row.checkpoint) meta = stored("w", *row.checkpoint);
    PrecisionPolicy policy;
    policy.param_dtype = row.param_dtype;
    policy.storage_dtype = row.requested;
    policy.loss_scaling = true;
    const GradContract contract = resolve_only(meta, policy);
    EXPECT_EQ(contract.storage.dtype, row.storage) << row.what;
    EXPECT_EQ(contract.compute.dtype, row.compute) << row.what;
    EXPECT_EQ(contract.reduce, promote(row.compute, kF32)) << row.what;
    const bool narrow = row.storage == kBF16;
    EXPECT_EQ(contract.master, narrow ? Master::kRemainder : Master::kStorage) << row.what;
    EXPECT_EQ(contract.final, kF32) << row.what;
    EXPECT_EQ(contract.state, kF32) << row.what;
    EXPECT_EQ(contract.grad, std::nullopt) << row.what;
    for (const std::string& reason : contract.reasons) EXPECT_FALSE(reason.empty()) << row.what;
  }
}

// There are no values yet that a narrower storage could lose.
TEST(Resolve, AParameterThatIsYetToBeDrawnIsStoredAsAsked) {
  ParameterMeta meta = scratch("w");
  meta.drawn = true;
  PrecisionPolicy policy;
  policy.storage_dtype = kBF16;
  policy.loss_scaling = true;
  EXPECT_EQ(resolve_only(meta, policy).storage.dtype, kBF16);
  PrecisionRule rule = rule_for("w");
  rule.storage_dtype = kF16;
  policy.rules = {rule};
  EXPECT_EQ(resolve_only(meta, policy).storage.dtype, kF16);
  EXPECT_EQ(resolve_only(meta, {}).storage.dtype, kF32);
  meta.drawn = false;
  EXPECT_EQ(resolve_only(meta, policy).storage.dtype, kF32);
}

TEST(Resolve, MixedFileComputesNormsWiderThanTheRestUnderBfloat16Only) {
  const std::vector<ParameterMeta> file = {stored("model.norm.weight", kF32),
                                           stored("lm_head.weight", kBF16)};
  PrecisionPolicy policy = mixed_policy();
  policy.storage_dtype = kF32;
  const std::vector<GradContract> mixed = resolve_contracts(file, policy, {});
  EXPECT_EQ(mixed[0].compute.dtype, kF32);
  EXPECT_EQ(mixed[0].reason(ContractField::kCompute),
            "recorded by the checkpoint (float32, most of it bfloat16)");
  EXPECT_EQ(mixed[1].compute.dtype, kBF16);
  EXPECT_EQ(mixed[1].reason(ContractField::kCompute), "[precision] param_dtype");
  policy.param_dtype = kF32;
  for (const GradContract& contract : resolve_contracts(file, policy, {})) {
    EXPECT_EQ(contract.compute.dtype, kF32);
  }
}

TEST(Resolve, UniformFloat32FileComputesInThePolicysDtype) {
  const GradContract contract = resolve_only(stored("w", kF32, kF32), mixed_policy());
  EXPECT_EQ(contract.storage.dtype, kF32);
  EXPECT_EQ(contract.compute.dtype, kBF16);
}

TEST(Resolve, ALaterStateOfAMixedFileRecordsWhatThatFileDid) {
  // A checkpoint of fp32 masters, of a run that began with a mixed folder.
  ParameterMeta norm = stored("model.norm.weight", kF32, kBF16);
  norm.published = kF32;
  ParameterMeta head = stored("lm_head.weight", kF32, kBF16);
  head.published = kBF16;
  EXPECT_EQ(resolve_only(norm, mixed_policy()).compute.dtype, kF32);
  EXPECT_EQ(resolve_only(head, mixed_policy()).compute.dtype, kBF16);
  PrecisionPolicy as_stored = mixed_policy();
  as_stored.param_dtype.reset();
  for (const ParameterMeta& meta : {norm, head}) {
    EXPECT_EQ(resolve_only(meta, as_stored).compute.dtype, kF32) << "no bit of a master is lost";
  }
}

TEST(Resolve, TensorNarrowerThanTheBulkRecordsNothing) {
  EXPECT_EQ(resolve_only(stored("w", kBF16, kF32), mixed_policy()).compute.dtype, kBF16);
  EXPECT_EQ(resolve_only(stored("w", kBF16, kF16), mixed_policy()).compute.dtype, kBF16);
}

TEST(Resolve, RulesDtypeWinsOverTheRecordAndSaysSo) {
  PrecisionPolicy policy = mixed_policy();
  policy.rules = {rule_for("*norm")};
  policy.rules[0].param_dtype = kBF16;
  const GradContract contract = resolve_only(stored("model.norm.weight", kF32), policy);
  EXPECT_EQ(contract.compute.dtype, kBF16);
  EXPECT_EQ(contract.reason(ContractField::kCompute),
            "rule 1 (*norm), narrower than the float32 that the checkpoint records");
}

TEST(Resolve, PinComputesInFloat32ForAnyOtherRequest) {
  PrecisionPolicy policy = mixed_policy();
  ParameterMeta meta = stored("mlp.gate.weight", kF32, kF32);
  meta.strict_pin = "gate";
  GradContract contract = resolve_only(meta, policy);
  EXPECT_EQ(contract.compute.dtype, kF32);
  EXPECT_EQ(contract.reason(ContractField::kCompute),
            "pinned by the model family (_keep_in_fp32_modules_strict: gate)");
  policy.rules = {rule_for("mlp.gate"), rule_for("mlp")};
  policy.rules[0].pin = true;
  policy.rules[1].param_dtype = kBF16;
  contract = resolve_only(meta, policy);
  EXPECT_EQ(contract.compute.dtype, kF32);
  EXPECT_EQ(contract.reason(ContractField::kCompute), "pinned by rule 1 (mlp.gate)");
}

TEST(Resolve, PinNeverNarrows) {
  ParameterMeta meta = scratch("w", kF64);
  meta.strict_pin = "gate";
  EXPECT_EQ(resolve_only(meta, {}).compute.dtype, kF64);
}

TEST(Resolve, RuleUndoesTheModelsPin) {
  PrecisionPolicy policy = mixed_policy();
  policy.rules = {rule_for("w")};
  policy.rules[0].pin = false;
  ParameterMeta meta = stored("w", kBF16);
  meta.strict_pin = "gate";
  EXPECT_EQ(resolve_only(meta, policy).compute.dtype, kBF16);
}

TEST(Resolve, PinOnANarrowFileWidensStorageWhereAllowed) {
  PrecisionPolicy policy = mixed_policy();
  policy.rules = {rule_for("gate")};
  policy.rules[0].pin = true;
  policy.rules[0].widen = true;
  const GradContract contract = resolve_only(stored("gate.weight", kBF16), policy);
  EXPECT_EQ(contract.storage.dtype, kF32);
  EXPECT_EQ(contract.compute.dtype, kF32);
  EXPECT_EQ(contract.final, kF32);
  EXPECT_EQ(contract.reason(ContractField::kStorage), "bfloat16 widened by rule 1 (gate)");
}

TEST(Resolve, Float32StorageRequestAllowsAPinOnANarrowFile) {
  PrecisionPolicy policy = mixed_policy();
  policy.storage_dtype = kF32;
  ParameterMeta meta = stored("gate.weight", kBF16);
  meta.strict_pin = "gate";
  const GradContract contract = resolve_only(meta, policy);
  EXPECT_EQ(contract.storage.dtype, kF32);
  EXPECT_EQ(contract.compute.dtype, kF32);
}

TEST(Resolve, PinWithoutACheckpointLeavesTheStorageThatWasAskedFor) {
  ParameterMeta meta = scratch("w", kBF16);
  meta.strict_pin = "gate";
  const GradContract contract = resolve_only(meta, {});
  EXPECT_EQ(contract.storage.dtype, kBF16);
  EXPECT_EQ(contract.compute.dtype, kF32);
}

TEST(Resolve, WhatDecaysAStateIsWidenedWhereverItComesFrom) {
  PrecisionPolicy policy = mixed_policy();
  ParameterMeta meta = stored("linear_attn.A_log", kBF16, kBF16);
  meta.state_pin = "linear_attn.A_log";
  GradContract contract = resolve_only(meta, policy);
  EXPECT_EQ(contract.storage.dtype, kF32);
  EXPECT_EQ(contract.compute.dtype, kF32);
  const std::string pin =
      "pinned by the model family (what decays a state, as NeMo Automodel keeps it: "
      "linear_attn.A_log)";
  EXPECT_EQ(contract.reason(ContractField::kStorage), "bfloat16 widened, " + pin);
  EXPECT_EQ(contract.reason(ContractField::kCompute), pin);
  policy.storage_dtype = kBF16;
  ParameterMeta wide = stored("linear_attn.A_log", kF32, kBF16);
  wide.state_pin = meta.state_pin;
  EXPECT_EQ(resolve_only(wide, policy).storage.dtype, kF32);
  policy.rules = {rule_for("A_log")};
  policy.rules[0].pin = false;
  EXPECT_EQ(resolve_only(meta, policy).compute.dtype, kBF16);
}

TEST(Resolve, ReasonsOfStorageTellAKeptFileFromARequest) {
  PrecisionPolicy policy;
  policy.storage_dtype = kBF16;
  EXPECT_EQ(resolve_only(stored("w", kF32), policy).reason(ContractField::kStorage),
            "as in the checkpoint, not as narrow as [precision] storage_dtype asks (bfloat16)");
  EXPECT_EQ(resolve_only(stored("w", kBF16), policy).reason(ContractField::kStorage),
            "[precision] storage_dtype");
  EXPECT_EQ(resolve_only(stored("w", kBF16), {}).reason(ContractField::kStorage),
            "as in the checkpoint");
  EXPECT_EQ(resolve_only(scratch("w"), {}).reason(ContractField::kStorage), "as the tensor is");
}

TEST(Resolve, BothHalfTypesMeetInFloat32Storage) {
  PrecisionPolicy policy;
  policy.storage_dtype = kF16;
  EXPECT_EQ(resolve_only(stored("w", kBF16), policy).storage.dtype, kF32);
}

TEST(Resolve, GradIsRoundedOnlyWhereARuleOrTheLeafAsks) {
  PrecisionPolicy policy = mixed_policy();
  ParameterMeta meta = scratch("w");
  meta.user_grad_dtype = kF32;
  EXPECT_EQ(resolve_only(meta, policy).grad, kF32);
  policy.rules = {rule_for("w")};
  policy.rules[0].grad_dtype = kBF16;
  const GradContract contract = resolve_only(meta, policy);
  EXPECT_EQ(contract.grad, kBF16);
  EXPECT_EQ(contract.reason(ContractField::kGrad), "rule 1 (w)");
}

TEST(Resolve, AccumulateFollowsComputeAndReduceUnlessAsked) {
  PrecisionPolicy policy;
  EXPECT_EQ(resolve_only(scratch("w", kBF16), policy).accumulate, kF32);
  EXPECT_EQ(resolve_only(scratch("w", kF64), policy).accumulate, kF64);
  policy.reduce_dtype = kF64;  // explicit, so the accumulator follows
  EXPECT_EQ(resolve_only(scratch("w"), policy).accumulate, kF64);
  policy.reduce_dtype = kBF16;
  EXPECT_EQ(resolve_only(scratch("w"), policy).accumulate, kF32);
  policy.accumulate_dtype = kBF16;
  EXPECT_EQ(resolve_only(scratch("w"), policy).accumulate, kBF16);
}

TEST(Resolve, ReduceNarrowerThanComputeIsAllowedAndSaidSo) {
  PrecisionPolicy policy;
  policy.reduce_dtype = kBF16;
  const GradContract contract = resolve_only(scratch("w"), policy);
  EXPECT_EQ(contract.reduce, kBF16);
  EXPECT_EQ(contract.reason(ContractField::kReduce),
            "[precision] reduce_dtype, narrower than compute (float32)");
}

TEST(Resolve, FinalIsThePolicysElseTheMasters) {
  PrecisionPolicy policy = mixed_policy();
  GradContract contract = resolve_only(stored("w", kBF16), policy);
  EXPECT_EQ(contract.final, kF32);
  EXPECT_EQ(contract.reason(ContractField::kFinal), "as the master");
  EXPECT_EQ(resolve_only(stored("w", kF32), policy).final, kF32);
  EXPECT_EQ(resolve_only(stored("w", kF64), policy).final, kF64);
  policy.final_dtype = kBF16;
  EXPECT_EQ(resolve_only(stored("w", kF32), policy).final, kBF16);
  EXPECT_EQ(resolve_only(stored("w", kBF16), policy).final, kBF16);
}

TEST(Resolve, WithoutAMasterTheOptimizerReadsAndKeepsTheStorageDtype) {
  PrecisionPolicy policy = mixed_policy();
  policy.optimizer.master = MasterRequest::kNone;
  const GradContract narrow = resolve_only(stored("w", kBF16), policy);
  EXPECT_EQ(narrow.master, Master::kNone);
  EXPECT_EQ(narrow.final, kBF16);
  EXPECT_EQ(narrow.state, kBF16);
  EXPECT_EQ(narrow.reason(ContractField::kMaster), "[optimizer] master");
  EXPECT_EQ(narrow.reason(ContractField::kState), "as storage, since there is no master");
  const GradContract wide = resolve_only(stored("w", kF32), policy);
  EXPECT_EQ(wide.master, Master::kStorage) << "float32 storage is always a master";
  EXPECT_EQ(wide.final, kF32);
  policy.final_dtype = kF32;
  const GradContract widened = resolve_only(stored("w", kBF16), policy);
  EXPECT_EQ(widened.final, kF32);
  EXPECT_EQ(widened.state, kBF16) << "moments are of what is stepped";
}

// A pattern that matches frozen parameters alone is no mistake, one that matches nothing is.
TEST(Resolve, DecayIsDecidedByNoDecayAndItsPatternsMustMatchParameters) {
  PrecisionPolicy policy;
  EXPECT_EQ(resolve_only(scratch("norm.weight"), policy).decays, std::nullopt);
  policy.optimizer.no_decay = {"norm"};
  ParameterMeta frozen = scratch("head.norm");
  frozen.trainable = false;
  const auto contracts =
      resolve_contracts({scratch("norm.weight"), scratch("w"), frozen}, policy, {});
  EXPECT_EQ(contracts[0].decays, false);
  EXPECT_EQ(contracts[0].reason(ContractField::kDecay), "[optimizer] no_decay (norm)");
  EXPECT_EQ(contracts[1].decays, true);
  EXPECT_EQ(contracts[2].decays, std::nullopt);
  EXPECT_EQ(resolve_contracts({scratch("w"), frozen}, policy, {})[0].decays, true);
  EXPECT_THROW(resolve_contracts({scratch("w")}, policy, {}), Error);
}

TEST(Resolve, RulesFreezeAndUnfreeze) {
  PrecisionPolicy policy;
  policy.rules = {rule_for("base"), rule_for("base.lora")};
  policy.rules[0].frozen = FrozenRule::kYes;
  policy.rules[1].frozen = FrozenRule::kNo;
  const std::vector<GradContract> contracts =
      resolve_contracts({scratch("base.w"), scratch("base.lora.a"), scratch("head")}, policy, {});
  EXPECT_FALSE(contracts[0].trainable);
  EXPECT_EQ(contracts[0].reason(ContractField::kTrainable), "rule 1 (base)");
  EXPECT_TRUE(contracts[1].trainable);
  EXPECT_TRUE(contracts[2].trainable);
  ParameterMeta meta = scratch("base.lora.a");
  meta.trainable = false;
  EXPECT_TRUE(resolve_contracts({meta, scratch("base.x")}, policy, {})[0].trainable);
}

TEST(Resolve, IntegersMirrorTheirStorageForAnyRequest) {
  PrecisionPolicy policy = mixed_policy();
  policy.storage_dtype = kF32;
  ParameterMeta meta = scratch("table", DType::kInt64);
  meta.trainable = false;
  meta.strict_pin = "gate";
  const GradContract contract = resolve_only(meta, policy);
  EXPECT_EQ(contract.storage.dtype, DType::kInt64);
  EXPECT_EQ(contract.compute.dtype, DType::kInt64);
  EXPECT_EQ(contract.reduce, DType::kInt64);
  EXPECT_FALSE(contract.trainable);
}

TEST(Resolve, PackedPayloadIsUnpackedToTheRequestedStorage) {
  PrecisionPolicy policy = mixed_policy();
  policy.storage_dtype = kF32;
  const GradContract contract = resolve_only(stored("w", DType::kFloat8E4M3), policy);
  EXPECT_EQ(contract.storage.dtype, kF32);
  EXPECT_EQ(contract.compute.dtype, kBF16);
  ParameterMeta frozen = stored("w", DType::kFloat8E4M3);
  frozen.trainable = false;
  EXPECT_EQ(resolve_only(frozen, mixed_policy()).storage.dtype, DType::kFloat8E4M3);
}

TEST(Resolve, OneTensorUnderTwoNamesIsSummedRawByAutograd) {
  ParameterMeta meta = scratch("embed.weight");
  meta.aliases = {"head.weight"};
  EXPECT_FALSE(resolve_only(meta, {}).raw_sum_by_autograd);
  meta.single_tensor_aliases = true;
  const GradContract contract = resolve_only(meta, {});
  EXPECT_TRUE(contract.raw_sum_by_autograd);
  EXPECT_NE(contract.reason(ContractField::kGrad).find("summed raw by autograd"),
            std::string::npos);
  EXPECT_EQ(contract.aliases, meta.aliases);
  EXPECT_NE(to_string(std::vector{contract}).find("summed raw"), std::string::npos);
}

// A tied head without a second name: its uses are not known before a forward has run, so nothing is
// claimed.
TEST(Resolve, WhatOneForwardUsesSeveralTimesIsSaidToBeAutogradsSum) {
  const auto said = [](const GradContract& contract) {
    EXPECT_EQ(to_string(std::vector{contract}).find("unrounded"), std::string::npos);
    return contract.reason(ContractField::kGrad);
  };
  EXPECT_NE(said(resolve_only(scratch("embed.weight"), mixed_policy()))
                .find("the sum of the uses is autograd's, in bfloat16"),
            std::string::npos);
  EXPECT_EQ(said(resolve_only(scratch("embed.weight"), {})), "nothing asks for rounding on arrival")
      << "autograd adds in the dtype of the slot";
}

TEST(RuleBook, LastMatchingRuleWinsFieldByField) {
  std::vector<PrecisionRule> rules = {rule_for("*"), rule_for("mlp"), rule_for("norm")};
  rules[0].param_dtype = DType::kFloat32;
  rules[0].reduce_dtype = DType::kBFloat16;
  rules[1].param_dtype = DType::kBFloat16;
  rules[2].reduce_dtype = DType::kFloat64;
  const Asked asked = RuleBook(rules).ask("layers.0.mlp.weight");
  ASSERT_TRUE(asked.param_dtype && asked.reduce_dtype);
  EXPECT_EQ(asked.param_dtype->value, DType::kBFloat16);
  EXPECT_EQ(asked.param_dtype->reason, "rule 2 (mlp)");
  EXPECT_EQ(asked.reduce_dtype->value, DType::kBFloat16);
  EXPECT_EQ(asked.reduce_dtype->reason, "rule 1 (*)");
  EXPECT_FALSE(asked.pin || asked.frozen || asked.widen || asked.storage_dtype);
}

TEST(RuleBook, AliasesMatchToo) {
  std::vector<PrecisionRule> rules = {rule_for("lm_head")};
  rules[0].frozen = FrozenRule::kYes;
  EXPECT_FALSE(RuleBook(rules).ask("model.embed_tokens.weight").frozen);
  RuleBook book(rules);
  EXPECT_TRUE(book.ask("model.embed_tokens.weight", {"lm_head.weight"}).frozen);
  book.check_all_matched();
}

TEST(RuleBook, EveryPatternOfARuleMustMatch) {
  std::vector<PrecisionRule> rules = {rule_for("a")};
  rules[0].match.push_back("b");
  RuleBook book(rules);
  book.ask("a");
  EXPECT_THROW(book.check_all_matched(), Error);
  book.ask("b");
  book.check_all_matched();
}

// The contracts of parameters under [lora], for any policy, rules and files.

ParameterMeta base(ParameterMeta meta) {
  meta.trainable = false;
  meta.lora = LoraPart::kBase;
  return meta;
}

ParameterMeta adapter(const std::string& name) {
  ParameterMeta meta = scratch(name);
  meta.drawn = true;
  meta.lora = LoraPart::kAdapter;
  return meta;
}

TEST(ResolveLora, BaseIsStoredInItsComputeDtype) {
  PrecisionPolicy policy = mixed_policy();
  policy.storage_dtype = kF32;
  const auto contracts = resolve_contracts(
      {base(stored("w", kF32, kF32)), base(stored("v", kBF16)), base(stored("norm", kF32))}, policy,
      {});
  EXPECT_EQ(contracts[0].storage.dtype, kBF16);
  EXPECT_EQ(contracts[0].compute.dtype, kBF16);
  EXPECT_EQ(contracts[0].reason(ContractField::kStorage),
            "[lora] base: as compute, cast once from float32");
  EXPECT_EQ(contracts[0].reason(ContractField::kTrainable), "[lora] base");
  EXPECT_FALSE(contracts[0].trainable);
  EXPECT_EQ(contracts[1].storage.dtype, kBF16);
  // Recorded by the file: the minority of a mixed one stays wide.
  EXPECT_EQ(contracts[2].storage.dtype, kF32);
  EXPECT_EQ(contracts[2].compute.dtype, kF32);
}

TEST(ResolveLora, AdaptersAreFloat32ForAnyRequest) {
  PrecisionPolicy policy = mixed_policy();
  policy.storage_dtype = kBF16;
  policy.rules = {rule_for("q_proj")};
  policy.rules[0].param_dtype = kBF16;
  policy.rules[0].storage_dtype = kBF16;
  const auto contracts = resolve_contracts(
      {base(stored("q_proj.weight", kBF16)), adapter("q_proj.lora_A.weight")}, policy, {});
  const GradContract& found = contracts[1];
  EXPECT_EQ(found.storage.dtype, kF32);
  EXPECT_EQ(found.compute.dtype, kF32);
  EXPECT_EQ(found.final, kF32);
  EXPECT_EQ(found.state, kF32);
  EXPECT_EQ(found.master, Master::kStorage);
  EXPECT_TRUE(found.trainable);
  for (const auto field :
       {ContractField::kStorage, ContractField::kCompute, ContractField::kTrainable}) {
    EXPECT_THAT(found.reason(field), Says("[lora] adapter"));
  }
}

TEST(ResolveLora, RulesThatWouldTrainTheBaseOrFreezeAnAdapterAreRefused) {
  const auto refused = [](FrozenRule frozen, const char* pattern) {
    PrecisionPolicy policy = mixed_policy();
    policy.rules = {rule_for(pattern)};
    policy.rules[0].frozen = frozen;
    return refusal_of(ErrorKind::kContract, [&] {
      resolve_contracts({base(stored("q.weight", kBF16)), adapter("q.lora_A.weight")}, policy, {});
    });
  };
  EXPECT_THAT(refused(FrozenRule::kNo, "q.weight"), Says("q.weight: found frozen = false"));
  EXPECT_THAT(refused(FrozenRule::kYes, "q"), Says("q.lora_A.weight: found frozen = true"));
  EXPECT_EQ(refused(FrozenRule::kShard, "q.weight"), "");
}

std::string result_of(const PrecisionRule& rule) {
  PrecisionPolicy policy = mixed_policy();
  policy.rules = {rule};
  return refusal_of(ErrorKind::kContract, [&] {
    resolve_contracts(
        {base(stored("q.weight", kBF16)), adapter("q.lora_A.weight"), adapter("q.lora_B.weight")},
        policy, {});
  });
}

TEST(ResolveLora, RulesThatSpeakOfAdaptersAloneAndWouldBeWithoutEffectAreRefused) {
  PrecisionRule rule = rule_for("lora_A");
  rule.param_dtype = kBF16;
  EXPECT_THAT(result_of(rule), Says("[[precision.rule]] 1: found the pattern \"lora_A\", which "
                                    "matches adapters alone, with param_dtype = bfloat16"));
  rule.match = {"q.weight", "q.lora_B.weight"};  // one of two is enough to be misled
  EXPECT_THAT(result_of(rule), Says("found the pattern \"q.lora_B.weight\""));
  rule = rule_for("lora_A");
  rule.storage_dtype = kBF16;
  EXPECT_THAT(result_of(rule), Says("with storage_dtype = bfloat16"));
  rule = rule_for("lora_A");
  rule.pin = false;
  EXPECT_THAT(result_of(rule), Says("with pin = false"));
}

TEST(ResolveLora, RulesThatSpeakOfAdaptersAloneAndHoldAreTaken) {
  PrecisionRule rule = rule_for("lora_A");
  rule.param_dtype = kF32;
  rule.pin = true;
  EXPECT_EQ(result_of(rule), "");
  rule = rule_for("lora_A");
  rule.reduce_dtype = kBF16;
  EXPECT_EQ(result_of(rule), "");
  rule = rule_for("q");  // of the layer too
  rule.param_dtype = kBF16;
  EXPECT_EQ(result_of(rule), "");
}

}  // namespace
}  // namespace tessera::grad::testing::resolve_test
