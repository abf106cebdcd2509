// What resolution refuses: each message names the parameter, both values and the key to change.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tessera/error.h"
#include "unit/grad/contract_cases.h"

namespace tessera::grad::testing::resolve_errors_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// The message of the kContract error, or "" when there is none.
std::string refusal(const std::vector<ParameterMeta>& parameters, const PrecisionPolicy& policy,
                    const ReductionPlan& reductions = {}) {
  try {
    resolve_contracts(parameters, policy, reductions);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kContract) << error.what();
    return error.what();
  }
  return "";
}

TEST(ResolveErrors, PinOnANarrowFileNamesParameterPinAndKeys) {
  PrecisionPolicy policy = mixed_policy();
  policy.rules = {rule_for("mlp.gate")};
  policy.rules[0].pin = true;
  EXPECT_THAT(refusal({stored("mlp.gate.weight", DType::kBFloat16)}, policy),
              AllOf(HasSubstr("mlp.gate.weight: found bfloat16 in the checkpoint"),
                    HasSubstr("rule 1 (mlp.gate)"), HasSubstr("expected float32"),
                    HasSubstr("widen = true"), HasSubstr("storage_dtype")));
  ParameterMeta meta = stored("sinks", DType::kBFloat16);
  meta.strict_pin = "sinks";
  EXPECT_THAT(refusal({meta}, mixed_policy()),
              HasSubstr("by the model family (_keep_in_fp32_modules_strict: sinks)"));
  policy.storage_dtype = DType::kBFloat16;  // asking for the narrow storage changes nothing
  EXPECT_THAT(refusal({stored("mlp.gate.weight", DType::kBFloat16)}, policy),
              HasSubstr("widen = true"));
}

TEST(ResolveErrors, PinWithANarrowDtypeInOneRuleContradictsItself) {
  PrecisionPolicy policy;
  policy.rules = {rule_for("w")};
  policy.rules[0].pin = true;
  policy.rules[0].param_dtype = DType::kBFloat16;
  EXPECT_THAT(refusal({scratch("w")}, policy),
              AllOf(HasSubstr("[[precision.rule]] 1 (w)"), HasSubstr("param_dtype = bfloat16")));
}

TEST(ResolveErrors, TrainableIntegers) {
  EXPECT_THAT(refusal({scratch("tid2eid", DType::kInt32)}, {}),
              AllOf(HasSubstr("tid2eid"), HasSubstr("int32"), HasSubstr("frozen = true")));
}

TEST(ResolveErrors, TrainablePackedStorage) {
  EXPECT_THAT(refusal({stored("w", DType::kFloat8E4M3)}, mixed_policy()),
              AllOf(HasSubstr("w: found a trainable parameter stored as float8_e4m3fn"),
                    HasSubstr("storage_dtype")));
}

TEST(ResolveErrors, PackedComputeDtype) {
  ParameterMeta meta = scratch("w", DType::kFloat8E5M2);
  meta.trainable = false;
  EXPECT_THAT(refusal({meta}, {}),
              AllOf(HasSubstr("w: found the compute dtype float8_e5m2"), HasSubstr("param_dtype")));
}

TEST(ResolveErrors, Float16OnTheWire) {
  PrecisionPolicy policy;
  policy.reduce_dtype = DType::kFloat16;
  EXPECT_THAT(refusal({scratch("w")}, policy),
              AllOf(HasSubstr("w: found the reduce dtype float16"), HasSubstr("loss scaler"),
                    HasSubstr("[precision] reduce_dtype")));
  policy.reduce_dtype.reset();
  policy.rules = {rule_for("w")};
  policy.rules[0].reduce_dtype = DType::kFloat16;
  EXPECT_THAT(refusal({scratch("w")}, policy), HasSubstr("reduce_dtype of rule 1 (w)"));
  policy.loss_scaling = true;
  EXPECT_EQ(refusal({scratch("w")}, policy), "");
}

