// Faults that real trainers had in mixtures of experts on several ranks (and some next to them),
// injected one at a time: what refuses or finds each. The table is docs/layouts.md.
#include "golden/faults.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>

#include "golden/model_folder.h"
#include "tessera/error.h"

namespace tessera::golden {
namespace {

/// One rank, nothing changed; a config of its own where the fault's run has one that is no fault.
const Step& unsharded(const Fault& fault) {
  static std::map<std::string, Step> kept;
  const auto key = fault.folder + (fault.auxiliary ? "+aux" : "");
  auto found = kept.find(key);
  if (found == kept.end()) {
    Changes changes;
    if (fault.auxiliary) changes.config = with_auxiliary_loss;
    found = kept.emplace(key, run_step(fault.folder, {}, changes)).first;
  }
  return found->second;
}

struct Difference {
  std::vector<std::string> gradients;
  double norm = 0;  ///< relative
};

Difference compare(const Step& found, const Step& expected) {
  Difference difference;
  for (const auto& [name, gradient] : expected.gradients) {
    const double error = relative_error(found.gradients.at(name), gradient);
    if (!(error < kGradientBound)) difference.gradients.push_back(name);
  }
  difference.norm = std::abs(found.norm - expected.norm) / expected.norm;
  return difference;
}

bool names(const std::vector<std::string>& all, const std::string& part) {
  return std::ranges::any_of(
      all, [&](const std::string& name) { return name.find(part) != std::string::npos; });
}

class InjectedFault : public ::testing::TestWithParam<Fault> {};

// The same layout without the fault is right: nothing below finds anything in it.
TEST_P(InjectedFault, TheLayoutItselfIsRight) {
  const Fault& fault = GetParam();
  Changes sound;
  if (fault.auxiliary) sound.config = with_auxiliary_loss;
  const Step found = run_step(fault.folder, fault.degrees, sound);
  EXPECT_EQ(found.refusal, "");
  EXPECT_EQ(found.not_invariant, std::vector<std::string>{});
  const Difference difference = compare(found, unsharded(fault));
  EXPECT_EQ(difference.gradients, std::vector<std::string>{});
  EXPECT_LT(difference.norm, kGradientBound);
}

TEST_P(InjectedFault, IsCaughtWhereTheTableSaysAndNamed) {
  const Fault& fault = GetParam();
  const Step found = run_step(fault.folder, fault.degrees, fault.changes);
  if (fault.caught_by == CaughtBy::kSharding) {
    EXPECT_NE(found.refusal.find(fault.named), std::string::npos) << found.refusal;
    return;
  }
  ASSERT_EQ(found.refusal, "");
  const Difference difference = compare(found, unsharded(fault));
  const bool invariant = !found.not_invariant.empty();
  const bool gradients = !difference.gradients.empty();
  switch (fault.caught_by) {
    case CaughtBy::kInvariance:
      EXPECT_TRUE(names(found.not_invariant, fault.named))
          << ::testing::PrintToString(found.not_invariant);
      EXPECT_TRUE(names(difference.gradients, fault.named)) << "no harm done";
      break;
    case CaughtBy::kGradients:
      EXPECT_FALSE(invariant) << "caught earlier: " << found.not_invariant.front();
      EXPECT_TRUE(names(difference.gradients, fault.named))
          << ::testing::PrintToString(difference.gradients);
      break;
    case CaughtBy::kNorm:
      EXPECT_FALSE(invariant || gradients) << "caught earlier";
      EXPECT_GT(difference.norm, 10 * kGradientBound);
      break;
    case CaughtBy::kNothing:
      EXPECT_FALSE(invariant || gradients) << ::testing::PrintToString(difference.gradients);
      EXPECT_LT(difference.norm, kGradientBound);
      break;
    default:
      FAIL();
  }
}

TEST(InjectedFaults, TheTableOfTheDocumentationIsThisList) {
  std::ifstream file(std::filesystem::path(TESSERA_TEST_DATA) / "../../../docs/layouts.md");
  std::ostringstream page;
  page << file.rdbuf();
  for (const Fault& fault : all_faults()) {
    EXPECT_NE(page.str().find(table_row(fault)), std::string::npos) << table_row(fault);
  }
  EXPECT_GE(
      std::ranges::count_if(all_faults(),
                            [](const Fault& each) { return each.caught_by != CaughtBy::kNothing; }),
      12);
}

INSTANTIATE_TEST_SUITE_P(Each, InjectedFault, ::testing::ValuesIn(all_faults()),
                         [](const auto& each) { return each.param.test; });

}  // namespace
}  // namespace tessera::golden
