// The text of a contract and a plan in `inspect --contract`.
#include "cli/contract_text.h"

#include "support/test.h"

namespace tessera::cli::contract_text_test {
namespace {

GradContract parameter(const std::string& name, std::int64_t numel = 8) {
  GradContract made;
  made.name = name;
  made.shape = {numel};
  return made;
}

std::vector<std::string> names_of(const ModelContract& contract) {
  std::vector<std::string> names;
  for (const auto& each : contract.parameters) names.push_back(each.name);
  return names;
}

// Layers join where nothing but the number differs, in any order.
TEST(FoldedContract, EqualLayersAreOneLineWithTheirNumbersAndCount) {
  ModelContract contract;
  for (const char* name : {"model.embed.weight", "layers.0.a.weight", "layers.0.b.weight",
                           "layers.1.a.weight", "layers.1.b.weight", "layers.2.a.weight",
                           "layers.2.b.weight", "layers.5.a.weight", "norm.weight"}) {
    contract.parameters.push_back(parameter(name));
  }
  contract.parameters[4].trainable = false;  // layers.1.b
  EXPECT_THAT(names_of(folded(contract)),
              ElementsAre("model.embed.weight", "layers.{0-2,5}.a.weight x 4",
                          "layers.{0,2}.b.weight x 2", "layers.1.b.weight", "norm.weight"));
}

// Two layers of one name alone, other shapes, or a number that is part of a word, stay.
TEST(FoldedContract, WhatDiffersOrStandsAloneKeepsItsName) {
  ModelContract contract;
  contract.parameters = {parameter("layers.0.w", 8), parameter("layers.1.w", 9),
                         parameter("conv2.w"), parameter("conv3.w"), parameter("other.0.w")};
  EXPECT_EQ(folded(contract), contract);
}

layout::ModelPlan plan_of(int layers) {
  const auto item = [](const std::string& name, std::int64_t numel) {
    layout::PlanItem made;
    made.name = name;
    made.numel = numel;
    made.key.compute = DType::kBFloat16;
    return made;
  };
  layout::PlanOptions options;
  options.ranks = 2;
  std::vector<layout::UnitItems> units;
  for (int i = 0; i < layers; ++i) {
    const std::string name = concat("layers.", i);
    units.push_back({name, {item(name + ".w", std::int64_t{1} << 20)}});
    units.back().items.push_back(item(name + ".norm", 128));
    units.back().items.back().key.compute = DType::kFloat32;
  }
  return layout::plan_model({"", {item("embed", 4096)}}, units, options, 65536);
}

// A unit stands for all that are laid out alike; in the root's bucket the small parameters of all
// layers are one line, at the place of the first.
TEST(PlanText, EqualUnitsAndTheSmallParametersOfAllLayersAreOne) {
  const std::string text = plan_text(plan_of(3), Layers::kFolded);
  EXPECT_THAT(text, Says("unit (root)\n", "    0 .. 128  layers.{0-2}.norm x 3\n",
                         "unit layers.{0-2} x 3\n",
                         "    a rank keeps 2.00 MiB, gathers 2.00 MiB (sends 1.00 MiB), "
                         "reduces 4.00 MiB (sends 2.00 MiB)\n"
                         "    0 .. 1048576  layers.{0-2}.w\n"));
  EXPECT_THAT(text, Not(Says("layers.1")));
}

TEST(PlanText, AllLayersHaveLinesOfTheirOwnWhereTheyAreAskedFor) {
  const std::string text = plan_text(plan_of(3), Layers::kAll);
  for (const char* line : {"unit layers.0\n", "unit layers.2\n", "  layers.1.w\n",
                           "    128 .. 256  layers.1.norm\n"}) {
    EXPECT_THAT(text, Says(line));
  }
  EXPECT_EQ(plan_text(plan_of(1), Layers::kFolded), plan_text(plan_of(1), Layers::kAll));
}

}  // namespace
}  // namespace tessera::cli::contract_text_test
