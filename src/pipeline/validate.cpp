#include "pipeline/validate.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::pipeline {
namespace {

/// Where an action stands.
struct Place {
  int rank = 0;
  std::size_t slot = 0;
  auto operator<=>(const Place&) const = default;
};

std::string text_of(const Place& place, const Action& action) {
  return concat("rank ", place.rank, ", slot ", place.slot, " (", to_string(action), ")");
}

// One line stays one that a person reads.
constexpr int kMostRanges = 20;

/// Each action once, on its rank, after what it needs there.
class Lists {
 public:
  Lists(const Schedule& schedule, Passes passes, Validation& validation)
      : schedule_(schedule), passes_(passes), validation_(validation) {}

  void check() {
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      const auto& slots = schedule_.slots[static_cast<std::size_t>(rank)];
      if (slots.empty()) {
        fault(Fault::kMissing, "rank ", rank, ": found no action, expected those of a stage");
      }
      for (std::size_t i = 0; i < slots.size(); ++i) {
        const Slot& slot = slots[i];
        if (slot.paired && (slot.action.kind != ActionKind::kForward ||
                            slot.paired->kind != ActionKind::kBackward)) {
          fault(Fault::kPair, "rank ", rank, ", slot ", i, ": found ", to_string(slot),
                ", expected an F paired with a B");
        }
        slot.each([&](const Action& action) { enter(action, {rank, i}); });
      }
    }
    check_missing();
    for (const auto& [action, place] : places_) check_needs(action, place);
    remark_order();
  }

 private:
  template <class... Parts>
  void fault(Fault fault, const Parts&... parts) {
    validation_.add(fault, parts...);
  }

  void enter(const Action& action, const Place& place) {
    const bool known = action.stage >= 0 && action.stage < schedule_.stages() &&
                       action.micro_batch >= 0 && action.micro_batch < schedule_.micro_batches;
    if (!known) {
      fault(Fault::kUnknown, text_of(place, action), ": expected stages below ", schedule_.stages(),
            " and micro-batches below ", schedule_.micro_batches);
      return;
    }
    if (passes_ == Passes::kForward && action.kind != ActionKind::kForward) {
      fault(Fault::kUnknown, text_of(place, action),
            ": expected F only, as this is a forward alone");
      return;
    }
    const int home = schedule_.rank_of[static_cast<std::size_t>(action.stage)];
    if (home != place.rank) {
      fault(Fault::kPlacement, text_of(place, action), ": expected on rank ", home,
            ", which has the other actions of stage ", action.stage);
    }
    const auto [before, is_new] = places_.try_emplace(action, place);
    if (!is_new) {
      fault(Fault::kRepeated, text_of(place, action), ": expected once, stands in ",
            text_of(before->second, action), ", too");
    }
  }

  std::optional<Place> place_of(ActionKind kind, int stage, int micro_batch) const {
    const auto found = places_.find(Action{kind, stage, micro_batch});
    if (found == places_.end()) return std::nullopt;
    return found->second;
  }

  void check_missing() {
    std::set<int> present;
    for (const auto& [action, place] : places_) present.insert(action.stage);
    for (int stage = 0; stage < schedule_.stages(); ++stage) {
      if (!present.contains(stage)) {
        fault(Fault::kMissing, "stage ", stage, ": found no action, expected those of ",
              schedule_.micro_batches, " micro-batches");
        continue;
      }
      std::vector<int> no_forward;
      std::vector<int> no_backward;
      std::vector<int> no_input;
      std::vector<int> no_weight;
      for (int k = 0; k < schedule_.micro_batches; ++k) {
        const bool whole = place_of(ActionKind::kBackward, stage, k).has_value();
        const bool input = place_of(ActionKind::kInputGradient, stage, k).has_value();
        const bool weight = place_of(ActionKind::kWeightGradient, stage, k).has_value();
        if (!place_of(ActionKind::kForward, stage, k)) no_forward.push_back(k);
        const bool none = !whole && !input && !weight;
        if (none && passes_ == Passes::kForwardAndBackward) no_backward.push_back(k);
        if (input && !weight && !whole) no_weight.push_back(k);
        if (weight && !input && !whole) no_input.push_back(k);
        if (whole && (input || weight)) {
          fault(Fault::kRepeated, "stage ", stage, ", micro-batch ", k,
                ": found a B in addition to ", input ? "I" : "W",
                ", expected B or I and W: its gradients would count twice");
        }
      }
      const auto missing = [&](const std::vector<int>& numbers, std::string_view what) {
        if (numbers.empty()) return;
        fault(Fault::kMissing, "stage ", stage, ": found no ", what, " of micro-batch ",
              ranges_text(numbers, ", ", kMostRanges), ", expected one of each");
      };
      missing(no_forward, "F");
      missing(no_backward, "B, nor I and W,");
      missing(no_input, "I before the W");
      missing(no_weight, "W after the I");
    }
  }

