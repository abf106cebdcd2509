#include "pipeline/simulate.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "pipeline/validate.h"
#include "tessera/error.h"

namespace tessera::pipeline {
namespace {

void check_costs(const Costs& costs, std::size_t stages) {
  TESSERA_CHECK(costs.size() == stages, ErrorKind::kUsage, "simulate: found the costs of ",
                costs.size(), " stages, expected those of ", stages);
  for (std::size_t stage = 0; stage < costs.size(); ++stage) {
    const StageCosts& one = costs[stage];
    for (const double cost : {one.forward, one.input_gradient, one.weight_gradient,
                              one.of_backward(), one.paired.value_or(0.0), one.send_forward,
                              one.send_backward, one.live_bytes, one.deferred_bytes}) {
      TESSERA_CHECK(std::isfinite(cost) && cost >= 0.0, ErrorKind::kUsage,
                    "simulate: found a cost of ", cost, " (stage ", stage,
                    "), expected a finite one of at least 0");
    }
  }
}

/// The memory that a rank holds while its list runs.
class Memory {
 public:
  explicit Memory(const Costs& costs) : costs_(costs) {}

  void take(const Slot& slot) {
    slot.each([&](const Action& action) {
      if (action.kind == ActionKind::kForward) live_ += of(action).live_bytes;
    });
    peak_ = std::max(peak_, live_ + deferred_);
    slot.each([&](const Action& action) {
      if (action.gives_input_gradient()) live_ -= of(action).live_bytes;
      if (action.kind == ActionKind::kInputGradient) deferred_ += of(action).deferred_bytes;
      if (action.kind == ActionKind::kWeightGradient) deferred_ -= of(action).deferred_bytes;
    });
    peak_ = std::max(peak_, live_ + deferred_);
    peak_deferred_ = std::max(peak_deferred_, deferred_);
  }

  double peak() const { return peak_; }
  double peak_deferred() const { return peak_deferred_; }

 private:
  const StageCosts& of(const Action& action) const {
    return costs_[static_cast<std::size_t>(action.stage)];
  }

  const Costs& costs_;
  double live_ = 0.0;
  double deferred_ = 0.0;
  double peak_ = 0.0;
  double peak_deferred_ = 0.0;
};

double exchange_time(const Pieces& pieces) {
  double time = 0.0;
  for (const Piece& piece : pieces) time += piece.exchange;
  return time;
}

double cost_of(const Action& action, const StageCosts& stage) {
  switch (action.kind) {
    case ActionKind::kForward:
      return stage.forward;
    case ActionKind::kInputGradient:
      return stage.input_gradient;
    case ActionKind::kWeightGradient:
      return stage.weight_gradient;
    case ActionKind::kBackward:
      return stage.of_backward();
  }
  return 0.0;
}

double exchanges_of(const Action& action, const StageCosts& stage) {
  if (action.kind == ActionKind::kForward) return exchange_time(stage.forward_pieces);
  return action.gives_input_gradient() ? exchange_time(stage.backward_pieces) : 0.0;
}

class Simulation {
 public:
  Simulation(const Program& program, const Costs& costs)
      : program_(program),
        costs_(costs),
        next_(program.steps.size()),
        now_(program.steps.size()),
        hand_overs_(2 * program.rank_of.size() *
                    static_cast<std::size_t>(std::max(program.micro_batches, 0))) {
    simulated_.ranks.resize(program.steps.size());
  }

  Simulated run() {
    // A rank is looked at again when something is sent to it, not in rounds over all.
    for (std::size_t rank = next_.size(); rank > 0; --rank) woken_.push_back(rank - 1);
    while (!woken_.empty()) {
      const std::size_t rank = woken_.back();
      woken_.pop_back();
      while (next_[rank] < program_.steps[rank].size() && take(rank)) {
      }
    }
    for (std::size_t rank = 0; rank < next_.size(); ++rank) {
      TESSERA_CHECK(next_[rank] == program_.steps[rank].size(), ErrorKind::kUsage,
                    "simulate: found rank ", rank, " waiting for ever before ",
                    to_string(program_.steps[rank][next_[rank]]), ", expected a valid schedule");
      simulated_.makespan = std::max(simulated_.makespan, now_[rank]);
    }
    finish();
    return std::move(simulated_);
  }

