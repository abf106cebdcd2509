// The variables of libgomp that a rank gets, for any setting of a user.
#include "launch/rank_variables.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace tessera::comm::rank_variables_test {
namespace {

struct Setting {
  const char* text;  ///< null: not set
  bool counts;
};

/// The variables with `name` set to it.
void put(base::Environment& variables, const char* name, const Setting& setting) {
  if (setting.text != nullptr) variables[name] = setting.text;
}

bool says_how_threads_wait(const base::Environment& variables) {
  return std::ranges::any_of(variables, [](const auto& variable) {
    return comm::says_how_threads_wait(variable.first + "=" + variable.second);
  });
}

// Property: a setting that counts stays, one that does not is replaced, for every combination.
TEST(RankVariables, ReplaceOnlyWhatDoesNotCount) {
  const std::vector<Setting> threads{{nullptr, false}, {"", false},  {"0", false}, {" ", false},
                                     {"-2", false},    {"x", false}, {"1", true},  {"4,2", true}};
  const std::vector<Setting> waits{
      {nullptr, false}, {"", false}, {" ", false}, {"0", true}, {"active", true}};
  for (const Setting& given : threads) {
    for (const Setting& spins : waits) {
      for (const Setting& policy : waits) {
        base::Environment variables{{"PATH", "/bin"}};
        put(variables, "OMP_NUM_THREADS", given);
        put(variables, "GOMP_SPINCOUNT", spins);
        put(variables, "OMP_WAIT_POLICY", policy);
        base::Environment expected = variables;
        if (!given.counts) expected["OMP_NUM_THREADS"] = "3";
        if (!spins.counts && !policy.counts) {
          expected["GOMP_SPINCOUNT"] = std::string(kShortSpins).substr(15);
        }
        EXPECT_EQ(says_how_threads_wait(variables), spins.counts || policy.counts);
        set_thread_variables(variables, 3);
        EXPECT_EQ(variables, expected);
        EXPECT_TRUE(says_how_threads_wait(variables)) << "a rank is executed once";
      }
    }
  }
}

}  // namespace
}  // namespace tessera::comm::rank_variables_test
