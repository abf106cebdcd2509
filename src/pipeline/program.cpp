#include "pipeline/program.h"

#include <algorithm>
#include <map>
#include <optional>

#include "tessera/error.h"

namespace tessera::pipeline {
namespace {

/// First and last slots of a stage on its rank, where it has them.
struct Uses {
  std::optional<std::size_t> first_forward;
  std::optional<std::size_t> last_gradient;  ///< I or B
  std::optional<std::size_t> last_weight;    ///< W or B
};

std::map<int, Uses> uses_of(const std::vector<Slot>& slots) {
  std::map<int, Uses> uses;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    slots[i].each([&](const Action& action) {
      Uses& of_stage = uses[action.stage];
      if (action.kind == ActionKind::kForward) {
        if (!of_stage.first_forward) of_stage.first_forward = i;
        return;
      }
      if (action.gives_input_gradient()) of_stage.last_gradient = i;
      if (action.kind != ActionKind::kInputGradient) of_stage.last_weight = i;
    });
  }
  return uses;
}

/// When the stages of a rank move.
class Moves {
 public:
  explicit Moves(const std::vector<Slot>& slots) {
    for (const auto& [stage, uses] : uses_of(slots)) {
      if (uses.first_forward) unshards_[*uses.first_forward].push_back(stage);
      if (uses.last_gradient) reshards_[*uses.last_gradient].push_back(stage);
      if (uses.last_weight) reduces_[*uses.last_weight].push_back(stage);
    }
  }

  void before(std::size_t slot, std::vector<Step>& steps) const {
    append(slot, Residency::Move::kUnshard, unshards_, steps);
  }
  void after(std::size_t slot, std::vector<Step>& steps) const {
    append(slot, Residency::Move::kReshard, reshards_, steps);
    append(slot, Residency::Move::kReduce, reduces_, steps);
  }

 private:
  /// Stages, ascending, by the slot at which they move: a rank may hold thousands.
  using StagesBySlot = std::map<std::size_t, std::vector<int>>;

  static void append(std::size_t slot, Residency::Move move, const StagesBySlot& when,
                     std::vector<Step>& steps) {
    const auto found = when.find(slot);
    if (found == when.end()) return;
    for (const int stage : found->second) steps.emplace_back(Residency{move, stage});
  }

  StagesBySlot unshards_;
  StagesBySlot reshards_;
  StagesBySlot reduces_;
};

class RankProgram {
 public:
  RankProgram(const Schedule& schedule, const std::vector<Slot>& slots)
      : schedule_(schedule), slots_(slots) {}

  std::vector<Step> lower(std::size_t receives_ahead) {
    const Moves moves(slots_);
    std::size_t posted = 0;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      moves.before(i, steps_);
      for (; posted < slots_.size() && posted <= i + receives_ahead; ++posted) {
        transfers(slots_[posted], Transfer::End::kReceive);
      }
      steps_.emplace_back(slots_[i]);
      transfers(slots_[i], Transfer::End::kSend);
      moves.after(i, steps_);
    }
    return std::move(steps_);
  }

 private:
  void transfers(const Slot& slot, Transfer::End end) {
    slot.each([&](const Action& action) {
      const auto what = end == Transfer::End::kSend ? given_by(action, schedule_.stages())
                                                    : needed_by(action, schedule_.stages());
      if (what && is_message(*what, schedule_)) steps_.emplace_back(Transfer{end, *what});
    });
  }

  const Schedule& schedule_;
  const std::vector<Slot>& slots_;
  std::vector<Step> steps_;
};