 private:
  int stages() const { return static_cast<int>(program_.rank_of.size()); }
  const StageCosts& of(int stage) const { return costs_[static_cast<std::size_t>(stage)]; }

  const SlotTime& time_of(const Slot& slot) {
    const auto [place, is_new] = times_.try_emplace(
        {slot.action.kind, slot.action.stage, slot.paired ? slot.paired->stage : -1});
    if (is_new) place->second = pipeline::time_of(slot, costs_);
    return place->second;
  }

  /// False: what the next step needs has not been made yet.
  bool take(std::size_t rank) {
    const Step& step = program_.steps[rank][next_[rank]];
    if (const auto* transfer = std::get_if<Transfer>(&step)) {
      const bool sends = transfer->end == Transfer::End::kSend;
      HandOverTimes& times = times_of(transfer->what);
      (sends ? times.sent : times.posted) = now_[rank];
      if (sends) wake_taker(transfer->what);
    }
    if (const auto* slot = std::get_if<Slot>(&step); slot != nullptr && !take(rank, *slot)) {
      return false;
    }
    ++next_[rank];
    return true;
  }

  bool take(std::size_t rank, const Slot& slot) {
    double begin = now_[rank];
    bool is_there = true;
    slot.each([&](const Action& action) {
      const auto need = needed_by(action, stages());
      if (!need) return;
      const auto arrived = arrival_of(*need);
      is_there = is_there && arrived;
      begin = std::max(begin, arrived.value_or(begin));
    });
    if (!is_there) return false;
    const SlotTime& time = time_of(slot);
    now_[rank] = begin + time.all;
    SimulatedRank& result = simulated_.ranks[rank];
    result.busy += time.all;
    result.exposed_exchange += time.exposed;
    result.hidden_exchange += time.hidden;
    result.slots.push_back({begin, now_[rank]});
    slot.each([&](const Action& action) {
      if (const auto given = given_by(action, stages())) times_of(*given).made = now_[rank];
    });
    return true;
  }

  /// When what one stage hands to the next was made, and travelled.
  struct HandOverTimes {
    std::optional<double> made;
    std::optional<double> sent;
    std::optional<double> posted;
    std::optional<double> arrived;
  };

  /// In the order of what they are of.
  HandOverTimes& times_of(const HandOver& what) {
    const std::size_t direction =
        what.direction == Direction::kForward ? 0 : program_.rank_of.size();
    return hand_overs_.at((direction + static_cast<std::size_t>(what.from)) *
                              static_cast<std::size_t>(program_.micro_batches) +
                          static_cast<std::size_t>(what.micro_batch));
  }

  void wake_taker(const HandOver& what) {
    const int taker = program_.rank_of.at(static_cast<std::size_t>(what.to()));
    if (taker >= 0) woken_.push_back(static_cast<std::size_t>(taker));
  }

  std::optional<double> arrival_of(const HandOver& what) {
    HandOverTimes& times = times_of(what);
    if (!times.made || !times.posted) return times.made;  // without a receive: within the rank
    if (!times.sent) return std::nullopt;
    const StageCosts& sender = of(what.from);
    times.arrived =
        std::max(*times.sent, *times.posted) +
        (what.direction == Direction::kForward ? sender.send_forward : sender.send_backward);
    return times.arrived;
  }

