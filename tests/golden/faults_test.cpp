// Faults that real trainers had in mixtures of experts on several ranks (and some next to them),
// injected one at a time: what refuses or finds each. The table is docs/layouts.md.
#include "golden/faults.h"

#include <ATen/ATen.h>

#include <cmath>
#include <iterator>
#include <sstream>

#include "golden/model_folder.h"
#include "support/ranks.h"
#include "support/test.h"

namespace tessera::golden::faults_test {
namespace {

/// On this thread, not on a rank's.
void prepare(Setting setting) {
  train::Config config;
  set_up(config, setting);
}

Changes sound(Setting setting) {
  prepare(setting);
  return {.config = [=](train::Config& config) { set_up(config, setting); },
          .batch = batch_of(setting)};
}

/// The fault on top of what its run has anyway.
Changes faulty(const Fault& fault) {
  prepare(fault.setting);
  Changes changes = fault.changes;
  changes.config = [&fault](train::Config& config) {
    set_up(config, fault.setting);
    if (fault.changes.config) fault.changes.config(config);
  };
  changes.batch = batch_of(fault.setting);
  return changes;
}

/// One rank, no fault.
const Step& unsharded(const std::string& folder, Setting setting) {
  static std::map<std::pair<std::string, Setting>, Step> kept;
  const std::pair key{folder, setting};
  auto found = kept.find(key);
  if (found == kept.end()) found = kept.emplace(key, run_step(folder, {}, sound(setting))).first;
  return found->second;
}

struct Difference {
  std::vector<std::string> gradients;
  std::vector<std::string> biases;  ///< of any rank
  double norm = 0;                  ///< relative
};

Difference compare(const Step& found, const Step& expected) {
  Difference difference;
  for (const auto& [name, gradient] : expected.gradients) {
    const double error = relative_error(found.gradients.at(name), gradient);
    if (!(error < kGradientBound)) difference.gradients.push_back(name);
  }
  // Counts are whole numbers: the same ones make the same bias.
  for (const auto& [name, bias] : expected.biases.front()) {
    const bool same = std::ranges::all_of(found.biases, [&](const Tensors& rank) {
      return bool(test::same_bits(rank.at(name), bias));
    });
    if (!same) difference.biases.push_back(name);
  }
  difference.norm = std::abs(found.norm - expected.norm) / expected.norm;
  return difference;
}

void expect_same_losses(const Step& found, const Step& expected) {
  EXPECT_NEAR(found.loss, expected.loss, kLossBound);
  EXPECT_NEAR(found.auxiliary, expected.auxiliary, kLossBound);
}

bool names(const std::vector<std::string>& all, const std::string& part) {
  return std::ranges::any_of(
      all, [&](const std::string& name) { return name.find(part) != std::string::npos; });
}

class SoundLayout : public ::testing::TestWithParam<Ground> {};

// The grounds without faults are sound: no check finds anything.
TEST_P(SoundLayout, IsRight) {
  const Ground& ground = GetParam();
  const Step found = run_step(ground.folder, ground.degrees, sound(ground.setting));
  const Step& expected = unsharded(ground.folder, ground.setting);
  ASSERT_EQ(found.refusal + found.forward_refusal, "");
  EXPECT_EQ(found.not_invariant, std::vector<std::string>{});
  expect_same_losses(found, expected);
  const Difference difference = compare(found, expected);
  EXPECT_EQ(difference.gradients, std::vector<std::string>{});
  EXPECT_EQ(difference.biases, std::vector<std::string>{});
  EXPECT_LT(difference.norm, kGradientBound);
  // The fault's own setting does what it says.
  EXPECT_EQ(ground.setting == Setting::kAuxiliaryLoss, expected.auxiliary != 0);
  EXPECT_EQ(ground.setting == Setting::kBalance || ground.setting == Setting::kBalanceByRows,
            !expected.biases.front().empty());
}

class InjectedFault : public ::testing::TestWithParam<Fault> {};

TEST_P(InjectedFault, IsCaughtWhereTheTableSaysAndNamed) {
  const Fault& fault = GetParam();
  const Step found = run_step(fault.folder, fault.degrees, faulty(fault));
  ASSERT_GT(found.acted, 0) << "the fault was never there";
  if (fault.caught_by == CaughtBy::kSharding) {
    EXPECT_NE(found.refusal.find(fault.named), std::string::npos) << found.refusal;
    return;
  }
  ASSERT_EQ(found.refusal, "");
  if (fault.caught_by == CaughtBy::kTransition || fault.caught_by == CaughtBy::kStep) {
    EXPECT_NE(found.forward_refusal.find(fault.named), std::string::npos) << found.forward_refusal;
    return;
  }
  ASSERT_EQ(found.forward_refusal, "");
  const Step& expected = unsharded(fault.folder, fault.setting);
  if (fault.losses_are_right) expect_same_losses(found, expected);
  const Difference difference = compare(found, expected);
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
    case CaughtBy::kBias:
      EXPECT_FALSE(invariant || gradients) << "caught earlier";
      EXPECT_LT(difference.norm, kGradientBound);
      EXPECT_TRUE(names(difference.biases, fault.named))
          << ::testing::PrintToString(difference.biases);
      break;
    case CaughtBy::kNothing:
      EXPECT_FALSE(invariant || gradients) << ::testing::PrintToString(difference.gradients);
      EXPECT_LT(difference.norm, kGradientBound);
      break;
    default:
      FAIL();
  }
}

/// The rows of the one table in the page's section of that title, in their order.
std::vector<std::string> table_of(const std::string& page, const std::string& section) {
  std::istringstream lines(page.substr(page.find("\n## " + section + "\n") + 1));
  std::vector<std::string> rows;
  std::string line;
  std::getline(lines, line);
  while (std::getline(lines, line) && !line.starts_with("## ")) {
    if (line.starts_with("|")) rows.push_back(line);
  }
  rows.erase(rows.begin(), rows.begin() + std::min<std::ptrdiff_t>(2, std::ssize(rows)));
  return rows;
}

/// Returns what the first of two sorted lists has in addition.
std::vector<std::string> more(const std::vector<std::string>& all,
                              const std::vector<std::string>& others) {
  std::vector<std::string> result;
  std::ranges::set_difference(all, others, std::back_inserter(result));
  return result;
}

TEST(InjectedFaults, TheTableOfTheDocumentationIsThisList) {
  const auto page = read_file(TESSERA_SOURCE "/docs/layouts.md");
  ASSERT_NE(page.find("\n## Injected faults\n"), std::string::npos);
  auto found = table_of(page, "Injected faults");
  std::vector<std::string> rows;
  for (const Fault& fault : all_faults()) rows.push_back(table_row(fault));
  std::ranges::sort(found);
  std::ranges::sort(rows);
  EXPECT_EQ(more(rows, found), std::vector<std::string>{}) << "not in the table";
  EXPECT_EQ(more(found, rows), std::vector<std::string>{}) << "in the table alone";
  EXPECT_GE(
      std::ranges::count_if(all_faults(),
                            [](const Fault& each) { return each.caught_by != CaughtBy::kNothing; }),
      12);
}

TEST(InjectedFaults, TheTableOfContextParallelismIsItsList) {
  auto found = table_of(read_file(TESSERA_SOURCE "/docs/context.md"), "Injected faults");
  std::vector<std::string> rows = other_rows_of_context();
  for (const Fault& fault : faults_of_context()) rows.push_back(table_row(fault));
  EXPECT_EQ(rows.size(), 36U);
  std::ranges::sort(found);
  std::ranges::sort(rows);
  EXPECT_EQ(more(rows, found), std::vector<std::string>{}) << "not in the table";
  EXPECT_EQ(more(found, rows), std::vector<std::string>{}) << "in the table alone";
}

std::string name_of_ground(const ::testing::TestParamInfo<Ground>& each) {
  std::string name = to_string(each.param);
  std::erase_if(name, [](char c) { return c == ',' || c == '-'; });
  std::ranges::replace(name, ' ', '_');
  return name;
}
std::string name_of_fault(const ::testing::TestParamInfo<Fault>& each) { return each.param.test; }

INSTANTIATE_TEST_SUITE_P(Each, SoundLayout, ::testing::ValuesIn(grounds_of(all_faults())),
                         name_of_ground);
INSTANTIATE_TEST_SUITE_P(Each, InjectedFault, ::testing::ValuesIn(all_faults()), name_of_fault);
INSTANTIATE_TEST_SUITE_P(Context, SoundLayout, ::testing::ValuesIn(grounds_of(faults_of_context())),
                         name_of_ground);
INSTANTIATE_TEST_SUITE_P(Context, InjectedFault, ::testing::ValuesIn(faults_of_context()),
                         name_of_fault);

}  // namespace
}  // namespace tessera::golden::faults_test
