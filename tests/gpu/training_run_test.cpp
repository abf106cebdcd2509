// `tessera train` on a card: 50 steps as on the CPU.
#include "dist/training_run.h"

#include "support/place.h"
#include "support/test.h"

namespace tessera::gpu_training_run_test {
namespace {

using test::RunLosses;

/// Other kernels: sums in other orders, rounded elsewhere, and 50 updates carry it on. At the end
/// the losses of the CPU itself differ as much between 1 and 2 ranks in bf16.
void expect_near(const RunLosses& found, const RunLosses& expected, double tolerance) {
  ASSERT_EQ(found.losses.size(), expected.losses.size());
  for (std::size_t i = 0; i < found.losses.size(); ++i) {
    EXPECT_NEAR(found.losses[i], expected.losses[i], tolerance * expected.losses[i])
        << "step " << i;
  }
}

TEST(TrainingRun, HasTheLossesOfTheCpuForFiftySteps) {
  const TemporaryFolder folder;
  int runs = 0;
  for (const auto dtype : {DType::kFloat32, DType::kBFloat16}) {
    auto config = test::small_run(folder);
    config.training.steps = 50;
    config.precision.param_dtype.dtype = dtype;
    const double tolerance = dtype == DType::kFloat32 ? 1e-4 : 2e-2;
    test::place() = {};
    const auto expected = test::train_on({1, 1}, config, folder / concat("run-", ++runs));
    for (const int ranks : {1, 2, 4}) {
      SCOPED_TRACE(concat(to_string(dtype), ", ranks: ", ranks));
      test::place() = {"cuda:0", ranks == 2};
      const auto found =
          test::train_on({ranks, ranks == 4 ? 2 : 1}, config, folder / concat("run-", ++runs));
      expect_near(found, expected, tolerance);
    }
    test::place() = {};
  }
}

}  // namespace
}  // namespace tessera::gpu_training_run_test
