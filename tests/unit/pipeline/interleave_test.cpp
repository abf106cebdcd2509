// A forward and a backward in turn: the order, the time against a clock that ticks, and the figures
// of a pair whose exchanges are known.
#include "pipeline/interleave.h"

#include <limits>

#include "pipeline/kinds.h"
#include "pipeline/simulate.h"
#include "support/test.h"
#include "unit/pipeline/random_schedule.h"

namespace tessera::pipeline::interleave_test {
namespace {

using testing::Dice;

/// Whole numbers, some of them 0.
Pieces drawn(Dice& dice, int most) {
  Pieces pieces(static_cast<std::size_t>(dice.roll(most + 1)));
  for (Piece& piece : pieces) {
    piece.compute = dice.roll(6);
    piece.exchange = dice.chance(20) ? 0 : dice.roll(9);
  }
  if (!pieces.empty()) pieces.back().exchange = 0;
  return pieces;
}

/// One thread and the network as a clock sees them, tick by tick.
class Ticks {
 public:
  Ticks(const Pieces& forward, const Pieces& backward)
      : sides_{{forward, 0, 0, 0, false}, {backward, 0, 0, 0, false}} {}

  void run() {
    while (!ended(0) || !ended(1)) {
      if (ended(turn_)) turn_ = 1 - turn_;
      step(sides_[turn_]);
    }
  }

  std::vector<Turn> turns;
  int time = 0;
  int waited = 0;

 private:
  struct State {
    const Pieces& pieces;
    std::size_t next;
    int computed;   ///< ticks of the piece
    int under_way;  ///< ticks until the side's exchange has arrived
    bool begun;
  };

  bool ended(std::size_t side) const { return sides_[side].next == sides_[side].pieces.size(); }

  void tick() {
    ++time;
    for (State& side : sides_) side.under_way = std::max(0, side.under_way - 1);
  }

  void step(State& side) {
    const Piece& piece = side.pieces[side.next];
    if (!side.begun && side.under_way > 0) {
      ++waited;
      return tick();
    }
    if (!side.begun) {
      turns.push_back({turn_ == 0 ? Side::kForward : Side::kBackward, side.next});
      side.begun = true;
      side.computed = 0;
    }
    if (side.computed < static_cast<int>(piece.compute)) {
      ++side.computed;
      return tick();
    }
    side.begun = false;
    side.under_way = static_cast<int>(piece.exchange);
    ++side.next;
    turn_ = 1 - turn_;
  }