  /// Only what is on the same rank: messages have a check of their own.
  void check_needs(const Action& action, const Place& place) {
    if (action.kind == ActionKind::kWeightGradient) {
      expect_before(action, place,
                    Action{ActionKind::kInputGradient, action.stage, action.micro_batch});
    } else if (action.kind != ActionKind::kForward) {
      expect_before(action, place, Action{ActionKind::kForward, action.stage, action.micro_batch});
    }
    const auto need = needed_by(action, schedule_.stages());
    if (!need) return;
    if (need->direction == Direction::kForward) {
      expect_before(action, place, Action{ActionKind::kForward, need->from, need->micro_batch});
    } else {
      expect_before(action, place,
                    Action{ActionKind::kInputGradient, need->from, need->micro_batch});
      expect_before(action, place, Action{ActionKind::kBackward, need->from, need->micro_batch});
    }
  }

  void expect_before(const Action& action, const Place& place, const Action& needed) {
    const auto found = places_.find(needed);
    if (found == places_.end() || found->second.rank != place.rank) return;
    if (found->second.slot < place.slot) return;
    fault(Fault::kDependency, text_of(place, action), ": expected behind ", to_string(needed),
          ", which stands in slot ", found->second.slot);
  }

  void remark_order() {
    std::map<std::pair<int, bool>, Action> last;  // of (stage, weights)
    for (const auto& slots : schedule_.slots) {
      for (const Slot& slot : slots) {
        slot.each([&](const Action& action) {
          if (action.gives_input_gradient()) follow(last, action, false);
          if (action.kind == ActionKind::kWeightGradient || action.kind == ActionKind::kBackward) {
            follow(last, action, true);
          }
        });
      }
    }
  }

  void follow(std::map<std::pair<int, bool>, Action>& last, const Action& action, bool weights) {
    const auto [before, is_first] = last.try_emplace({action.stage, weights}, action);
    if (is_first) return;
    const bool leaves = action.micro_batch < before->second.micro_batch;
    if (leaves && told_.insert({action.stage, weights}).second) {
      validation_.remarks.push_back(
          concat("stage ", action.stage, ": ", weights ? "weight" : "input",
                 " gradients leave the order of micro-batches: ", to_string(action),
                 " comes after ", to_string(before->second),
                 "; sums may differ in their last bits from those of a run without a pipeline"));
    }
    before->second = action;
  }

  const Schedule& schedule_;
  Passes passes_;
  Validation& validation_;
  std::map<Action, Place> places_;
  std::set<std::pair<int, bool>> told_;  // of remark_order()
};

/// The ends of a message in a program, as steps of their ranks.
struct TransferEnds {
  int sends = 0;
  int receives = 0;
  std::size_t sent = 0;  // steps
  std::size_t posted = 0;
};

/// Each message has one send behind the slot that makes it, one receive before the slot that needs
/// it.
class Messages {
 public:
  Messages(const Program& program, Validation& validation)
      : program_(program),
        stages_(static_cast<int>(program.rank_of.size())),
        validation_(validation) {}

  void check() {
    for (int rank = 0; rank < static_cast<int>(program_.steps.size()); ++rank) {
      const auto& steps = program_.steps[static_cast<std::size_t>(rank)];
      for (std::size_t i = 0; i < steps.size(); ++i) {
        if (const auto* transfer = std::get_if<Transfer>(&steps[i])) enter(*transfer, rank, i);
      }
    }
    for (std::size_t rank = 0; rank < program_.steps.size(); ++rank) {
      const auto& steps = program_.steps[rank];
      for (std::size_t i = 0; i < steps.size(); ++i) {
        const auto* slot = std::get_if<Slot>(&steps[i]);
        if (slot == nullptr) continue;
        slot->each([&](const Action& action) {
          if (const auto given = given_by(action, stages_)) expect_sent(*given, i);
          if (const auto need = needed_by(action, stages_)) expect_posted(*need, i);
        });
      }
    }
    for (const auto& [what, ends] : ends_) {
      if (!made_.contains(what)) fault(to_string(what), ": found a message of what no slot makes");
    }
  }

 private:
  template <class... Parts>
  void fault(const Parts&... parts) {
    validation_.add(Fault::kMessage, parts...);
  }
  int rank_of(int stage) const {
    return stage >= 0 && stage < stages_ ? program_.rank_of[static_cast<std::size_t>(stage)] : -1;
  }

