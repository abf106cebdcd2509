// Random valid schedules: stages on ranks in any way, B or I and W, F paired with B, in the order
// of micro-batches or in any.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "pipeline/schedule.h"

namespace tessera::testing {

/// The same numbers from the same seed on every system: the library's distributions are not.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : engine_(seed) {}
  /// 0 .. sides - 1.
  int roll(int sides) { return static_cast<int>(engine_() % static_cast<std::uint64_t>(sides)); }
  bool chance(int percent) { return roll(100) < percent; }
  template <class Item>
  const Item& pick(const std::vector<Item>& items) {
    return items.at(static_cast<std::size_t>(roll(static_cast<int>(items.size()))));
  }

 private:
  std::mt19937_64 engine_;
};

enum class MicroBatchOrder : std::uint8_t { kKept, kAny };

/// Draws a whole run of the pipeline, one slot after the other on any rank that can continue, and
/// notes for each rank what it did: valid because it happened.
class ScheduleDraw {
 public:
  ScheduleDraw(Dice& dice, MicroBatchOrder order) : dice_(dice), order_(order) {
    schedule_.slots.resize(static_cast<std::size_t>(1 + dice.roll(4)));
    const int stages = schedule_.ranks() * (1 + dice.roll(3));
    schedule_.micro_batches = 1 + dice.roll(6);
    for (int stage = 0; stage < stages; ++stage) {
      // Every rank has one, the others lie anywhere.
      schedule_.rank_of.push_back(stage < schedule_.ranks() ? stage : dice.roll(schedule_.ranks()));
    }
    for (std::size_t i = schedule_.rank_of.size(); i > 1; --i) {
      std::swap(schedule_.rank_of[i - 1],
                schedule_.rank_of[static_cast<std::size_t>(dice.roll(static_cast<int>(i)))]);
    }
    const auto cells = static_cast<std::size_t>(stages * schedule_.micro_batches);
    cells_.resize(cells);
    const int halves = dice.roll(3) * 50;  // never, sometimes, always
    for (Cell& cell : cells_) cell.in_halves = dice.chance(halves);
    pair_percent_ = dice.roll(3) * 40;
  }

  pipeline::Schedule draw() {
    for (;;) {
      std::vector<std::vector<pipeline::Action>> ready;
      for (int rank = 0; rank < schedule_.ranks(); ++rank) {
        auto actions = ready_on(rank);
        if (!actions.empty()) ready.push_back(std::move(actions));
      }
      if (ready.empty()) return schedule_;
      run(dice_.pick(ready));
    }
  }

 private:
  using Kind = pipeline::ActionKind;
  struct Cell {
    bool in_halves = false;
    bool forward = false;
    bool input = false;
    bool weight = false;
  };

  Cell& cell(int stage, int micro_batch) {
    return cells_.at(static_cast<std::size_t>(stage * schedule_.micro_batches + micro_batch));
  }

  std::vector<pipeline::Action> ready_on(int rank) {
    std::vector<pipeline::Action> actions;
    for (const int stage : schedule_.stages_of(rank)) {
      for (const Kind kind : {Kind::kForward, Kind::kInputGradient, Kind::kWeightGradient}) {
        for (int k = 0; k < schedule_.micro_batches; ++k) {
          Cell& here = cell(stage, k);
          bool& done = kind == Kind::kForward         ? here.forward
                       : kind == Kind::kInputGradient ? here.input
                                                      : here.weight;
          if (done) continue;
          if (is_ready(kind, stage, k)) {
            const bool whole = kind == Kind::kInputGradient && !here.in_halves;
            actions.push_back({whole ? Kind::kBackward : kind, stage, k});
          }
          if (order_ == MicroBatchOrder::kKept) break;
        }
      }
    }
    return actions;
  }

  bool is_ready(Kind kind, int stage, int k) {
    const Cell& here = cell(stage, k);
    if (kind == Kind::kForward) return stage == 0 || cell(stage - 1, k).forward;
    if (kind == Kind::kWeightGradient) return here.input;
    const bool last = stage + 1 == schedule_.stages();
    if (!here.forward || (!last && !cell(stage + 1, k).input)) return false;
    if (here.in_halves || order_ == MicroBatchOrder::kAny) return true;
    // A B is a W, too: those before it come first.
    for (int before = 0; before < k; ++before) {
      if (!cell(stage, before).weight) return false;
    }
    return true;
  }

  void run(const std::vector<pipeline::Action>& ready) {
    pipeline::Slot slot{dice_.pick(ready), {}};
    std::vector<pipeline::Action> backwards;
    std::ranges::copy_if(ready, std::back_inserter(backwards),
                         [](const auto& action) { return action.kind == Kind::kBackward; });
    if (slot.action.kind == Kind::kForward && !backwards.empty() && dice_.chance(pair_percent_)) {
      slot.paired = dice_.pick(backwards);
    }
    slot.each([&](const pipeline::Action& action) {
      Cell& here = cell(action.stage, action.micro_batch);
      if (action.kind == Kind::kForward) here.forward = true;
      if (action.gives_input_gradient()) here.input = true;
      if (action.kind == Kind::kWeightGradient || action.kind == Kind::kBackward) {
        here.weight = true;
      }
    });
    const int rank = schedule_.rank_of[static_cast<std::size_t>(slot.action.stage)];
    schedule_.slots[static_cast<std::size_t>(rank)].push_back(slot);
  }

  Dice& dice_;
  MicroBatchOrder order_;
  pipeline::Schedule schedule_;
  std::vector<Cell> cells_;
  int pair_percent_ = 0;
};

inline pipeline::Schedule random_schedule(Dice& dice,
                                          MicroBatchOrder order = MicroBatchOrder::kKept) {
  return ScheduleDraw(dice, order).draw();
}

}  // namespace tessera::testing