  void finish() {
    std::vector<std::vector<std::pair<double, int>>> changes(next_.size());  // of open sends
    const auto micro_batches = static_cast<std::size_t>(program_.micro_batches);
    for (std::size_t i = 0; i < hand_overs_.size(); ++i) {
      const HandOverTimes& times = hand_overs_[i];
      if (!times.arrived) continue;
      const std::size_t row = i / micro_batches;
      const HandOver what{
          row < program_.rank_of.size() ? Direction::kForward : Direction::kBackward,
          static_cast<int>(row % program_.rank_of.size()), static_cast<int>(i % micro_batches)};
      const SimulatedMessage message{what, *times.sent, *times.posted, *times.arrived};
      simulated_.messages.push_back(message);
      auto& of_sender =
          changes[static_cast<std::size_t>(program_.rank_of[static_cast<std::size_t>(what.from)])];
      if (message.arrived == message.sent) continue;
      of_sender.emplace_back(message.sent, 1);
      of_sender.emplace_back(message.arrived, -1);
    }
    const std::vector<int> chunks = peak_live_chunks(schedule_of(program_));
    for (std::size_t rank = 0; rank < next_.size(); ++rank) {
      SimulatedRank& result = simulated_.ranks[rank];
      result.idle = simulated_.makespan - result.busy;
      result.peak_live_chunks = chunks[rank];
      Memory memory(costs_);
      for (const Step& step : program_.steps[rank]) {
        if (const auto* slot = std::get_if<Slot>(&step)) memory.take(*slot);
      }
      result.peak_bytes = memory.peak();
      result.peak_deferred_bytes = memory.peak_deferred();
      std::ranges::sort(changes[rank]);
      int open = 0;
      for (const auto& [time, change] : changes[rank]) {
        result.most_open_sends = std::max(result.most_open_sends, open += change);
      }
    }
  }

  const Program& program_;
  const Costs& costs_;
  Simulated simulated_;
  std::map<std::tuple<ActionKind, int, int>, SlotTime>
      times_;                       ///< by kind and stage, and stage of B
  std::vector<std::size_t> woken_;  ///< ranks to look at
  std::vector<std::size_t> next_;   ///< step of each rank
  std::vector<double> now_;         ///< its clock
  std::vector<HandOverTimes> hand_overs_;
};

}  // namespace

StageCosts with_exchanges(const StageCosts& computing, const Exchanges& exchanges) {
  std::vector<double> forward;
  std::vector<double> backward;
  for (int layer = 0; layer < exchanges.layers; ++layer) {
    forward.insert(forward.end(), static_cast<std::size_t>(exchanges.forward), exchanges.cost);
    backward.insert(backward.end(), static_cast<std::size_t>(exchanges.backward), exchanges.cost);
    if (exchanges.backward > 0) backward.push_back(0.0);
  }
  StageCosts costs = computing;
  costs.forward_pieces = equal_pieces(computing.forward, forward);
  costs.backward_pieces = equal_pieces(computing.of_backward(), backward);
  const double in_backward = exchange_time(costs.backward_pieces);
  costs.forward += exchange_time(costs.forward_pieces);
  costs.input_gradient += in_backward;
  if (costs.backward) *costs.backward += in_backward;
  return costs;
}

SlotTime time_of(const Slot& slot, const Costs& costs) {
  const auto of = [&](const Action& action) -> const StageCosts& {
    return costs.at(static_cast<std::size_t>(action.stage));
  };
  SlotTime time;
  slot.each([&](const Action& action) {
    time.all += cost_of(action, of(action));
    time.exposed += exchanges_of(action, of(action));
  });
  if (!slot.paired) return time;
  const StageCosts& forward = of(slot.action);
  const StageCosts& backward = of(*slot.paired);
  if (forward.paired) {
    const double exposed =
        std::clamp(*forward.paired - (time.all - time.exposed), 0.0, time.exposed);
    return {*forward.paired, exposed, time.exposed - exposed};
  }
  if (forward.forward_pieces.empty() || backward.backward_pieces.empty()) return time;
  const Interleaved pair = interleave(forward.forward_pieces, backward.backward_pieces);
  return {pair.time, pair.exposed, pair.hidden};
}

Simulated simulate(const Program& program, const Costs& costs) {
  check_costs(costs, program.rank_of.size());
  return Simulation(program, costs).run();
}

Simulated simulate(const Schedule& schedule, const Costs& costs) {
  return simulate(lower(schedule), costs);
}

}  // namespace tessera::pipeline