  void enter(const Transfer& transfer, int rank, std::size_t step) {
    const HandOver& what = transfer.what;
    const bool sends = transfer.end == Transfer::End::kSend;
    if (rank_of(transfer.stage()) != rank) {
      fault("rank ", rank, ": found ", to_string(Step(transfer)), ", expected it on rank ",
            rank_of(transfer.stage()), ", which has stage ", transfer.stage());
      return;
    }
    if (rank_of(what.from) == rank_of(what.to())) {
      fault("rank ", rank, ": found ", to_string(Step(transfer)),
            ", expected no message within a rank");
    }
    TransferEnds& ends = ends_[what];
    (sends ? ends.sent : ends.posted) = step;
    if (++(sends ? ends.sends : ends.receives) == 2) {
      fault(to_string(what), ": found two ", sends ? "sends" : "receives", ", expected one");
    }
  }

  void expect_sent(const HandOver& what, std::size_t step) {
    made_.insert(what);
    if (rank_of(what.from) == rank_of(what.to())) return;
    const TransferEnds& ends = ends_[what];
    if (ends.sends == 0) fault(to_string(what), ": found no send, expected one");
    if (ends.sends > 0 && ends.sent < step) {
      fault(to_string(what), ": found its send before the slot that makes it");
    }
  }

  void expect_posted(const HandOver& what, std::size_t step) {
    if (rank_of(what.from) == rank_of(what.to())) return;
    const TransferEnds& ends = ends_[what];
    if (ends.receives == 0) fault(to_string(what), ": found no receive, expected one");
    if (ends.receives > 0 && ends.posted > step) {
      fault(to_string(what), ": found its receive behind the slot that needs it");
    }
  }

  const Program& program_;
  int stages_;
  Validation& validation_;
  std::map<HandOver, TransferEnds> ends_;
  std::set<HandOver> made_;
};

