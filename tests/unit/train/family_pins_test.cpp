#include "support/test.h"
#include "train/plan_of_run.h"

namespace tessera::train::family_pins_test {
namespace {

std::vector<ParameterMeta> parameters() {
  std::vector<ParameterMeta> metas(3);
  metas[0].name = "model.layers.0.input_layernorm.weight";
  metas[1].name = "model.norm.weight";
  metas[2].name = "model.layers.0.mlp.router.weight";
  return metas;
}

models::FamilyTraits family_with(models::KeepInFloat32 pins) {
  models::FamilyTraits family = models::qwen3_traits();
  family.pins = std::move(pins);
  return family;
}

// Naive: a substring match, where "norm" is every name with it (transformers issue 26484).
TEST(FamilyPins, MatchWholeComponentsAndAreKeptApart) {
  auto metas = parameters();
  std::vector<BufferMeta> buffers;
  apply_pins(family_with({{"router"}, {"norm"}}), metas, buffers);
  EXPECT_EQ(metas[0].strict_pin, std::nullopt);
  EXPECT_EQ(metas[0].pin16, std::nullopt);
  EXPECT_EQ(metas[1].pin16, "norm");
  EXPECT_EQ(metas[1].strict_pin, std::nullopt);
  EXPECT_EQ(metas[2].strict_pin, "router");
  EXPECT_EQ(metas[2].pin16, std::nullopt);
}

TEST(FamilyPins, OneThatMatchesNothingIsAnErrorOfTheTable) {
  auto metas = parameters();
  std::vector<BufferMeta> buffers;
  EXPECT_REFUSED(kContract, apply_pins(family_with({{}, {"norm", "sinks"}}), metas, buffers),
                 "qwen3", "\"sinks\"", "_keep_in_fp32_modules, which matches none of 3");
}

TEST(FamilyPins, ABufferIsPinnedAsAParameterIs) {
  auto metas = parameters();
  std::vector<BufferMeta> buffers(2);
  buffers[0].name = "model.layers.0.mlp.gate.e_score_correction_bias";
  buffers[1].name = "model.layers.0.mlp.gate.another";
  apply_pins(family_with({{"e_score_correction_bias"}, {}}), metas, buffers);
  EXPECT_EQ(buffers[0].strict_pin, "e_score_correction_bias");
  EXPECT_EQ(buffers[1].strict_pin, std::nullopt);
}

// Gemma 4 without experts has no router: its table is none the worse for it.
TEST(FamilyPins, OfRoutersHoldWhereThereAreAny) {
  auto metas = parameters();
  std::vector<BufferMeta> buffers;
  models::KeepInFloat32 pins;
  pins.routers = {"router"};
  apply_pins(family_with(pins), metas, buffers);
  EXPECT_EQ(metas[2].strict_pin, "router");
  metas.pop_back();
  EXPECT_NO_THROW(apply_pins(family_with(pins), metas, buffers));
}

// DeepSeek V3 and GLM 4.5 with dense layers alone.
TEST(FamilyPins, StrictOnesOfRoutersHoldWhereThereAreAny) {
  auto metas = parameters();
  std::vector<BufferMeta> buffers;
  auto family = family_with({.strict = {"bias"}, .under_float16 = {}, .strict_of_routers = true});
  family.router_module = "router";
  EXPECT_THROW(apply_pins(family, metas, buffers), Error);
  buffers.emplace_back();
  buffers.back().name = "model.layers.0.mlp.router.bias";
  apply_pins(family, metas, buffers);
  EXPECT_EQ(buffers[0].strict_pin, "bias");
  metas.pop_back();
  buffers.clear();
  EXPECT_NO_THROW(apply_pins(family, metas, buffers));
}

TEST(FamilyPins, OfEachFamilyAreApplicable) {
  EXPECT_GE(models::families().size(), 2U);
  for (const auto* family : models::families()) EXPECT_FALSE(family->architecture.empty());
}

}  // namespace
}  // namespace tessera::train::family_pins_test
