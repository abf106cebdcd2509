#include "pipeline/schedule_csv.h"

#include <algorithm>
#include <optional>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::pipeline {
namespace {

constexpr std::string_view kOverlapped = "OVERLAP_F_B";
/// F, I, W and four ends of messages; the rest is room for the moves of stages.
constexpr std::int64_t kMostSteps = 8 * kMostCells;

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r";
  const auto begin = text.find_first_not_of(kBlank);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

/// A cell may stand in quotes; no step has any inside.
std::string_view unquoted(std::string_view cell) {
  cell = trimmed(cell);
  if (cell.size() >= 2 && cell.front() == '"' && cell.back() == '"') {
    cell = trimmed(cell.substr(1, cell.size() - 2));
  }
  return cell;
}

/// Takes everything up to `end` off the front of `text`, and `end`.
std::string_view take_until(std::string_view& text, char end) {
  const auto at = text.find(end);
  const std::string_view taken = text.substr(0, at);
  text.remove_prefix(at == std::string_view::npos ? text.size() : at + 1);
  return taken;
}

std::optional<Slot> parse_compute(std::string_view text) {
  const bool pair = text.ends_with(kOverlapped);
  if (pair) text.remove_suffix(kOverlapped.size());
  const auto slot = parse_slot(text);
  if (!slot || slot->paired.has_value() != pair) return std::nullopt;
  return slot;
}

std::optional<Residency> parse_residency(std::string_view text) {
  struct Word {
    std::string_view text;
    Residency::Move move;
  };
  static constexpr Word kWords[] = {
      {"UNSHARD", Residency::Move::kUnshard},
      {"RESHARD", Residency::Move::kReshard},
      {"REDUCE_GRAD", Residency::Move::kReduce},
  };
  for (const Word& word : kWords) {
    if (!text.ends_with(word.text)) continue;
    const auto number = parse_action(concat(text.substr(0, text.size() - word.text.size()), "F0"));
    if (number) return Residency{word.move, number->stage};
  }
  return std::nullopt;
}

std::optional<Step> parse_step(std::string_view text) {
  if (const auto slot = parse_compute(text)) return *slot;
  if (const auto transfer = parse_transfer(text)) return *transfer;
  if (const auto residency = parse_residency(text)) return *residency;
  return std::nullopt;
}

/// PyTorch 2.15 writes where a send or a reduction is waited for, as 0WAIT_SEND_F3. Here a send
/// ends with its receive and a reduction with the step, so a file's waits change nothing.
bool is_wait(std::string_view text) {
  constexpr std::string_view kWait = "WAIT_";
  const auto at = std::min(text.find_first_not_of("0123456789"), text.size());
  if (at == 0 || !text.substr(at).starts_with(kWait)) return false;
  const auto step = parse_step(concat(text.substr(0, at), text.substr(at + kWait.size())));
  if (!step) return false;
  const auto* transfer = std::get_if<Transfer>(&*step);
  const auto* residency = std::get_if<Residency>(&*step);
  return (transfer != nullptr && transfer->end == Transfer::End::kSend) ||
         (residency != nullptr && residency->move == Residency::Move::kReduce);
}

/// Stages, where they lie, micro-batches.
void measure(Program& program) {
  for (std::size_t rank = 0; rank < program.steps.size(); ++rank) {
    for (const Step& step : program.steps[rank]) {
      const auto* slot = std::get_if<Slot>(&step);
      if (slot == nullptr) continue;
      slot->each([&](const Action& action) {
        const auto stage = static_cast<std::size_t>(action.stage);
        if (stage >= program.rank_of.size()) program.rank_of.resize(stage + 1, -1);
        if (program.rank_of[stage] < 0) program.rank_of[stage] = static_cast<int>(rank);
        program.micro_batches = std::max(program.micro_batches, action.micro_batch + 1);
      });
    }
  }
}

template <class Row>
void append_row(std::string& text, const std::vector<Row>& row) {
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (i > 0) text += ',';
    text += to_string(Step(row[i]));
  }
  text += "\r\n";  // as Python writes it
}

}  // namespace

std::string to_csv(const Schedule& schedule) {
  std::string text;
  for (const auto& slots : schedule.slots) append_row(text, slots);
  return text;
}

std::string to_csv(const Program& program) {
  std::string text;
  for (const auto& steps : program.steps) append_row(text, steps);
  return text;
}

Program parse_csv(std::string_view text, std::string_view name) {
  Program program;
  std::size_t rows = 0;
  std::int64_t count = 0;
  while (!text.empty()) {
    std::string_view row = take_until(text, '\n');
    ++rows;
    TESSERA_CHECK(rows <= kMostStages, ErrorKind::kFormat, name, ": found more than ", kMostStages,
                  " rows, expected one a rank");
    auto& steps = program.steps.emplace_back();
    for (std::size_t cell = 1; !row.empty(); ++cell) {
      const std::string_view word = unquoted(take_until(row, ','));
      if (word.empty() || is_wait(word)) continue;
      const auto step = parse_step(word);
      TESSERA_CHECK(step, ErrorKind::kFormat, name, ", row ", rows, ", cell ", cell, ": found ",
                    printable(word, 40),
                    ", expected a step of a schedule, as 3F0, (0F3;3B1)OVERLAP_F_B, 0SEND_F3, "
                    "2UNSHARD; stages below ",
                    kMostStages, ", micro-batches below ", kMostMicroBatches);
      TESSERA_CHECK(++count <= kMostSteps, ErrorKind::kFormat, name, ", row ", rows, ", cell ",
                    cell, ": found more than ", kMostSteps,
                    " steps, expected at most what a schedule has");
      steps.push_back(*step);
    }
  }
  while (!program.steps.empty() && program.steps.back().empty()) program.steps.pop_back();
  measure(program);
  TESSERA_CHECK(!program.rank_of.empty(), ErrorKind::kFormat, name,
                ": found no action of a schedule, expected a row of them a rank");
  require_few_cells(std::ssize(program.rank_of), program.micro_batches, ErrorKind::kFormat, name);
  return program;
}

bool has_messages(const Program& program) {
  return std::ranges::any_of(program.steps, [](const std::vector<Step>& steps) {
    return std::ranges::any_of(
        steps, [](const Step& step) { return std::holds_alternative<Transfer>(step); });
  });
}

}  // namespace tessera::pipeline
