// What [lora] makes of parameters, whatever policy, rules and files say.
#include <gmock/gmock.h>

#include "tessera/contract.h"
#include "tessera/error.h"
#include "unit/grad/contract_cases.h"

namespace tessera::grad::testing::resolve_lora_test {
namespace {

using ::testing::HasSubstr;

constexpr DType kF32 = DType::kFloat32;
constexpr DType kBF16 = DType::kBFloat16;

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

TEST(ResolveLora, AdaptersAreFloat32WhateverIsAsked) {
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
    EXPECT_THAT(found.reason(field), HasSubstr("[lora] adapter"));
  }
}

TEST(ResolveLora, RulesThatWouldTrainTheBaseOrFreezeAnAdapterAreRefused) {
  const auto refused = [](FrozenRule frozen, const char* pattern) {
    PrecisionPolicy policy = mixed_policy();
    policy.rules = {rule_for(pattern)};
    policy.rules[0].frozen = frozen;
    try {
      resolve_contracts({base(stored("q.weight", kBF16)), adapter("q.lora_A.weight")}, policy, {});
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_THAT(refused(FrozenRule::kNo, "q.weight"), HasSubstr("q.weight: found frozen = false"));
  EXPECT_THAT(refused(FrozenRule::kYes, "q"), HasSubstr("q.lora_A.weight: found frozen = true"));
  EXPECT_EQ(refused(FrozenRule::kShard, "q.weight"), "accepted");
}

std::string result_of(const PrecisionRule& rule) {
  PrecisionPolicy policy = mixed_policy();
  policy.rules = {rule};
  try {
    resolve_contracts(
        {base(stored("q.weight", kBF16)), adapter("q.lora_A.weight"), adapter("q.lora_B.weight")},
        policy, {});
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kContract);
    return error.what();
  }
  return "accepted";
}

TEST(ResolveLora, RulesThatSpeakOfAdaptersAloneAndWouldBeWithoutEffectAreRefused) {
  PrecisionRule rule = rule_for("lora_A");
  rule.param_dtype = kBF16;
  EXPECT_THAT(result_of(rule),
              HasSubstr("[[precision.rule]] 1: found the pattern \"lora_A\", which "
                        "matches adapters alone, beside param_dtype = bfloat16"));
  rule.match = {"q.weight", "q.lora_B.weight"};  // one of two is enough to be misled
  EXPECT_THAT(result_of(rule), HasSubstr("found the pattern \"q.lora_B.weight\""));
  rule = rule_for("lora_A");
  rule.storage_dtype = kBF16;
  EXPECT_THAT(result_of(rule), HasSubstr("beside storage_dtype = bfloat16"));
  rule = rule_for("lora_A");
  rule.pin = false;
  EXPECT_THAT(result_of(rule), HasSubstr("beside pin = false"));
}

TEST(ResolveLora, RulesThatSpeakOfAdaptersAloneAndHoldAreTaken) {
  PrecisionRule rule = rule_for("lora_A");
  rule.param_dtype = kF32;
  rule.pin = true;
  EXPECT_EQ(result_of(rule), "accepted");
  rule = rule_for("lora_A");
  rule.reduce_dtype = kBF16;
  EXPECT_EQ(result_of(rule), "accepted");
  rule = rule_for("q");  // of the layer too
  rule.param_dtype = kBF16;
  EXPECT_EQ(result_of(rule), "accepted");
}

}  // namespace
}  // namespace tessera::grad::testing::resolve_lora_test
