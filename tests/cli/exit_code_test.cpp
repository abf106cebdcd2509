#include "cli/exit_code.h"

#include <gtest/gtest.h>

#include "tessera/error.h"

namespace tessera::cli {
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

}  // namespace
}  // namespace tessera::cli