/// Moves stand before their slots, and behind what is sent when these end.
std::vector<Step> with_moves(const std::vector<Step>& steps, const Moves& moves) {
  std::vector<Step> result;
  std::size_t slots = 0;
  std::size_t moved = 0;  // slots after which stages have
  for (const Step& step : steps) {
    if (std::holds_alternative<Residency>(step)) continue;
    const auto* transfer = std::get_if<Transfer>(&step);
    const bool is_send = transfer != nullptr && transfer->end == Transfer::End::kSend;
    for (; !is_send && moved < slots; ++moved) moves.after(moved, result);
    if (std::holds_alternative<Slot>(step)) moves.before(slots++, result);
    result.push_back(step);
  }
  for (; moved < slots; ++moved) moves.after(moved, result);
  return result;
}

struct StepText {
  std::string operator()(const Slot& slot) const {
    return slot.paired ? to_string(slot) + "OVERLAP_F_B" : to_string(slot);
  }
  std::string operator()(const Transfer& transfer) const {
    return concat(transfer.stage(), transfer.end == Transfer::End::kSend ? "SEND_" : "RECV_",
                  transfer.what.direction == Direction::kForward ? 'F' : 'B',
                  transfer.what.micro_batch);
  }
  std::string operator()(const Residency& residency) const {
    switch (residency.move) {
      case Residency::Move::kUnshard:
        return concat(residency.stage, "UNSHARD");
      case Residency::Move::kReshard:
        return concat(residency.stage, "RESHARD");
      case Residency::Move::kReduce:
        return concat(residency.stage, "REDUCE_GRAD");
    }
    return "unknown";
  }
};

}  // namespace

std::string to_string(const Step& step) { return std::visit(StepText{}, step); }

std::optional<Transfer> parse_transfer(std::string_view text) {
  struct Word {
    std::string_view text;
    Transfer::End end;
    Direction direction;
  };
  static constexpr Word kWords[] = {
      {"SEND_F", Transfer::End::kSend, Direction::kForward},
      {"SEND_B", Transfer::End::kSend, Direction::kBackward},
      {"RECV_F", Transfer::End::kReceive, Direction::kForward},
      {"RECV_B", Transfer::End::kReceive, Direction::kBackward},
  };
  for (const Word& word : kWords) {
    const auto at = text.find(word.text);
    if (at == std::string_view::npos) continue;
    // The two numbers are bounded as those of an action.
    const auto numbers =
        parse_action(concat(text.substr(0, at), 'F', text.substr(at + word.text.size())));
    if (!numbers) return std::nullopt;
    const bool upwards = word.direction == Direction::kForward;
    const bool sends = word.end == Transfer::End::kSend;
    const int from = sends ? numbers->stage : numbers->stage + (upwards ? -1 : 1);
    const HandOver what{word.direction, from, numbers->micro_batch};
    if (what.from < 0 || what.to() < 0) return std::nullopt;  // no stage is before stage 0
    return Transfer{word.end, what};
  }
  return std::nullopt;
}

Program lower(const Schedule& schedule, int receives_ahead) {
  TESSERA_INVARIANT(receives_ahead >= 0, "receives cannot be posted after the slot needs them");
  Program program{schedule.micro_batches, schedule.rank_of, {}};
  for (const auto& slots : schedule.slots) {
    program.steps.push_back(
        RankProgram(schedule, slots).lower(static_cast<std::size_t>(receives_ahead)));
  }
  return program;
}

Program with_moves(const Program& program) {
  const Schedule schedule = schedule_of(program);
  Program result{program.micro_batches, program.rank_of, {}};
  for (std::size_t rank = 0; rank < program.steps.size(); ++rank) {
    result.steps.push_back(with_moves(program.steps[rank], Moves(schedule.slots[rank])));
  }
  return result;
}

Schedule schedule_of(const Program& program) {
  Schedule schedule{program.micro_batches, program.rank_of, {}};
  for (const auto& steps : program.steps) {
    auto& slots = schedule.slots.emplace_back();
    for (const Step& step : steps) {
      if (const auto* slot = std::get_if<Slot>(&step)) slots.push_back(*slot);
    }
  }
  return schedule;
}

}  // namespace tessera::pipeline