/// Walks all ranks as far as they come. A rank that waits is looked at again when what it waits for
/// may have come, and open sends are counted where they change, so that a walk takes a time in
/// proportion to the steps.
class Walk {
 public:
  Walk(const Program& program, std::optional<int> open_sends)
      : program_(program),
        open_sends_(open_sends),
        ranks_(program.steps.size()),
        hand_overs_(2 * program.rank_of.size() *
                    static_cast<std::size_t>(std::max(program.micro_batches, 0))) {
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      for (const Step& step : program.steps[rank]) {
        const auto* transfer = std::get_if<Transfer>(&step);
        if (transfer == nullptr) continue;
        HandOverState& state = state_of(transfer->what);
        (transfer->end == Transfer::End::kReceive ? state.receiver : state.sender) =
            static_cast<int>(rank);
      }
    }
  }

  /// Whether all ranks come to their end.
  bool ends() {
    for (std::size_t rank = ranks_.size(); rank > 0; --rank) wake(rank - 1);
    while (!woken_.empty()) {
      const std::size_t rank = woken_.back();
      woken_.pop_back();
      ranks_[rank].is_woken = false;
      while (!waits(rank) && ranks_[rank].next < program_.steps[rank].size()) take(rank);
    }
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (ranks_[rank].next < program_.steps[rank].size() || waits(rank)) return false;
    }
    return true;
  }

  /// After ends() said no: the ranks that wait for each other, in a circle.
  std::string circle() const {
    std::size_t rank = 0;
    while (!waits(rank) && rank + 1 < ranks_.size()) ++rank;
    std::vector<std::size_t> path;
    std::vector<bool> is_on_path(ranks_.size());
    while (!is_on_path[rank]) {
      path.push_back(rank);
      is_on_path[rank] = true;
      const auto wait = waits(rank);
      if (!wait) break;
      rank = wait->rank;
    }
    std::string text;
    for (auto one = std::ranges::find(path, rank); one != path.end(); ++one) {
      const auto wait = waits(*one);
      if (!wait) break;
      text += concat(text.empty() ? "" : "; ", "rank ", *one, " ", text_of(*one, *wait), " (rank ",
                     wait->rank, ")");
    }
    return text;
  }

  int most_open_sends() const { return most_open_; }

 private:
  struct RankState {
    std::size_t next = 0;
    bool is_woken = false;
    std::vector<HandOver> sends;  ///< those taken before their receives were posted, in order
    std::size_t oldest = 0;       ///< of them, the first whose receive is not posted
    int open = 0;                 ///< of them, how many receives are not posted
  };
  struct HandOverState {
    int sender = -1;  ///< rank; none within a rank
    int receiver = -1;
    bool is_posted = false;
    bool is_open = false;  ///< sent, not posted
    bool is_made = false;  ///< within a rank: made; between ranks: sent
  };
  struct Wait {
    std::size_t rank = 0;  ///< that is waited for
    HandOver what;
    bool of_send = false;  ///< for its receive, not for what a slot needs
  };

  std::size_t index_of(const HandOver& what) const {
    // Valid messages are of what slots make (Messages).
    TESSERA_INVARIANT(what.from >= 0 && what.micro_batch >= 0 &&
                          what.from < static_cast<int>(program_.rank_of.size()) &&
                          what.micro_batch < program_.micro_batches,
                      "a message of what no slot makes");
    const auto stages = program_.rank_of.size();
    const std::size_t direction = what.direction == Direction::kForward ? 0 : stages;
    return (direction + static_cast<std::size_t>(what.from)) *
               static_cast<std::size_t>(program_.micro_batches) +
           static_cast<std::size_t>(what.micro_batch);
  }
  HandOverState& state_of(const HandOver& what) { return hand_overs_[index_of(what)]; }
  const HandOverState& state_of(const HandOver& what) const { return hand_overs_[index_of(what)]; }

  void wake(std::size_t rank) {
    if (std::exchange(ranks_[rank].is_woken, true)) return;
    woken_.push_back(rank);
  }

  std::optional<Wait> waits(std::size_t rank) const {
    const RankState& state = ranks_[rank];
    const bool at_end = state.next == program_.steps[rank].size();
    if (state.open > (at_end ? 0 : open_sends_.value_or(state.open))) {
      const HandOver& oldest = state.sends[state.oldest];
      const int receiver = state_of(oldest).receiver;
      return Wait{receiver < 0 ? rank : static_cast<std::size_t>(receiver), oldest, true};
    }
    if (at_end) return std::nullopt;
    const auto* slot = std::get_if<Slot>(&program_.steps[rank][state.next]);
    if (slot == nullptr) return std::nullopt;
    std::optional<Wait> wait;
    slot->each([&](const Action& action) {
      const auto need = needed_by(action, static_cast<int>(program_.rank_of.size()));
      if (!need || wait || state_of(*need).is_made) return;
      const int maker = program_.rank_of[static_cast<std::size_t>(need->from)];
      wait = Wait{static_cast<std::size_t>(maker), *need, false};
    });
    return wait;
  }

  std::string text_of(std::size_t rank, const Wait& wait) const {
    const auto& steps = program_.steps[rank];
    const std::size_t next = ranks_[rank].next;
    if (!wait.of_send) {
      return concat("before ", to_string(std::get<Slot>(steps[next])), " waits for ",
                    to_string(wait.what));
    }
    return concat(next == steps.size() ? "at its end" : "after a send",
                  " waits for the receive of ", to_string(wait.what), " to be posted");
  }

  void take(std::size_t rank) {
    const Step& step = program_.steps[rank][ranks_[rank].next++];
    if (const auto* slot = std::get_if<Slot>(&step)) {
      slot->each([&](const Action& action) {
        const auto given = given_by(action, static_cast<int>(program_.rank_of.size()));
        if (given && state_of(*given).receiver < 0) make(*given);
      });
    }
    const auto* transfer = std::get_if<Transfer>(&step);
    if (transfer == nullptr) return;
    if (transfer->end == Transfer::End::kReceive) {
      post(transfer->what);
    } else {
      send(rank, transfer->what);
    }
  }

  void make(const HandOver& what) {
    state_of(what).is_made = true;
    wake(static_cast<std::size_t>(program_.rank_of[static_cast<std::size_t>(what.to())]));
  }

  void post(const HandOver& what) {
    HandOverState& posted = state_of(what);
    posted.is_posted = true;
    if (!std::exchange(posted.is_open, false)) return;
    RankState& sender = ranks_[static_cast<std::size_t>(posted.sender)];
    --sender.open;
    while (sender.oldest < sender.sends.size() && !state_of(sender.sends[sender.oldest]).is_open) {
      ++sender.oldest;
    }
    wake(static_cast<std::size_t>(posted.sender));
  }

  void send(std::size_t rank, const HandOver& what) {
    make(what);  // under way from here on, whether or not its rank waits for it
    HandOverState& sent = state_of(what);
    if (sent.is_posted || sent.is_open) return;
    sent.is_open = true;
    RankState& sender = ranks_[rank];
    sender.sends.push_back(what);
    most_open_ = std::max(most_open_, ++sender.open);
  }

  const Program& program_;
  std::optional<int> open_sends_;
  std::vector<RankState> ranks_;
  std::vector<HandOverState> hand_overs_;  ///< by index_of()
  std::vector<std::size_t> woken_;         ///< ranks to look at
  int most_open_ = 0;
};

