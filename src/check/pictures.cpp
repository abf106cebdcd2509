#include "check/pictures.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <string_view>
#include <utility>

#include "base/text/count_text.h"
#include "base/text/printable.h"
#include "check/markup.h"
#include "tessera/error.h"

namespace tessera::check {
namespace {

constexpr std::size_t kMostPlaces = 8;
constexpr std::size_t kMostRows = 24;  // of bytes held or sent

std::int64_t held(const Place& place, std::string_view what) {
  std::int64_t bytes = 0;
  for (const NamedBytes& one : place.held) bytes += one.what == what ? one.bytes : 0;
  return bytes;
}

std::string colour_of_part(std::string_view what) {
  constexpr std::array<std::string_view, 7> kParts{
      "parameters", "gradients", "moments", "master", "unsharded peak", "reductions", kActivations};
  const auto* const found = std::ranges::find(kParts, what);
  return found == kParts.end() ? "other" : concat("part", found - kParts.begin());
}

std::string colour_of_axis(std::string_view name) {
  constexpr std::array<std::string_view, 5> kAxes{"dp", "tp", "ep", "pp", "cp"};
  const auto* const found = std::ranges::find(kAxes, name);
  return found == kAxes.end() ? "other" : concat("axis-", *found);
}

/// Names of all places in the order in which they come first.
std::vector<std::string> parts_of(const ShownPlaces& shown) {
  std::vector<std::string> names;
  for (const Place* place : shown.places) {
    for (const NamedBytes& one : place->held) {
      const bool is_new = std::ranges::find(names, one.what) == names.end();
      if (is_new && names.size() < kMostRows) names.push_back(one.what);
    }
  }
  return names;
}

std::vector<std::string> heads_of(const Report& report, const ShownPlaces& shown,
                                  const std::string& first) {
  std::vector<std::string> heads{first};
  for (const Place* place : shown.places) heads.push_back(place_name(report, *place));
  return heads;
}

Table held_table(const Report& report, const ShownPlaces& shown) {
  Table table{.caption = "Bytes that a rank holds at the most of a step",
              .heads = heads_of(report, shown, "part")};
  const auto add = [&](const std::string& name, const auto& bytes_of) {
    std::vector<std::string> row{escaped(name)};
    for (const Place* place : shown.places) row.push_back(bytes_cell(bytes_of(*place)));
    table.rows.push_back(std::move(row));
  };
  for (const std::string& name : parts_of(shown)) {
    add(name, [&](const Place& place) { return held(place, name); });
  }
  add("most in a step", [](const Place& place) { return place.peak; });
  if (report.memory) add("memory of a rank", [&](const Place&) { return *report.memory; });
  return table;
}

/// One row of held_picture(), `top` pixels from above.
std::string held_row(const Report& report, const Place& place, double whole, int top) {
  std::string text =
      concat("<text x=\"0\" y=\"", top + 12, "\" class=\"haloed\">", place_name(report, place),
             ": <tspan class=\"strong\">", size_text(place.peak), "</tspan></text>\n");
  double x = 0;
  for (const NamedBytes& one : place.held) {
    if (one.bytes <= 0) continue;
    const double width = static_cast<double>(one.bytes) / whole;
    text += concat("<rect x=\"", percent(x), "\" y=\"", top + 18, "\" width=\"", percent(width),
                   "\" height=\"18\" class=\"", colour_of_part(one.what), "\"><title>",
                   escaped(one.what), ": ", size_text(one.bytes), "</title></rect>\n");
    x += width;
  }
  if (report.memory) {
    const std::string limit = percent(static_cast<double>(*report.memory) / whole);
    for (const std::string_view line : {"limit-back", "limit"}) {
      text += concat("<line x1=\"", limit, "\" x2=\"", limit, "\" y1=\"", top + 14, "\" y2=\"",
                     top + 40, "\" class=\"", line, "\"/>\n");
    }
  }
  return text;
}

/// Words above the first bar that stay within the picture.
std::string name_of_limit(const Report& report, double share) {
  return concat("<text x=\"", percent(share), "\" y=\"12\" class=\"limit-text",
                share > 0.5 ? " end" : "", "\">memory of a rank: ", size_text(*report.memory),
                "</text>\n");
}

struct SentRow {
  std::string axis = {};
  std::string what = {};
  std::vector<std::int64_t> bytes = {};  ///< a place each
};

std::vector<SentRow> sent_rows(const ShownPlaces& shown) {
  std::vector<SentRow> rows;
  for (std::size_t i = 0; i < shown.places.size(); ++i) {
    for (const SentBytes& one : shown.places[i]->sent) {
      auto row = std::ranges::find_if(
          rows, [&](const SentRow& of) { return of.axis == one.axis && of.what == one.what; });
      if (row == rows.end()) {
        rows.push_back({one.axis, one.what, std::vector<std::int64_t>(shown.places.size())});
        row = rows.end() - 1;
      }
      row->bytes[i] += one.bytes;
    }
  }
  std::erase_if(rows, [](const SentRow& row) {
    return std::ranges::all_of(row.bytes, [](std::int64_t bytes) { return bytes == 0; });
  });
  rows.resize(std::min(rows.size(), kMostRows));
  return rows;
}

Table sent_table(const Report& report, const ShownPlaces& shown, const std::vector<SentRow>& rows) {
  Table table{.caption = "Bytes that a rank sends in a step",
              .heads = heads_of(report, shown, "axis and kind")};
  std::vector<std::int64_t> sums(shown.places.size());
  for (const SentRow& row : rows) {
    std::vector<std::string> cells{escaped(concat(row.axis, ": ", row.what))};
    for (std::size_t i = 0; i < row.bytes.size(); ++i) {
      cells.push_back(bytes_cell(row.bytes[i]));
      sums[i] += row.bytes[i];
    }
    table.rows.push_back(std::move(cells));
  }
  std::vector<std::string> last{"in all"};
  for (const std::int64_t sum : sums) last.push_back(bytes_cell(sum));
  table.rows.push_back(std::move(last));
  return table;
}

struct TimePart {
  std::string colour;
  std::string words;
  double ms;
};

/// In the order of a bar. `compute_ms` counts what is recomputed, too.
std::vector<TimePart> time_parts(const StepTime& time) {
  std::vector<TimePart> parts{{"time0", "computing", time.compute_ms - time.again_ms},
                              {"time1", "recomputing activations", time.again_ms},
                              {"time2", "messages between layers", time.rest_ms},
                              {"time3", "waiting for gathers and reductions", time.waited_ms}};
  double sum = 0;
  for (const TimePart& part : parts) sum += part.ms;
  const double rest = time.step_ms - sum;
  if (rest > 1e-3 * time.step_ms) {
    parts.push_back({"time4", time.bubble ? "waiting for other stages" : "the rest", rest});
  }
  std::erase_if(parts,
                [](const TimePart& part) { return !std::isfinite(part.ms) || part.ms <= 0.0; });
  return parts;
}

}  // namespace

ShownPlaces shown_places(const Report& report) {
  ShownPlaces shown{.of = report.places.size()};
  for (const Place& place : report.places) shown.places.push_back(&place);
  if (shown.of <= kMostPlaces) return shown;
  const auto most = std::ranges::max_element(report.places, {}, &Place::peak);
  shown.places = {&report.places.front(), &*most, &report.places.back()};
  shown.places.erase(std::ranges::unique(shown.places).begin(), shown.places.end());
  return shown;
}

std::string place_name(const Report& report, const Place& place) {
  return report.places.size() == 1 ? concat("rank ", place.rank)
                                   : concat("pp ", place.pp, ", rank ", place.rank);
}

std::int64_t always_held(const Place& place) {
  std::int64_t bytes = 0;
  for (const NamedBytes& one : place.held) bytes += one.what == kActivations ? 0 : one.bytes;
  return bytes;
}

std::string which_places(const ShownPlaces& shown) {
  if (shown.places.size() == shown.of) return "";
  return concat(" Of ", shown.of,
                " places of the pipeline: the first one, the last one and the one "
                "that needs most.");
}

std::string held_picture(const Report& report) {
  const ShownPlaces shown = shown_places(report);
  std::int64_t most = report.memory.value_or(1);
  for (const Place* place : shown.places) {
    most = std::max({most, place->peak, always_held(*place) + held(*place, kActivations)});
  }
  const double whole = 1.04 * static_cast<double>(most);
  constexpr int kRow = 48, kAbove = 20;
  const int height = kAbove + kRow * static_cast<int>(shown.places.size());
  std::string bars;
  for (std::size_t i = 0; i < shown.places.size(); ++i) {
    bars += held_row(report, *shown.places[i], whole, kAbove + kRow * static_cast<int>(i));
  }
  if (report.memory) {
    bars += name_of_limit(report, static_cast<double>(*report.memory) / whole);
  }
  std::vector<LegendEntry> legend;
  for (const std::string& name : parts_of(shown)) {
    const bool is_any =
        std::ranges::any_of(shown.places, [&](const Place* one) { return held(*one, name) > 0; });
    if (is_any) legend.push_back({colour_of_part(name), escaped(name)});
  }
  return concat("<figure>",
                chart("held",
                      "What a rank holds at the most of a step, by part: the table below has the "
                      "numbers",
                      height, bars),
                to_markup(legend), "<figcaption>What a rank holds at the most of a step, by part.",
                which_places(shown), "</figcaption></figure>\n",
                folded({held_table(report, shown)}));
}

std::string sent_picture(const Report& report) {
  const ShownPlaces shown = shown_places(report);
  const auto rows = sent_rows(shown);
  if (rows.empty()) return "<p>A rank sends nothing.</p>\n";
  std::int64_t most = 1;
  for (const SentRow& row : rows) most = std::max(most, *std::ranges::max_element(row.bytes));
  const bool is_one = shown.places.size() == 1;
  const int bar = is_one ? 16 : 7;
  std::string bars;
  int top = 0;
  for (const SentRow& row : rows) {
    bars +=
        concat("<text x=\"0\" y=\"", top + 12, "\"><tspan class=\"strong\">", escaped(row.axis, 12),
               "</tspan> ", escaped(row.what, 40), "</text><text x=\"100%\" y=\"", top + 12,
               "\" class=\"end\">", is_one ? "" : "up to ",
               size_text(*std::ranges::max_element(row.bytes)), "</text>\n");
    top += 18;
    for (std::size_t i = 0; i < row.bytes.size(); ++i, top += bar + 2) {
      const double share = static_cast<double>(row.bytes[i]) / static_cast<double>(most);
      bars += concat("<rect y=\"", top, "\" width=\"", percent(share), "\" height=\"", bar,
                     "\" class=\"", colour_of_axis(row.axis), "\"><title>",
                     place_name(report, *shown.places[i]), ": ", size_text(row.bytes[i]),
                     "</title></rect>\n");
    }
    top += 12;
  }
  return concat(
      "<figure>",
      chart("sent",
            "Bytes that a rank sends in a step, by axis and kind: the table below has the numbers",
            top, bars),
      "<figcaption>Bytes that a rank sends in a step, by axis and kind",
      is_one ? "." : ", a bar a place of the pipeline, the first one on top.", which_places(shown),
      report.knows_tokens ? "" : " Without messages of activations.", "</figcaption></figure>\n",
      folded({sent_table(report, shown, rows)}));
}

std::string time_picture(const Report& report) {
  const StepTime& time = *report.time;
  const auto parts = time_parts(time);
  double sum = 0;
  for (const TimePart& part : parts) sum += part.ms;
  const double whole = std::max(sum, 1e-12);
  std::string bar;
  double x = 0;
  std::vector<LegendEntry> legend;
  Table table{.caption = "A step's time by part", .heads = {"part", "ms", "of a step"}};
  for (const TimePart& part : parts) {
    const double share = part.ms / whole, of_step = part.ms / time.step_ms;
    bar += concat("<rect x=\"", percent(x), "\" width=\"", percent(share),
                  "\" height=\"34\" class=\"", part.colour, "\"><title>", part.words, ": ",
                  time_text(part.ms), "</title></rect>\n");
    x += share;
    legend.push_back({part.colour, concat(part.words, " <b>", time_text(part.ms), "</b> (",
                                          percent_text(of_step), ")")});
    table.rows.push_back({part.words, coordinate(part.ms), percent_text(of_step)});
  }
  table.rows.push_back({"step", coordinate(time.step_ms), "100 %"});
  const bool is_more = sum > 1.001 * time.step_ms;
  return concat(
      "<figure>", chart("time", "A step's time by part: the list below has the numbers", 34, bar),
      to_markup(legend), "<figcaption>A step takes ", time_text(time.step_ms), " by ",
      escaped(time.by), ".",
      time.bubble ? concat(" Ranks of the pipeline wait for each other ",
                           percent_text(*time.bubble), " of its schedule.")
                  : "",
      is_more ? " Parts overlap, or are of different ranks: together they are more than the "
                "step."
              : "",
      " Products of weights and attention alone are counted: a lower bound.",
      "</figcaption></figure>\n", folded({table}));
}

}  // namespace tessera::check
