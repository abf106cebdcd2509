#include "grad/resolve_rules.h"

#include <gtest/gtest.h>

#include "tessera/error.h"
#include "unit/grad/contract_cases.h"

namespace tessera::grad::testing::resolve_rules_test {
namespace {

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

}  // namespace
}  // namespace tessera::grad::testing::resolve_rules_test
