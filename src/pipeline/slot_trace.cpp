#include "pipeline/slot_trace.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "base/text/json_reader.h"
#include "base/trace.h"
#include "tessera/error.h"

namespace tessera::pipeline {
namespace {

/// The range of a clock of nanoseconds in 64 bits: 285 years.
constexpr double kMostMilliseconds = 9e12;

/// A wait that ends sooner, in ms, does not count, nor one that is a small part of the message's
/// time: a receiver that comes late may still wait a little.
constexpr double kNoticed = 0.02;
constexpr double kShareWaited = 0.25;
constexpr double kMostTensors = 1e6;

TraceClock::time_point time_of(double ms) {
  return TraceClock::time_point(std::chrono::duration_cast<TraceClock::duration>(
      std::chrono::duration<double, std::milli>(ms)));
}

/// The mean of all spans of one name.
class Mean {
 public:
  void add(double value) {
    sum_ += value;
    ++count_;
  }
  double value() const { return count_ == 0 ? 0.0 : sum_ / count_; }
  int count() const { return count_; }

 private:
  double sum_ = 0.0;
  int count_ = 0;
};

/// The spans of one tensor of a message, once a step.
struct TensorSpans {
  std::vector<double> sent;  ///< when its send was posted
  std::vector<TimeSpan> receives;
  /// How long the receiver stood waiting for it: who comes later only knows that it is there.
  std::vector<double> waited;
};

using MessageSpans = std::map<std::int64_t, TensorSpans>;  ///< by tensor

/// The measurements of a trace, in milliseconds.
struct Measured {
  std::map<std::pair<int, ActionKind>, Mean> actions;  ///< of stages
  std::map<int, Mean> paired;                          ///< of the F's stage
  std::map<HandOver, MessageSpans> messages;

  std::optional<double> of(int stage, ActionKind kind) const {
    const auto found = actions.find({stage, kind});
    return found == actions.end() ? std::nullopt : std::optional(found->second.value());
  }
  std::optional<double> of_backward(int stage) const {
    const auto whole = of(stage, ActionKind::kBackward);
    const auto input = of(stage, ActionKind::kInputGradient);
    const auto weight = of(stage, ActionKind::kWeightGradient);
    return whole || !input || !weight ? whole : std::optional(*input + *weight);
  }
};

double duration_of(const JsonCursor& event) {
  const auto arguments = event.find("args");
  const auto uncut = arguments ? arguments->find("uncut_ms") : std::nullopt;
  return uncut ? uncut->number(NumberRange{}) : event.member("dur").number(NumberRange{}) / 1000.0;
}

void add_slot(Measured& measured, const JsonCursor& event) {
  const auto slot = parse_slot(event.member("name").text());
  if (!slot) event.member("name").refuse("a slot, as 3F0 or (0F3;3B1)");
  const Action& action = slot->action;
  (slot->paired ? measured.paired[action.stage] : measured.actions[{action.stage, action.kind}])
      .add(duration_of(event));
}

void add_message(Measured& measured, const JsonCursor& event) {
  const auto transfer = parse_transfer(event.member("name").text());
  if (!transfer) event.member("name").refuse("an end of a message, as 0SEND_F3 or 1RECV_F3");
  const double begin = event.member("ts").number() / 1000.0;
  const auto arguments = event.find("args");
  const auto number = [&](const char* key, double otherwise) {
    const auto found = arguments ? arguments->find(key) : std::nullopt;
    return found ? found->number(NumberRange{}) : otherwise;
  };
  const auto tensor = static_cast<std::int64_t>(std::min(number("tensor", 0.0), kMostTensors));
  TensorSpans& spans = measured.messages[transfer->what][tensor];
  if (transfer->end == Transfer::End::kSend) {
    spans.sent.push_back(begin);
    return;
  }
  spans.receives.push_back({begin, begin + duration_of(event)});
  spans.waited.push_back(number("waited_ms", duration_of(event)));
}

void add(Measured& measured, const JsonCursor& event) {
  if (!event.value().is_object() || event.member("ph").text() != "X") return;
  const auto category = event.find("cat");
  if (!category) return;
  if (category->text() == to_string(TraceRow::kSlots)) add_slot(measured, event);
  if (category->text() == to_string(TraceRow::kMessages)) add_message(measured, event);
}

/// How long a message took, from when the first of its tensors had left and was expected.
struct Journey {
  double ms = 0.0;
  bool is_exact = false;  ///< else at most so long
};

/// In a trace of several steps the n-th receive takes the n-th send.
std::optional<Journey> journey(const MessageSpans& tensors, std::size_t step) {
  std::optional<double> begin;
  double end = 0.0;
  double waited = 0.0;
  Journey found;
  for (const auto& [tensor, spans] : tensors) {
    if (step >= std::min(spans.sent.size(), spans.receives.size())) return std::nullopt;
    const TimeSpan& received = spans.receives[step];
    const double leaves = std::max(spans.sent[step], received.begin);
    begin = begin ? std::min(*begin, leaves) : leaves;
    end = std::max(end, received.end);
    waited = std::max(waited, spans.waited[step]);
  }
  if (!begin) return std::nullopt;
  found.ms = std::max(0.0, end - *begin);
  found.is_exact = waited >= std::max(kNoticed, kShareWaited * found.ms);
  return found;
}

/// Returns the cost of all messages that a stage sends in a direction: the mean of those that a
/// rank waited for, else the shortest; 0 where there are none.
double cost_of_messages(const Measured& measured, int from, Direction direction) {
  Mean exact;
  std::optional<double> least;
  for (auto one = measured.messages.lower_bound({direction, from, 0});
       one != measured.messages.end(); ++one) {
    const auto& [what, tensors] = *one;
    if (what.from != from || what.direction != direction) break;
    for (std::size_t step = 0;; ++step) {
      const auto found = journey(tensors, step);
      if (!found) break;
      if (found->is_exact) exact.add(found->ms);
      least = least ? std::min(*least, found->ms) : found->ms;
    }
  }
  return exact.count() > 0 ? exact.value() : least.value_or(0.0);
}

/// The costs of one stage, as far as the schedule asks for them.
class StageOfTrace {
 public:
  StageOfTrace(const Measured& measured, std::string_view name, int stage)
      : measured_(measured), name_(name), stage_(stage) {
    costs_.forward = costs_.input_gradient = costs_.weight_gradient = 0.0;
    costs_.send_forward = cost_of_messages(measured, stage, Direction::kForward);
    costs_.send_backward = cost_of_messages(measured, stage, Direction::kBackward);
  }

