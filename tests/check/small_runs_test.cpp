// Small runs of right layouts: nothing is found in any.
#include "proof.h"
#include "support/temporary_folder.h"
#include "support/test.h"
#include "train/check/check_run.h"
#include "train/config/config_resolve.h"
#include "train/contract_of_run.h"
#include "train/small/compare_runs.h"
#include "unit/train/drawn_run.h"

namespace tessera::train::small_runs_test {
namespace {

std::string in_words(const std::vector<check::Finding>& findings) {
  std::string text;
  for (const auto& finding : findings) text += to_string(finding) + "\n";
  return text;
}

// Every family and form of layout, drawn by seed.
TEST(SmallRuns, FindNothingInRightLayouts) {
  const auto first = static_cast<std::uint32_t>(test::environment_number("TESSERA_SMALL_SEED", 1));
  const auto draws = static_cast<std::uint32_t>(
      test::environment_number("TESSERA_SMALL_DRAWS", test::full_proof() ? 400 : 12));
  for (std::uint32_t seed = first; seed < first + draws; ++seed) {
    const TemporaryFolder folder;
    const Drawn d = drawn(seed);
    SCOPED_TRACE(::testing::Message() << "seed " << seed << ": " << d);
    const Config config = config_of(folder, d);
    write_model(folder, d.family + "-fp32", make_room_for_bytes);
    const auto source = open_model(config.model, config.lora);
    const auto run = small_run(config, source, resolve_parallelism(config.parallelism, d.ranks()));
    const SeenRun seen = run_small(run);
    ASSERT_EQ(seen.refused, "");
    for (const SeenStep& step : seen.steps) EXPECT_GT(step.norm, 0.0);
    EXPECT_EQ(in_words(check_run(config, source, d.ranks()).report.findings), "")
        << to_string(mesh_shape(run.dims));
  }
}

}  // namespace
}  // namespace tessera::train::small_runs_test
