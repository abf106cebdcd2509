#include "check/report.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "base/text/count_text.h"
#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::check {
namespace {

std::string ms(double value) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2) << value << " ms";
  return text.str();
}

/// A row of a table: a name, then a column a place.
void add_row(std::ostringstream& text, const std::string& name,
             const std::vector<std::string>& cells) {
  constexpr int kName = 28, kCell = 12;
  text << "  " << std::left << std::setw(kName) << name << std::right;
  for (const std::string& cell : cells) text << std::setw(kCell) << cell;
  text << '\n';
}

/// Rows whose cells are all 0 are left out.
template <class Cell>
void add_sizes(std::ostringstream& text, const Report& report, const std::string& name,
               const Cell& cell) {
  std::vector<std::string> cells;
  bool is_any = false;
  for (const Place& place : report.places) {
    const std::int64_t bytes = cell(place);
    is_any = is_any || bytes != 0;
    cells.push_back(size_text(bytes));
  }
  if (is_any) add_row(text, name, cells);
}

void add_memory(std::ostringstream& text, const Report& report) {
  text << "\nmemory of a rank" << (report.knows_tokens ? "" : kWithoutActivations) << '\n';
  if (report.places.size() > 1) {
    std::vector<std::string> heads;
    for (const Place& place : report.places) heads.push_back(concat("pp ", place.pp));
    add_row(text, "", heads);
  }
  for (std::size_t i = 0; i < report.places.front().held.size(); ++i) {
    add_sizes(text, report, report.places.front().held[i].what,
              [&](const Place& place) { return place.held.at(i).bytes; });
  }
  add_sizes(text, report, "most in a step", [](const Place& place) { return place.peak; });
}

void add_sent(std::ostringstream& text, const Report& report) {
  const bool sends = std::ranges::any_of(report.places, [](const Place& place) {
    return std::ranges::any_of(place.sent, [](const SentBytes& row) { return row.bytes != 0; });
  });
  text << "\nbytes that a rank sends in a step" << (sends ? "\n" : ": none\n");
  for (std::size_t i = 0; i < report.places.front().sent.size(); ++i) {
    const SentBytes& row = report.places.front().sent[i];
    add_sizes(text, report, concat(row.axis, "  ", row.what),
              [&](const Place& place) { return place.sent.at(i).bytes; });
  }
}

void add_time(std::ostringstream& text, const StepTime& time) {
  text << "a step by " << time.by << ": " << ms(time.step_ms) << ", of which computing "
       << ms(time.compute_ms) << " (recomputing " << ms(time.again_ms)
       << "),\n  waiting for gathers and reductions " << ms(time.waited_ms) << ", other messages "
       << ms(time.rest_ms);
  if (time.bubble) {
    text << ", bubble " << std::fixed << std::setprecision(1) << 100 * *time.bubble << " %";
  }
  text << '\n';
}

/// "fits: a rank takes at most 76.9 GiB of 80.0 GiB (--device-memory)".
std::string whether_fits(const Report& report) {
  if (report.places.empty()) return "what a rank takes is not known";
  const std::string_view without = report.knows_tokens ? "" : kWithoutActivations;
  std::int64_t most = 0;
  for (const Place& place : report.places) most = std::max(most, place.peak);
  if (!report.memory) return concat("a rank takes at most ", size_text(most), without);
  if (!report.knows_tokens && most <= *report.memory) {
    return concat("fits or not: set training.seq_len to know; a rank takes ", size_text(most),
                  " of ", size_text(*report.memory), " (", report.memory_from, ")", without);
  }
  const std::int64_t left = *report.memory - most;
  return concat(left >= 0 ? "fits" : "does not fit", ": a rank takes at most ", size_text(most),
                " of ", size_text(*report.memory), " (", report.memory_from, ")", without);
}

}  // namespace

std::string to_string(const Report& report) {
  std::ostringstream text;
  text << printable(report.model) << " on " << count_text(report.world, "rank") << ": "
       << count_text(std::ssize(report.findings), "finding") << '\n'
       << "  " << report.layout << '\n';
  for (const Finding& finding : report.findings) text << to_string(finding) << '\n';
  text << whether_fits(report) << '\n';
  if (report.time) add_time(text, *report.time);
  for (const std::string& note : report.notes) text << "note: " << note << '\n';
  if (!report.places.empty()) {
    add_memory(text, report);
    add_sent(text, report);
  }
  text << "\ncompared\n";
  for (const std::string& line : report.compared) text << "  " << line << '\n';
  return text.str();
}

}  // namespace tessera::check
