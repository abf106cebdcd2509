#include <signal.h>
#include <unistd.h>

#include "cli/program_end.h"
#include "support/test.h"

namespace tessera::cli::stop_signal_test {
namespace {

using ::testing::ExitedWithCode;
using ::testing::KilledBySignal;

constexpr int kReachedItsEnd = 7;

[[noreturn]] void run_and_raise(int number, int times) {
  {
    const StopSignal run;
  }
  for (int i = 0; i < times; ++i) ::raise(number);
  ::_exit(kReachedItsEnd);
}

// While a rank waits for the others to take their leave, everything is saved already.
TEST(StopSignal, AFirstOneAfterTheRunChangesNothingASecondOneEndsTheProcess) {
  for (const int number : {SIGTERM, SIGINT}) {
    EXPECT_EXIT(run_and_raise(number, 1), ExitedWithCode(kReachedItsEnd), "");
    EXPECT_EXIT(run_and_raise(number, 2), KilledBySignal(number), "");
  }
}

TEST(StopSignal, IsKnownToTheRun) {
  const StopSignal run;
  EXPECT_FALSE(StopSignal::requested());
  ::raise(SIGTERM);
  EXPECT_TRUE(StopSignal::requested());
  const StopSignal next;
  EXPECT_FALSE(StopSignal::requested()) << "of the run before";
}

}  // namespace
}  // namespace tessera::cli::stop_signal_test