void check_walk(const Program& program, const Limits& limits, Validation& validation) {
  Walk walk(program, limits.open_sends);
  if (walk.ends()) return;
  validation.add(Fault::kDeadlock, "ranks wait for each other: ", walk.circle());
}

/// The first message of each way that overtakes another one.
void check_order(const Program& program, const Limits& limits, Validation& validation) {
  if (limits.messages == MessageOrder::kAny) return;
  struct Ends {
    std::vector<HandOver> sent, posted;
  };
  std::map<std::tuple<int, int, Direction>, Ends> ways;  // sender, receiver
  const auto rank_of = [&](int stage) { return program.rank_of[static_cast<std::size_t>(stage)]; };
  for (const auto& steps : program.steps) {
    for (const Step& step : steps) {
      const auto* transfer = std::get_if<Transfer>(&step);
      if (transfer == nullptr) continue;
      const HandOver& what = transfer->what;
      Ends& ends = ways[{rank_of(what.from), rank_of(what.to()), what.direction}];
      (transfer->end == Transfer::End::kSend ? ends.sent : ends.posted).push_back(what);
    }
  }
  for (const auto& [way, ends] : ways) {
    const auto first = std::ranges::mismatch(ends.sent, ends.posted);
    if (first.in1 == ends.sent.end()) continue;
    validation.add(Fault::kMessage, "rank ", std::get<1>(way), ": found the receive of ",
                   to_string(*first.in2), " where rank ", std::get<0>(way), " sends ",
                   to_string(*first.in1), ", expected receives in the order of the sends");
  }
}

void check_memory(const Schedule& schedule, const Limits& limits, Validation& validation) {
  if (!limits.live_chunks || limits.passes == Passes::kForward) return;
  const std::vector<int> peaks = peak_live_chunks(schedule);
  for (std::size_t rank = 0; rank < peaks.size(); ++rank) {
    if (peaks[rank] <= *limits.live_chunks) continue;
    validation.add(Fault::kMemory, "rank ", rank, ": found ", peaks[rank],
                   " live micro-batches of its stages at once, expected at most ",
                   *limits.live_chunks);
  }
}

}  // namespace

std::string_view to_string(Fault fault) {
  static constexpr std::array<std::string_view, 9> kNames{"pair",     "unknown",  "placement",
                                                          "repeated", "missing",  "dependency",
                                                          "message",  "deadlock", "memory"};
  return kNames.at(static_cast<std::size_t>(fault));
}

Validation validate(const Program& program, const Limits& limits) {
  Validation validation;
  validation.most = limits.findings;
  const Schedule schedule = schedule_of(program);
  Lists(schedule, limits.passes, validation).check();
  Messages(program, validation).check();
  if (validation.valid()) check_order(program, limits, validation);
  if (validation.valid()) check_walk(program, limits, validation);
  if (validation.valid()) check_memory(schedule, limits, validation);
  return validation;
}

Validation validate(const Schedule& schedule, const Limits& limits) {
  Validation validation;
  validation.most = limits.findings;
  Lists(schedule, limits.passes, validation).check();
  // With a fault in the lists their messages mean nothing.
  if (!validation.valid()) return validation;
  const Program program = lower(schedule);
  check_order(program, limits, validation);
  if (validation.valid()) check_walk(program, limits, validation);
  if (validation.valid()) check_memory(schedule, limits, validation);
  return validation;
}

std::vector<int> peak_live_chunks(const Schedule& schedule) {
  std::vector<int> peaks;
  for (const auto& slots : schedule.slots) {
    int live = 0;
    int peak = 0;
    for (const Slot& slot : slots) {
      slot.each([&](const Action& action) {
        if (action.kind == ActionKind::kForward) peak = std::max(peak, ++live);
        if (action.kind == ActionKind::kWeightGradient || action.kind == ActionKind::kBackward) {
          --live;
        }
      });
    }
    peaks.push_back(peak);
  }
  return peaks;
}

int fewest_open_sends(const Program& program) {
  Walk unbounded(program, std::nullopt);
  TESSERA_CHECK(unbounded.ends(), ErrorKind::kUsage, "fewest_open_sends: found a program in which ",
                unbounded.circle(), ", expected a valid one");
  // If a rank does not stop with so many open sends, it does not stop with more.
  int low = 0;
  int high = unbounded.most_open_sends();
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (Walk(program, middle).ends()) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace tessera::pipeline