  void need(ActionKind kind) {
    switch (kind) {
      case ActionKind::kForward:
        costs_.forward = expect(measured_.of(stage_, kind), "F");
        break;
      case ActionKind::kInputGradient:
        costs_.input_gradient = expect(measured_.of(stage_, kind), "I");
        break;
      case ActionKind::kWeightGradient:
        costs_.weight_gradient = expect(measured_.of(stage_, kind), "W");
        break;
      case ActionKind::kBackward:
        costs_.backward = expect(measured_.of_backward(stage_), "B");
        break;
    }
  }

  void need_paired(int backward_stage) {
    const auto found = measured_.paired.find(stage_);
    if (found != measured_.paired.end()) {
      costs_.paired = found->second.value();
      return;
    }
    const auto backward = measured_.of_backward(backward_stage);
    costs_.paired = expect(measured_.of(stage_, ActionKind::kForward), "F") +
                    expect(backward, concat("B paired with it, of stage ", backward_stage));
  }

  const StageCosts& costs() const { return costs_; }

 private:
  double expect(std::optional<double> cost, std::string_view what) const {
    TESSERA_CHECK(cost, ErrorKind::kFormat, name_, ": found no span of the row 'slots' with stage ",
                  stage_, "'s ", what,
                  ", expected one of each slot of the schedule; record a step of the same kind, or "
                  "of one that cuts its backwards into I and W");
    return *cost;
  }

  const Measured& measured_;
  std::string_view name_;
  int stage_;
  StageCosts costs_;
};

}  // namespace

std::string trace_of(const Schedule& schedule, const Simulated& simulated) {
  TESSERA_CHECK(simulated.makespan <= kMostMilliseconds, ErrorKind::kUsage,
                "trace: found a makespan of ", simulated.makespan, " ms, expected at most ",
                kMostMilliseconds);
  std::vector<std::vector<TraceSpan>> spans(simulated.ranks.size());
  for (std::size_t rank = 0; rank < spans.size(); ++rank) {
    for (std::size_t i = 0; i < schedule.slots[rank].size(); ++i) {
      const TimeSpan& time = simulated.ranks[rank].slots[i];
      spans[rank].push_back({TraceRow::kSlots, to_string(schedule.slots[rank][i]),
                             time_of(time.begin), time_of(time.end)});
    }
  }
  for (const SimulatedMessage& message : simulated.messages) {
    for (const auto end : {Transfer::End::kSend, Transfer::End::kReceive}) {
      const Transfer transfer{end, message.what};
      const double begin = end == Transfer::End::kSend ? message.sent : message.posted;
      spans[static_cast<std::size_t>(schedule.rank_of[static_cast<std::size_t>(transfer.stage())])]
          .push_back({TraceRow::kMessages, to_string(Step(transfer)), time_of(begin),
                      time_of(message.arrived)});
    }
  }
  std::vector<std::string> events;
  for (std::size_t rank = 0; rank < spans.size(); ++rank) {
    events.push_back(chrome_events(std::move(spans[rank]), static_cast<int>(rank), time_of(0.0)));
  }
  return chrome_trace(events);
}

Costs costs_from_trace(std::string_view text, std::string_view name, const Schedule& schedule) {
  const nlohmann::json whole = parse_json_object(text, name);
  const JsonCursor cursor(whole, name, JsonStyle::kData);
  Measured measured;
  cursor.member("traceEvents").list([&](const JsonCursor& event) {
    add(measured, event);
    return 0;
  });
  std::vector<StageOfTrace> stages;
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    stages.emplace_back(measured, name, stage);
  }
  const auto of = [&](const Action& action) -> StageOfTrace& {
    return stages.at(static_cast<std::size_t>(action.stage));
  };
  std::set<std::pair<int, int>> asked;  // of stage and kind: each once
  for (const auto& slots : schedule.slots) {
    for (const Slot& slot : slots) {
      const int kind =
          slot.paired ? static_cast<int>(kActionKinds) : static_cast<int>(slot.action.kind);
      if (!asked.insert({slot.action.stage, kind}).second) continue;
      if (slot.paired) {
        of(slot.action).need_paired(slot.paired->stage);
      } else {
        of(slot.action).need(slot.action.kind);
      }
    }
  }
  Costs costs;
  for (const StageOfTrace& stage : stages) costs.push_back(stage.costs());
  return costs;
}

}  // namespace tessera::pipeline
