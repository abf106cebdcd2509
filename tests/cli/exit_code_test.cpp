
#include "cli/program_end.h"
#include "support/test.h"
#include "train/report/checks.h"

namespace tessera::cli::exit_code_test {
namespace {

TEST(ExitCode, WhatAUserGaveIsRefusedBeforeTheFirstStep) {
  for (const ErrorKind kind : {ErrorKind::kUsage, ErrorKind::kConfig, ErrorKind::kContract,
                               ErrorKind::kFormat, ErrorKind::kIo}) {
    EXPECT_EQ(exit_code(Error(kind, ""), Phase::kPreparing), 2) << to_string(kind);
    EXPECT_EQ(exit_code(Error(kind, ""), Phase::kStepping), 1) << to_string(kind);
  }
}

TEST(ExitCode, LostRanksAndBugsAreFailuresAlways) {
  for (const Phase phase : {Phase::kPreparing, Phase::kStepping}) {
    EXPECT_EQ(exit_code(Error(ErrorKind::kComm, ""), phase), 1);
    EXPECT_EQ(exit_code(Error(ErrorKind::kInternal, ""), phase), 1);
    EXPECT_EQ(exit_code(Error(ErrorKind::kNumeric, ""), phase), 1);
    EXPECT_EQ(exit_code(std::bad_alloc(), phase), 1);
  }
}

TEST(RunPhase, BeginsByPreparing) {
  RunPhase phase;
  EXPECT_EQ(phase.now(), Phase::kPreparing);
  phase.begin_steps();
  EXPECT_EQ(phase.now(), Phase::kStepping);
}

// debug.check_dtypes: neither a refusal of what was asked for nor a run that failed.
TEST(ExitCode, ACheckThatFoundProblemsHasItsOwn) {
  const train::FoundProblems found(ErrorKind::kContract, "found 1 operation");
  EXPECT_EQ(exit_code(found, Phase::kPreparing), 3);
  EXPECT_EQ(exit_code(found, Phase::kStepping), 3);
  EXPECT_EQ(exit_code(Error(ErrorKind::kContract, "found 1 operation"), Phase::kPreparing), 2);
}

}  // namespace
}  // namespace tessera::cli::exit_code_test
