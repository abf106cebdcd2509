#include "pipeline/schedule.h"

#include <algorithm>
#include <charconv>
#include <system_error>

#include "tessera/error.h"

namespace tessera::pipeline {
namespace {

/// Takes a whole number below `limit` off the front of `text`; none where there is none.
std::optional<int> take_number(std::string_view& text, int limit) {
  int number = 0;
  const auto [rest, failed] = std::from_chars(text.data(), text.data() + text.size(), number);
  // from_chars reads a sign, too.
  if (failed != std::errc{} || text.front() == '-' || number >= limit) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(rest - text.data()));
  return number;
}

std::optional<ActionKind> kind_of(char op) {
  switch (op) {
    case 'F':
      return ActionKind::kForward;
    case 'I':
      return ActionKind::kInputGradient;
    case 'W':
      return ActionKind::kWeightGradient;
    case 'B':
      return ActionKind::kBackward;
    default:
      return std::nullopt;
  }
}

}  // namespace

char op_of(ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
      return 'F';
    case ActionKind::kInputGradient:
      return 'I';
    case ActionKind::kWeightGradient:
      return 'W';
    case ActionKind::kBackward:
      return 'B';
  }
  return '?';
}

std::string to_string(const Action& action) {
  return concat(action.stage, op_of(action.kind), action.micro_batch);
}

void require_few_cells(std::int64_t stages, std::int64_t micro_batches, ErrorKind kind,
                       std::string_view name) {
  TESSERA_CHECK(stages * micro_batches <= kMostCells, kind, name, ": found ", stages,
                " stages and ", micro_batches, " micro-batches, expected a product of at most ",
                kMostCells);
}

std::string to_string(const Slot& slot) {
  if (!slot.paired) return to_string(slot.action);
  return concat('(', to_string(slot.action), ';', to_string(*slot.paired), ')');
}

std::optional<Action> parse_action(std::string_view text) {
  const auto stage = take_number(text, kMostStages);
  if (!stage || text.empty()) return std::nullopt;
  const auto kind = kind_of(text.front());
  text.remove_prefix(1);
  const auto micro_batch = take_number(text, kMostMicroBatches);
  if (!kind || !micro_batch || !text.empty()) return std::nullopt;
  return Action{*kind, *stage, *micro_batch};
}

std::optional<Slot> parse_slot(std::string_view text) {
  if (!text.starts_with('(')) {
    const auto action = parse_action(text);
    return action ? std::optional(Slot{*action, {}}) : std::nullopt;
  }
  const auto middle = text.find(';');
  if (middle == std::string_view::npos || !text.ends_with(')')) return std::nullopt;
  const auto first = parse_action(text.substr(1, middle - 1));
  const auto second = parse_action(text.substr(middle + 1, text.size() - middle - 2));
  if (!first || !second) return std::nullopt;
  Slot pair{*first, {}};
  pair.paired = second;
  return pair;
}

std::vector<int> Schedule::stages_of(int rank) const {
  std::vector<int> found;
  for (int stage = 0; stage < stages(); ++stage) {
    if (rank_of[static_cast<std::size_t>(stage)] == rank) found.push_back(stage);
  }
  return found;
}

Schedule forward_only(const Schedule& schedule) {
  Schedule forwards{schedule.micro_batches, schedule.rank_of, {}};
  for (const auto& slots : schedule.slots) {
    auto& kept = forwards.slots.emplace_back();
    for (const Slot& slot : slots) {
      if (slot.action.kind == ActionKind::kForward) kept.push_back({slot.action, {}});
    }
  }
  return forwards;
}

Schedule forward_schedule(const std::vector<int>& rank_of, int ranks, int micro_batches) {
  Schedule schedule{micro_batches, rank_of,
                    std::vector<std::vector<Slot>>(static_cast<std::size_t>(ranks))};
  const int stages = schedule.stages();
  // In waves: were there a rank for each stage, F of stage s and micro-batch k would run at s + k.
  // Its input is made one wave earlier, so that no rank waits for itself.
  for (int wave = 0; wave < stages + micro_batches - 1; ++wave) {
    for (int k = std::max(0, wave - stages + 1); k <= std::min(wave, micro_batches - 1); ++k) {
      const auto rank = static_cast<std::size_t>(rank_of[static_cast<std::size_t>(wave - k)]);
      schedule.slots[rank].push_back({{ActionKind::kForward, wave - k, k}, {}});
    }
  }
  return schedule;
}

std::string to_string(const Schedule& schedule) {
  std::string text;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    text += concat("rank ", rank, ':');
    for (const Slot& slot : schedule.slots[static_cast<std::size_t>(rank)]) {
      text += ' ' + to_string(slot);
    }
    text += '\n';
  }
  return text;
}

std::string to_string(const HandOver& hand_over) {
  return concat(hand_over.direction == Direction::kForward ? "activations" : "gradients",
                " of stage ", hand_over.from, ", micro-batch ", hand_over.micro_batch);
}

std::optional<HandOver> given_by(const Action& action, int stages) {
  if (action.kind == ActionKind::kForward) {
    if (action.stage + 1 >= stages) return std::nullopt;
    return HandOver{Direction::kForward, action.stage, action.micro_batch};
  }
  if (!action.gives_input_gradient() || action.stage == 0) return std::nullopt;
  return HandOver{Direction::kBackward, action.stage, action.micro_batch};
}

std::optional<HandOver> needed_by(const Action& action, int stages) {
  if (action.kind == ActionKind::kForward) {
    if (action.stage == 0) return std::nullopt;
    return HandOver{Direction::kForward, action.stage - 1, action.micro_batch};
  }
  if (!action.gives_input_gradient() || action.stage + 1 >= stages) return std::nullopt;
  return HandOver{Direction::kBackward, action.stage + 1, action.micro_batch};
}

bool is_message(const HandOver& hand_over, const Schedule& schedule) {
  return schedule.rank_of.at(static_cast<std::size_t>(hand_over.from)) !=
         schedule.rank_of.at(static_cast<std::size_t>(hand_over.to()));
}

}  // namespace tessera::pipeline
