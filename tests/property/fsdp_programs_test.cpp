// Property: for every training loop with a sharded module, its results, gradients and weights are
// those of the unsharded one on plain autograd; what is refused is refused on all ranks, by name,
// and the next step is right.
//
// TESSERA_PROGRAM_SEED=N replays one program and makes it smaller if it fails;
// TESSERA_PROGRAM_FROM (1) is the first seed, TESSERA_PROGRAM_COUNT (40) how many are drawn, or
// TESSERA_PROGRAM_SECONDS for how long; TESSERA_PROGRAM_FEATURES says what may be drawn
// (program.h).
//
// The draw and the shrinker are our own, not rapidcheck's: a try that fails may wait for the ranks'
// timeouts, so shrinking has seconds, not tries, takes out half of the operations at a time and
// then parts of model and layout, and a hang ends with the program's text.
#include <ATen/Parallel.h>

#include <condition_variable>
#include <cstdlib>
#include <iostream>
#include <thread>

#include "proof.h"
#include "property/program_draw.h"
#include "property/program_run.h"
#include "property/program_shrink.h"
#include "support/test.h"

namespace tessera::test::fsdp_programs_test {
namespace {

Features features() {
  const char* value = std::getenv("TESSERA_PROGRAM_FEATURES");
  return Features::parse(value == nullptr ? "" : value);
}

/// Ends the process where ranks wait for each other past every timeout: nothing can free them.
class EndOfHang {
 public:
  explicit EndOfHang(const Program& program)
      : watch_([this, text = program.describe()] {
          std::unique_lock lock(mutex_);
          if (ended_.wait_for(lock, std::chrono::seconds(120), [this] { return over_; })) return;
          std::cerr << "this program hangs:\n" << text << std::flush;
          std::_Exit(1);
        }) {}
  ~EndOfHang() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    ended_.notify_all();
    watch_.join();
  }
  EndOfHang(const EndOfHang&) = delete;
  EndOfHang& operator=(const EndOfHang&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  bool over_ = false;
  std::thread watch_;
};

std::string watched_failure_of(const Program& program) {
  const EndOfHang watch(program);
  return failure_of(program);
}

bool holds(std::uint64_t seed) {
  const auto program = Program::draw(seed, features());
  const auto failure = watched_failure_of(program);
  if (failure.empty()) return true;
  std::cerr << "replay with TESSERA_PROGRAM_SEED=" << seed << " TESSERA_PROGRAM_FEATURES=all"
            << (features().text().empty() ? "" : ",") << features().text();
  std::cerr << "\n" << failure << program.describe() << std::flush;
  const auto seconds = environment_number("TESSERA_PROGRAM_SHRINK_SECONDS", 60);
  if (seconds > 0) {
    const auto fails = [](const Program& one) { return !watched_failure_of(one).empty(); };
    const auto smallest = ProgramShrink(program, fails, std::chrono::seconds(seconds)).smallest();
    std::cerr << "the smallest that fails:\n"
              << watched_failure_of(smallest) << smallest.describe() << std::flush;
  }
  ADD_FAILURE() << "program " << seed << ": " << failure;
  return false;
}

TEST(FsdpPrograms, AreRightOrRefusedByNameOnAllRanks) {
  if (const auto replayed = environment_number("TESSERA_PROGRAM_SEED", 0); replayed != 0) {
    std::cerr << Program::draw(replayed, features()).describe();
    holds(replayed);
    return;
  }
  const auto from = environment_number("TESSERA_PROGRAM_FROM", 1);
  const auto seconds = environment_number("TESSERA_PROGRAM_SECONDS", 0);
  const auto count = environment_number("TESSERA_PROGRAM_COUNT", seconds > 0 ? ~0ULL - from : 40);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  const auto failures = environment_number("TESSERA_PROGRAM_FAILURES", 3);
  std::uint64_t failed = 0;
  auto seed = from;
  for (; seed < from + count && failed < failures; ++seed) {
    if (seconds > 0 && std::chrono::steady_clock::now() > until) break;
    failed += holds(seed) ? 0 : 1;
  }
  std::cerr << "programs: seeds " << from << " to " << seed - 1 << ", " << failed << " failed\n";
}

// Gradients of 30 that a bf16 wire has rounded, zero_grad(), then steps of gradients a thousandth
// as large: the momentum's error is still that of the first.
TEST(FsdpPrograms, WhatAMomentumKeepsOfEarlierGradientsIsNoError) {
  if (environment_number("TESSERA_PROGRAM_SEED", 0) == 0) holds(770444);
}

}  // namespace
}  // namespace tessera::test::fsdp_programs_test