TEST(ResolveErrors, AccumulatorNarrowerThanTheWire) {
  PrecisionPolicy policy;
  policy.accumulate_dtype = DType::kBFloat16;
  EXPECT_THAT(refusal({scratch("w")}, policy),
              AllOf(HasSubstr("w: found the accumulate dtype bfloat16"),
                    HasSubstr("expected float32 or wider"),
                    HasSubstr("[precision] accumulate_dtype"), HasSubstr("reduce_dtype")));
  policy.accumulate_dtype = DType::kFloat32;
  policy.rules = {rule_for("w")};
  policy.rules[0].reduce_dtype = DType::kFloat64;
  EXPECT_THAT(refusal({scratch("w")}, policy), HasSubstr("rule 1 (w)"));
  policy = {};
  policy.reduce_dtype = DType::kBFloat16;
  policy.accumulate_dtype = DType::kFloat16;  // not narrower in bytes, but does not hold it
  EXPECT_THAT(refusal({scratch("w")}, policy), HasSubstr("expected bfloat16 or wider"));
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
      EXPECT_THAT(refusal({scratch("w")}, policy),
                  AllOf(HasSubstr(key), HasSubstr(std::string(to_string(dtype)))));
    }
  }
  PrecisionPolicy policy;
  policy.rules = {rule_for("w")};
  policy.rules[0].grad_dtype = DType::kBool;
  EXPECT_THAT(refusal({scratch("w")}, policy), HasSubstr("[[precision.rule]] 1 grad_dtype"));
  ParameterMeta meta = scratch("w");
  meta.user_grad_dtype = DType::kInt64;
  EXPECT_THAT(refusal({meta}, {}), AllOf(HasSubstr("w: "), HasSubstr("grad_dtype int64")));
}

TEST(ResolveErrors, PatternThatMatchesNothingNamesTheNearest) {
  PrecisionPolicy policy;
  policy.rules = {rule_for("w"), rule_for("w")};
  policy.rules[1].match = {"w", "*nrom"};
  EXPECT_THAT(refusal({scratch("w"), scratch("model.norm.weight")}, policy),
              AllOf(HasSubstr("[[precision.rule]] 2"), HasSubstr("\"*nrom\""),
                    HasSubstr("(nearest name: model.norm.weight)")));
  policy.rules[1].match = {"router"};
  const std::string message = refusal({scratch("w")}, policy);
  EXPECT_THAT(message, HasSubstr("\"router\", which matches none of 1 parameters"));
  EXPECT_THAT(message, ::testing::Not(HasSubstr("nearest")));
}

TEST(ResolveErrors, MalformedPatterns) {
  for (const char* pattern : {"", ".", "a..b", ".weight", "norm."}) {
    PrecisionPolicy policy;
    policy.rules = {rule_for(pattern)};
    EXPECT_THAT(refusal({scratch("w")}, policy), HasSubstr("[[precision.rule]] 1")) << pattern;
  }
  PrecisionPolicy policy;
  policy.rules = {PrecisionRule{}};
  EXPECT_THAT(refusal({scratch("w")}, policy), HasSubstr("set match"));
}

TEST(ResolveErrors, OneNameForTwoParameters) {
  EXPECT_THAT(refusal({scratch("w"), scratch("w")}, {}), HasSubstr("found the name w also for w"));
  ParameterMeta meta = scratch("embed");
  meta.aliases = {"head"};
  EXPECT_THAT(refusal({scratch("head"), meta}, {}),
              AllOf(HasSubstr("embed: "), HasSubstr("the name head")));
}

TEST(ResolveErrors, CheckpointOfAnotherKind) {
  EXPECT_THAT(refusal({stored("w", DType::kInt64)}, {}),
              AllOf(HasSubstr("w: found int64 in the checkpoint"), HasSubstr("float32")));
}

TEST(ResolveErrors, ShapesThatCannotBe) {
  ParameterMeta meta = scratch("w");
  meta.shape = {std::int64_t{1} << 40, std::int64_t{1} << 40};
  EXPECT_THAT(refusal({meta}, {}), HasSubstr("w: found more than 2^63 elements"));
  meta.shape = {0, -1};
  EXPECT_THAT(refusal({meta}, {}), HasSubstr("w: found a dimension of -1"));
}

TEST(ResolveErrors, ReductionsThatCountTwice) {
  EXPECT_THAT(refusal({scratch("w")}, {}, {{"dp_shard"}, {"dp_shard"}, 1}), HasSubstr("dp_shard"));
  for (const double factor : {0.0, -1.0, std::numeric_limits<double>::infinity(),
                              std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THAT(refusal({scratch("w")}, {}, {{"dp_shard"}, {}, factor}),
                HasSubstr("divide factor"));
  }
}

}  // namespace
}  // namespace tessera::grad::testing::resolve_errors_test
