// Runs whose batches memory does not hold.
#include <gmock/gmock.h>

#include "tessera/error.h"
#include "train/parallelize.h"
#include "train/step.h"
#include "train/trainer.h"
#include "unit/train/run_case.h"

namespace tessera::train::memory_of_run_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;

// Naive: they are accepted, and the program is killed in the first step.
TEST(MemoryOfRun, RowsThatNoMachineHoldsAreRefusedBeforeTheModelIsMade) {
  const testing::TemporaryFolder folder;
  Config config = run_case(folder, Head::kTied);
  const auto refusal = [&] {
    return error_of(ErrorKind::kConfig,
                    [&] { on_ranks(2, [&](World& world) { run_training(config, world); }); });
  };
  config.training.local_batch_size = 1'000'000'000;
  EXPECT_THAT(refusal(),
              HasSubstr("training.local_batch_size: found 1000000000 rows of 16 tokens"));
  config.training.local_batch_size = 1;
  config.training.global_batch_size = 1'000'000'000'000;
  EXPECT_THAT(refusal(), HasSubstr("training.global_batch_size: found 500000000000 rows of 16"));
  config.training.steps = 1'000'000'000;
  EXPECT_THAT(refusal(), HasSubstr("training.global_batch_size: found 1000000000000 rows a step "
                                   "for 1000000000 steps"));
}

/// Rows that take more memory than there is.
class Endless final : public BatchSource {
 public:
  std::int64_t rows_in_step() const override { return 2; }
  std::int64_t row_tokens() const override { return 16; }
  std::int64_t rows_in_pass() const override { return rows_in_step(); }
  void check_labels(std::int64_t) override {}
  MicroBatch load(std::int64_t, RowRange rows) const override {
    const auto ids = at::empty({rows.size(), std::int64_t{1} << 50}, at::kLong);
    return {ids, ids};
  }
  std::vector<std::string> opened_from() const override { return {}; }
};

// Naive: the allocator's words, which name no key.
TEST(MemoryOfRun, MemoryThatEndsInAStepIsAnErrorThatNamesTheKey) {
  const testing::TemporaryFolder folder;
  const Config config = run_case(folder, Head::kTied);
  on_ranks(1, [&](World& world) {
    const auto source = open_model(config.model);
    const auto mesh = world.mesh(mesh_shape(resolve_parallelism(config.parallelism, 1)));
    const auto model = parallelize(source, config, mesh);
    const auto said = AllOf(HasSubstr("training.local_batch_size: found micro-batches of 2 row(s) "
                                      "of 16 tokens, for which memory ran out"),
                            HasSubstr("can't allocate memory"));
    EXPECT_THAT(
        error_of(ErrorKind::kConfig, [&] { forward_backward(*model, Endless(), 1, {{0, 2}}, {}); }),
        said);
    EXPECT_THAT(error_of(ErrorKind::kConfig, [&] { forward_only(*model, Endless(), 1, {{0, 2}}); }),
                said);
  });
}

}  // namespace
}  // namespace tessera::train::memory_of_run_test
