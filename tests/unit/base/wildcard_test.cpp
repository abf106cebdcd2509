#include "base/text/wildcard.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tessera::wildcard_test {
namespace {

struct Case {
  const char* pattern;
  const char* name;
  bool matches;
};

TEST(Wildcard, DottedPatternsMatchWholeComponents) {
  const std::vector<Case> cases = {
      {"*norm", "model.layers.0.input_layernorm.weight", true},
      {"*norm", "model.norm.weight", true},
      {"*norm", "model.norm", true},
      {"*norm", "model.norms.weight", false},
      {"norm", "model.layers.0.input_layernorm.weight", false},
      {"mlp.gate", "model.layers.0.mlp.gate.weight", true},
      {"mlp.gate", "model.layers.0.mlp.gate_proj.weight", false},
      {"mlp.gate", "model.layers.0.mlp.gate.bias", true},
      {"mlp.gate.weight", "model.layers.0.mlp.gate.weight", true},
      {"mlp.gate.bias", "model.layers.0.mlp.gate.weight", false},
      {"mlp.*.weight", "model.layers.0.mlp.gate_proj.weight", true},
      {"mlp.*.weight", "model.layers.0.mlp.experts.3.gate_proj.weight", false},
      {"wo", "word_embedding.weight", false},
      {"wo", "layers.1.attention.wo.weight", true},
      {"layers.?", "layers.1.attention.wo.weight", true},
      {"layers.?", "layers.11.attention.wo.weight", false},
      {"layers.1?", "layers.11.attention.wo.weight", true},
      {"model.vision_tower", "model.vision_tower.encoder.0.q_proj.linear.weight", true},
      {"*", "x", true},
      {"*.*", "x", false},
      {"*a*b*c*", "xxaxxbxxcxx", true},
      {"*a*b*c*", "xxaxxcxxbxx", false},
      {"Norm", "model.norm.weight", false},
      {"model.norm.weight", "model.norm.weight", true},
      {"model.norm.weight.x", "model.norm.weight", false},
      {"", "model.norm.weight", false},
      {"", "", false},
      {".norm", "model.norm.weight", false},
      {"norm.", "model.norm.weight", false},
      {"norm..weight", "model.norm.weight", false},
      {"**", "abc", true},
      {"?", "", false},
  };
  for (const Case& c : cases) {
    EXPECT_EQ(dotted_match(c.pattern, c.name), c.matches) << c.pattern << " on " << c.name;
  }
}

TEST(Wildcard, ManyStarsTakeNoExponentialTime) {
  std::string pattern;
  for (int i = 0; i < 200; ++i) pattern += "*a";
  EXPECT_FALSE(wildcard_match(pattern + "b", std::string(5000, 'a')));
  EXPECT_TRUE(wildcard_match(pattern, std::string(5000, 'a')));
}

TEST(EditDistance, OnlyPatternsHaveWildcardsAndSwaps) {
  EXPECT_EQ(edit_distance("nrom", "norm", Typed::kWord), 2U);
  EXPECT_EQ(edit_distance("nrom", "norm", Typed::kPattern), 1U);
  EXPECT_EQ(edit_distance("n?*", "NORM", Typed::kWord), 3U);
  EXPECT_EQ(edit_distance("n?*", "NORM", Typed::kPattern), 0U);
  EXPECT_EQ(edit_distance("", "norm", Typed::kWord), 4U);
}

TEST(ClosestName, FindsTheNameThatWasMeant) {
  const std::vector<std::string> names = {
      "model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight", "model.norm.weight"};
  EXPECT_EQ(closest_name("mlp.gat_proj", names), names[1]);
  EXPECT_EQ(closest_name("embed_token", names), names[0]);
  EXPECT_EQ(closest_name("*nrom", names), names[2]);
  EXPECT_EQ(closest_name("model.Norm", names), names[2]);
}

TEST(ClosestName, IsSilentWhenNothingIsClose) {
  const std::vector<std::string> names = {"model.embed_tokens.weight", "model.norm.weight"};
  EXPECT_EQ(closest_name("router", names), std::nullopt);
  EXPECT_EQ(closest_name("x", names), std::nullopt);
  EXPECT_EQ(closest_name("model.norm", {}), std::nullopt);
}

}  // namespace
}  // namespace tessera::wildcard_test
