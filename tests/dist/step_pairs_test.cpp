// Pairs of a step scope: a forward paired with a backward has the bits of one after the other, and
// an error at any turn of either ends the step on every rank and leaves nothing behind.
#include <random>

#include "base/mutex.h"
#include "base/test_hooks.h"
#include "dist/paired.h"
#include "proof.h"
#include "support/ranks.h"
#include "support/test.h"

namespace tessera::test::step_pairs_test {
namespace {

using How = PairedStep::How;

// --- drawn programs ---

struct Program {
  DrawnStages stages;
  std::vector<PairedSlot> slots;
  StepScopeOptions options;
  bool in_bf16 = false;
  int among = 0;  ///< ranks of an exchange, 0: all
  std::string text;
};

DrawnPiece drawn_piece(std::mt19937_64& random) {
  DrawnPiece piece;
  const auto count = random() % 10;
  for (std::uint64_t i = 0; i < count; ++i) piece.exchanges.push_back(random() % 5);
  constexpr RecomputeMode kModes[] = {RecomputeMode::kNone, RecomputeMode::kSelective,
                                      RecomputeMode::kFull};
  piece.mode = kModes[random() % 3];
  piece.is_around = piece.mode == RecomputeMode::kFull && random() % 2 == 0;
  piece.uses_twice = random() % 2 == 0;
  return piece;
}

Program drawn_program(std::uint64_t seed, int ranks) {
  std::mt19937_64 random(seed);
  Program program;
  auto& stages = program.stages;
  const int count = 1 + static_cast<int>(random() % 2);
  for (int stage = 0; stage < count; ++stage) {
    auto& own = stages.stages.emplace_back();
    const auto pieces = 1 + random() % 2;
    for (std::uint64_t i = 0; i < pieces; ++i) {
      own.push_back(static_cast<int>(stages.pieces.size()));
      stages.pieces.push_back(drawn_piece(random));
    }
    stages.before.push_back(random() % 3);
    stages.after.push_back(random() % 3);
  }
  if (count == 2 && random() % 2 == 0) stages.stages[1].push_back(0);
  stages.ties = random() % 2 == 0;
  if (random() % 3 == 0) stages.stages[0].push_back(0);  // called twice by one forward
  const int micro_batches = 3 + static_cast<int>(random() % 2);
  program.slots = drawn_slots(random, count, micro_batches);
  program.options.reshard = random() % 2 == 0 ? StepReshard::kStep : StepReshard::kMicroBatch;
  program.options.sync_every_micro_batch = random() % 4 == 0;
  program.options.schedule = "drawn";
  program.in_bf16 = random() % 3 == 0;
  program.among = ranks == 4 && random() % 2 == 0 ? 2 : 0;
  program.text = concat("seed ", seed, ", ", ranks, " ranks: ", to_string(program.slots));
  for (const auto& piece : stages.pieces) {
    program.text +=
        concat("[", piece.exchanges.size(), " exchanges, ", "mode ", static_cast<int>(piece.mode),
               piece.is_around ? " around" : "", piece.uses_twice ? " twice]" : "]");
  }
  return program;
}

PrecisionPolicy policy_of(const Program& program) {
  return program.in_bf16 ? in_bfloat16() : PrecisionPolicy{};
}

/// Holds some exchanges up, others not.
std::function<std::chrono::microseconds(const std::string&)> drawn_delays(std::uint64_t seed) {
  const auto count = std::make_shared<std::atomic<std::uint64_t>>(seed);
  return [count](const std::string&) {
    std::mt19937_64 random(++*count);
    return std::chrono::microseconds(random() % 4 == 0 ? random() % 300 : 0);
  };
}

void expect_same_and_finite(const Tensors& found, const Tensors& expected,
                            const std::string& what) {
  expect_same(found, expected, what);
  for (const auto& [name, value] : expected) {
    EXPECT_TRUE(value.isfinite().all().item<bool>()) << name;
  }
}

/// Steps of `model` as pairs and of `other` in turn.
void expect_same_steps(World& world, const Program& program, PairedModel& model, PairedModel& other,
                       int first, int count) {
  for (int step = first; step < first + count; ++step) {
    model.sites().restart();
    const auto found = run_slots(world, model, program.slots, How::kAsPairs, program.options, step);
    expect_same_and_finite(
        found, run_slots(world, other, program.slots, How::kInTurn, program.options, step),
        concat(program.text, ", step ", step));
    int came_by = 0;
    for (const int each : model.sites().counts()) came_by += each;
    const bool has_pairs = std::ranges::any_of(
        program.slots, [](const PairedSlot& slot) { return slot.forward.has_value(); });
    // The first step after the beginning, or after a failure, records.
    EXPECT_EQ(came_by > 0, has_pairs && step > first) << program.text << ", step " << step;
    EXPECT_EQ(model.sites().alive, 0);
  }
}

std::uint64_t programs_in_all(std::uint64_t few) { return full_proof() ? 40 * few : few; }

// Naive: a pass that reads what the other one gathered, recomputes, adds or draws.
TEST(StepPairs, ProgramsHaveTheBitsOfOneAfterTheOther) {
  for (const int count : {1, 2, 4}) {
    for (std::uint64_t seed = 0; seed < programs_in_all(9); ++seed) {
      const auto program = drawn_program(100 * static_cast<std::uint64_t>(count) + seed, count);
      const test_hooks::Set delays(test_hooks::exchange_delay, drawn_delays(seed));
      ranks(count).run([&](World& world) {
        PairedModel model(world, program.stages, policy_of(program), program.among);
        PairedModel other(world, program.stages, policy_of(program), program.among);
        expect_same_steps(world, program, model, other, 0, 3);
      });
    }
  }
}

// --- errors at drawn turns ---

struct Fault {
  FaultSite site = FaultSite::kCount;
  int at = 0;
};

/// One of the times that a rank has come by a site in a step before: of the kind `first`, or the
/// next one that it came by.
Fault drawn_fault(const FaultSites::Counts& counts, std::size_t first, std::mt19937_64& random) {
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const auto site = (first + i) % counts.size();
    if (counts.at(site) == 0) continue;
    return {static_cast<FaultSite>(site),
            1 + static_cast<int>(random() % static_cast<std::uint64_t>(counts.at(site)))};
  }
  return {};
}

// Naive: the suspended pass stays for good, with its graph; or the other ranks wait for this one.
TEST(StepPairs, AnErrorAtAnyTurnEndsTheStepEverywhereAndTheNextOneIsRight) {
  std::map<FaultSite, int> tried;
  base::Mutex mutex;
  for (const int count : {1, 2, 4}) {
    for (std::uint64_t seed = 0; seed < programs_in_all(8); ++seed) {
      const auto program = drawn_program(1000 * static_cast<std::uint64_t>(count) + seed, count);
      std::mt19937_64 drawn(seed);
      const int culprit = static_cast<int>(drawn() % static_cast<std::uint64_t>(count));
      RankBarrier meeting(count);
      ranks(count).run([&](World& world) {
        RankBarrier::Seat seat(meeting);
        PairedModel model(world, program.stages, policy_of(program), program.among);
        PairedModel other(world, program.stages, policy_of(program), program.among);
        expect_same_steps(world, program, model, other, 0, 2);
        auto random = drawn;
        model.sites().restart();
        run_slots(world, model, program.slots, How::kAsPairs, program.options, 2);
        const auto fault = drawn_fault(model.sites().counts(), seed, random);
        if (fault.at == 0) return;
        if (world.rank() == culprit) {
          const base::Lock lock(mutex);
          ++tried[fault.site];
          model.sites().restart(fault.site, fault.at,
                                [] { throw std::runtime_error("planted fault"); });
        }
        std::string error;
        EXPECT_LT(seconds_of([&] {
                    error = thrown_by([&] {
                      run_slots(world, model, program.slots, How::kAsPairs, program.options, 2);
                    });
                  }),
                  10);
        // An exception of a forward or backward through a unit ends the others by the unit's name.
        EXPECT_THAT(error, AnyOf(Says("planted fault"),
                                 Says(concat("rank ", culprit, ": an exception left"))))
            << program.text << ", rank " << world.rank() << ", site "
            << static_cast<int>(fault.site) << ", " << fault.at;
        // Autograd's queue of this thread keeps what was ready and did not run until the next one;
        // other ranks keep what this one sent them.
        backward(squares(here(at::ones({1})).requires_grad_()));
        seat.wait();
        EXPECT_EQ(model.sites().alive, 0) << program.text;
        world.recover();
        for (auto* each : {&model, &other}) each->handle.zero_grad();
        expect_same_steps(world, program, model, other, 2, 2);
      });
    }
  }
  for (const auto site :
       {FaultSite::kInUnit, FaultSite::kOutside, FaultSite::kNode, FaultSite::kRecomputed}) {
    EXPECT_GT(tried[site], 0) << static_cast<int>(site);
  }
}

}  // namespace
}  // namespace tessera::test::step_pairs_test