  State sides_[2];
  std::size_t turn_ = 1;
};

TEST(Interleave, TakesTheTimeOfAClockThatTicks) {
  int with_waits = 0;
  for (std::uint64_t seed = 1; seed <= 3000; ++seed) {
    Dice dice(seed);
    const Pieces forward = drawn(dice, 9);
    const Pieces backward = drawn(dice, 9);
    Ticks ticks(forward, backward);
    ticks.run();
    const Interleaved pair = interleave(forward, backward);
    double exchanges = 0.0;
    double work = 0.0;
    for (const Pieces* pieces : {&forward, &backward}) {
      for (const Piece& piece : *pieces) {
        exchanges += piece.exchange;
        work += piece.compute;
      }
    }
    ASSERT_EQ(pair.turns, ticks.turns) << "seed " << seed;
    ASSERT_EQ(pair.time, ticks.time) << "seed " << seed;
    ASSERT_EQ(pair.exposed, ticks.waited) << "seed " << seed;
    EXPECT_EQ(pair.time, work + pair.exposed);
    EXPECT_EQ(pair.hidden, exchanges - pair.exposed);
    EXPECT_LE(pair.time, time_alone(forward) + time_alone(backward)) << "never worse than in turn";
    EXPECT_GE(pair.time, std::max(time_alone(forward), time_alone(backward)));
    with_waits += ticks.waited > 0 ? 1 : 0;
  }
  EXPECT_GT(with_waits, 1000);
}

TEST(Interleave, OfOneSideIsThatSideAlone) {
  const Pieces pieces = equal_pieces(9, {5, 0});
  for (const Interleaved& alone : {interleave(pieces, {}), interleave({}, pieces)}) {
    EXPECT_EQ(alone.time, 14);
    EXPECT_EQ(alone.exposed, 5);
    EXPECT_EQ(alone.hidden, 0);
  }
  EXPECT_EQ(time_alone(pieces), 14);
  EXPECT_EQ(interleave({}, {}).time, 0);
}

// Each piece once, in order; B begins, and no side has two turns while the other has pieces left.
TEST(Interleave, OrdersByCountsAlone) {
  for (std::size_t forward = 0; forward <= 12; ++forward) {
    for (std::size_t backward = 0; backward <= 12; ++backward) {
      const std::vector<Turn> turns = turns_of(forward, backward);
      std::size_t taken[] = {0, 0};
      for (std::size_t i = 0; i < turns.size(); ++i) {
        auto& of_side = taken[static_cast<std::size_t>(turns[i].side)];
        EXPECT_EQ(turns[i].piece, of_side++);
        if (i == 0 && backward > 0) EXPECT_EQ(turns[i].side, Side::kBackward);
        if (i == 0 || turns[i].side != turns[i - 1].side) continue;
        EXPECT_TRUE(turns[i].side == Side::kForward ? taken[1] == backward : taken[0] == forward);
      }
      EXPECT_EQ(taken[0], forward);
      EXPECT_EQ(taken[1], backward);
    }
  }
}

TEST(Interleave, IsALineOfText) {
  EXPECT_EQ(to_string(turns_of(0, 0)), "");
  EXPECT_EQ(to_string(turns_of(1, 0)), "F1");
  EXPECT_EQ(to_string(turns_of(0, 9)), "B1-9");
  EXPECT_EQ(to_string(turns_of(3, 3)), "B1 F1 B2 F2 B3 F3");
  EXPECT_EQ(to_string(turns_of(2, 1)), "B1 F1 | F2");
  EXPECT_EQ(to_string(turns_of(13, 9)), "B1 F1 B2 F2 ... B9 F9 | F10-13");
  EXPECT_EQ(to_string(turns_of(12, 13)), "B1 F1 B2 F2 ... B12 F12 | B13");
  // Another order of turns is shown as it was.
  EXPECT_EQ(to_string({{Side::kForward, 0}, {Side::kForward, 1}, {Side::kBackward, 0}}),
            "F1-2 | B1");
}

TEST(Interleave, RefusesTimesThatMeanNothing) {
  EXPECT_REFUSED(kUsage, interleave({{-1, 0}}, {}), "found -1 in piece 1 of the forward");
  EXPECT_REFUSED(kUsage, interleave({}, {{1, std::numeric_limits<double>::infinity()}, {1, 0}}),
                 "in piece 1 of the backward");
  EXPECT_REFUSED(kUsage, interleave({}, {{1, 0}, {1, 5}}),
                 "found an exchange of 5 in the last piece of the backward");
}

// ------------------------------------------------------------------------ what a pair is worth
//
// Four layers of 2.5 ms forward, exchanges of 5 ms: three in each layer's forward (counts,
// dispatch, combine), two in its backward, which passes the turn once more, behind the weight
// gradients.

StageCosts stage_of(int layers, int exchanges_of_backward, double input_gradient) {
  const StageCosts computing{
      .forward = 2.5 * layers, .input_gradient = input_gradient, .weight_gradient = 2.5 * layers};
  return with_exchanges(computing, {3, exchanges_of_backward, layers, 5.0});
}

double makespan(Kind kind, const Shape& shape, StageCosts stage) {
  const Schedule schedule = make_schedule(kind, shape);
  return simulate(schedule, Costs(static_cast<std::size_t>(schedule.stages()), stage)).makespan;
}

/// The same with F and B of a pair one after the other.
StageCosts in_turn(StageCosts stage) {
  stage.paired = stage.forward + stage.of_backward();
  return stage;
}

TEST(Interleave, APairOfFourLayersTakesLittleMoreThanItsForward) {
  const StageCosts stage = stage_of(4, 2, 10.0);
  EXPECT_DOUBLE_EQ(stage.forward, 70);
  EXPECT_DOUBLE_EQ(stage.of_backward(), 60);
  const Interleaved pair = interleave(stage.forward_pieces, stage.backward_pieces);
  EXPECT_NEAR(pair.time, 73, 0.5);
  EXPECT_DOUBLE_EQ(pair.exposed, pair.time - 30);
  EXPECT_DOUBLE_EQ(pair.hidden + pair.exposed, 100);
  EXPECT_EQ(to_string(pair.turns), "B1 F1 B2 F2 ... B13 F13");
}

TEST(Interleave, PairsOfOneRankTakeThreeFifthsOfTheTime) {
  const Shape shape{1, 1, 8};
  const StageCosts stage = stage_of(4, 2, 10.0);
  const double alone = makespan(Kind::kPairedOneFOneB, shape, in_turn(stage));
  EXPECT_DOUBLE_EQ(alone, 8 * 130);
  EXPECT_NEAR(makespan(Kind::kPairedOneFOneB, shape, stage) / alone, 0.615, 0.005);
  // With full recomputation a backward has the forward's three exchanges and its time again.
  const StageCosts again = stage_of(4, 5, 20.0);
  const double recomputed = makespan(Kind::kPairedOneFOneB, shape, again) /
                            makespan(Kind::kPairedOneFOneB, shape, in_turn(again));
  EXPECT_NEAR(recomputed, 0.71, 0.015);
}

TEST(Interleave, PairsOfDualPipeVWinAgainstZeroBubbles) {
  for (const int layers : {1, 2, 4}) {
    const StageCosts stage = stage_of(layers, 2, 2.5 * layers);
    const auto share = [&](int micro_batches, Kind other) {
      const Shape shape{2, 2, micro_batches};
      return makespan(Kind::kDualPipeV, shape, stage) / makespan(other, shape, in_turn(stage));
    };
    EXPECT_NEAR(share(4, Kind::kDualPipeV), 0.825, 0.02) << layers;
    EXPECT_NEAR(share(8, Kind::kDualPipeV), 0.715, 0.03) << layers;
    EXPECT_NEAR(share(12, Kind::kDualPipeV), 0.675, 0.03) << layers;
    EXPECT_LT(share(12, Kind::kZeroBubbleV), 0.715) << layers;
  }
}

}  // namespace
}  // namespace tessera::pipeline::interleave_test
