#include "check/step_memory.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text/printable.h"
#include "check/markup.h"
#include "check/pictures.h"
#include "tessera/error.h"

namespace tessera::check {
namespace {

constexpr std::size_t kMostColumns = 360;  // of a picture
constexpr std::size_t kMostTitled = 160;   // columns in all pictures that say what they are
constexpr std::size_t kMostPasses = 40;    // rows of a table
constexpr double kTop = 1000.0;            // of a picture's own coordinates, which are scaled

/// The buffers of gathers and reductions: passes are counted without them.
bool is_pool(std::string_view what) { return what == "unsharded peak" || what == "reductions"; }

/// Bytes of what is always held that a pass counts, too.
std::int64_t counted_in_passes(const Place& place) {
  std::int64_t bytes = 0;
  for (const NamedBytes& one : place.held) {
    bytes += one.what == kActivations || is_pool(one.what) ? 0 : one.bytes;
  }
  return bytes;
}

std::string word_of(bool is_forward) { return is_forward ? "forward" : "backward"; }

/// A pass as it is drawn, in bytes on top of what is always held.
struct Column {
  std::string unit = {};  ///< of the first pass, where it stands for more than one
  bool is_forward = true;
  double begin = 0, most = 0, end = 0;
};

bool is_inside(std::string_view unit, std::string_view outer) {
  return outer == unit_label("") ||
         (unit.starts_with(outer) && unit.substr(outer.size()).starts_with('.'));
}

/// [Note: passes in passes] Passes are ordered by their ends, so that a unit follows those inside
/// it. Its own work is a column of its own, after theirs in a forward (the head of a model is of
/// its root) and before them in a backward. Its most is counted there, unless one inside it reached
/// as much.
std::vector<Column> columns_of(const Place& place) {
  struct Ended {
    const HeldInPass* pass;
    std::size_t first;  ///< its first column
  };
  const auto above = [base = counted_in_passes(place)](std::int64_t bytes) {
    return static_cast<double>(std::max<std::int64_t>(0, bytes - base));
  };
  std::vector<Column> columns;
  std::vector<Ended> ended;
  for (const HeldInPass& pass : place.passes) {
    std::size_t first = columns.size();
    std::int64_t inside = 0;
    while (!ended.empty() && ended.back().pass->is_forward == pass.is_forward &&
           ended.back().pass->unit != pass.unit && is_inside(ended.back().pass->unit, pass.unit)) {
      first = ended.back().first;
      inside = std::max(inside, ended.back().pass->most);
      ended.pop_back();
    }
    Column own{pass.unit, pass.is_forward, above(pass.before), above(pass.most), above(pass.after)};
    if (first < columns.size()) {
      if (pass.is_forward) own.begin = columns.back().end;
      if (!pass.is_forward) own.end = columns[first].begin;
      if (inside >= pass.most) own.most = std::max(own.begin, own.end);
    }
    const std::size_t at = pass.is_forward ? columns.size() : first;
    columns.insert(columns.begin() + static_cast<std::ptrdiff_t>(at), std::move(own));
    ended.push_back({&pass, first});
  }
  return columns;
}

/// As many passes as one column as it takes to have at most kMostColumns.
std::size_t passes_in_column(std::size_t passes) {
  return std::max<std::size_t>(1, (passes + kMostColumns - 1) / kMostColumns);
}

std::vector<Column> merged(const std::vector<Column>& columns) {
  const std::size_t step = passes_in_column(columns.size());
  std::vector<Column> few;
  for (std::size_t i = 0; i < columns.size(); ++i) {
    if (i % step == 0) few.push_back(columns[i]);
    few.back().most = std::max(few.back().most, columns[i].most);
    few.back().end = columns[i].end;
  }
  return few;
}

/// The plot of one place: its columns, and what is up at its upper edge.
struct Plot {
  const Place& place;
  std::vector<Column> columns = {};
  double top = 1.0;                   ///< bytes
  std::optional<double> memory = {};  ///< the line, where it is within

  std::string y(double bytes) const {
    return concat(std::lround(kTop - kTop * std::clamp(bytes / top, 0.0, 1.0)));
  }
};

double highest(const std::vector<Column>& columns) {
  double most = 0;
  for (const Column& column : columns) most = std::max(most, column.most);
  return most;
}

/// `common`: the most of all places, which share one scale.
Plot plot_of(const Report& report, const Place& place, double common) {
  Plot plot{.place = place, .columns = merged(columns_of(place))};
  plot.top = std::max(common, 1.0) * 1.08;
  if (report.memory) {
    const auto left = static_cast<double>(*report.memory - always_held(place));
    if (left > 0 && left < 1.3 * common) {
      plot.memory = left;
      plot.top = std::max(plot.top, left * 1.08);
    }
  }
  return plot;
}

std::string areas(const Plot& plot) {
  std::string most = concat("M0 ", kTop), kept = concat("M0 ", kTop, "L");
  for (std::size_t i = 0; i < plot.columns.size(); ++i) {
    const Column& column = plot.columns[i];
    most += concat("V", plot.y(column.most), "H", i + 1);
    kept += concat(i, " ", plot.y(column.begin), " ", i + 1, " ", plot.y(column.end), " ");
  }
  const std::size_t count = plot.columns.size();
  return concat("<path class=\"passing\" d=\"", most, "V", kTop,
                "z\"/>\n<path class=\"part6\" d=\"", kept, count, " ", kTop, "z\"/>\n");
}

/// The title that a pointer finds over a column.
std::string titles(const Plot& plot) {
  std::string text;
  for (std::size_t i = 0; i < plot.columns.size(); ++i) {
    const Column& column = plot.columns[i];
    const auto size = [](double bytes) { return size_text(static_cast<std::int64_t>(bytes)); };
    text +=
        concat("<rect class=\"pointed\" x=\"", i, "\" width=\"1\" height=\"", kTop, "\"><title>",
               word_of(column.is_forward), " of ", escaped(column.unit), ": +", size(column.begin),
               " to +", size(column.end), ", at most +", size(column.most), "</title></rect>\n");
  }
  return text;
}

/// Which columns are of forwards and which of backwards.
std::string directions(const Plot& plot) {
  std::array<std::string, 2> paths;
  for (std::size_t i = 0; i < plot.columns.size();) {
    std::size_t end = i;
    while (end < plot.columns.size() &&
           plot.columns[end].is_forward == plot.columns[i].is_forward) {
      ++end;
    }
    paths.at(plot.columns[i].is_forward ? 0 : 1) += concat("M", i, " 0H", end, "V1H", i, "z");
    i = end;
  }
  return concat("<path class=\"forward\" d=\"", paths[0], "\"/><path class=\"backward\" d=\"",
                paths[1], "\"/>");
}

/// A power of two that parts the height into three to six.
double grid_step(double top) { return std::exp2(std::floor(std::log2(top / 3.0))); }

constexpr int kPlotTop = 22, kPlotHeight = 170, kBaseHeight = 26;

std::string grid(const Plot& plot) {
  std::string text;
  const double step = grid_step(plot.top);
  for (double bytes = step; step >= 1.0 && bytes < 0.97 * plot.top; bytes += step) {
    const std::string y = coordinate(kPlotTop + kPlotHeight * (1.0 - bytes / plot.top));
    text += concat("<line x1=\"0\" x2=\"100%\" y1=\"", y, "\" y2=\"", y,
                   "\" class=\"grid\"/><text x=\"4\" y=\"", y, "\" dy=\"-3\" class=\"tick\">+",
                   size_text(static_cast<std::int64_t>(bytes)), "</text>\n");
  }
  return text;
}

std::string peak_mark(const Plot& plot) {
  const auto most = std::ranges::max_element(plot.columns, {}, &Column::most);
  const double share = (static_cast<double>(most - plot.columns.begin()) + 0.5) /
                       static_cast<double>(plot.columns.size());
  const double y = kPlotTop + kPlotHeight * (1.0 - most->most / plot.top);
  const std::string x = percent(share);
  return concat("<line x1=\"", x, "\" x2=\"", x, "\" y1=\"16\" y2=\"", coordinate(y),
                "\" class=\"mark\"/><text x=\"", x, "\" y=\"12\" class=\"strong ",
                share > 0.66   ? "end"
                : share > 0.33 ? "middle"
                               : "",
                "\">most: ", size_text(plot.place.peak), "</text>\n");
}

std::string limit_of(const Report& report, const Plot& plot) {
  if (!plot.memory) return "";
  const std::string y = coordinate(kPlotTop + kPlotHeight * (1.0 - *plot.memory / plot.top));
  return concat("<line x1=\"0\" x2=\"100%\" y1=\"", y, "\" y2=\"", y,
                "\" class=\"limit\"/><text x=\"100%\" y=\"", y,
                "\" dy=\"-4\" class=\"limit-text end\">memory of a rank: ",
                size_text(*report.memory), "</text>\n");
}

/// A sentence where the line of memory is not within the plot.
std::string about_memory(const Report& report, const Plot& plot) {
  if (!report.memory || plot.memory) return "";
  const std::int64_t left = *report.memory - always_held(plot.place);
  if (left <= 0) {
    return concat(" What is always held is more than the memory of a rank, ",
                  size_text(*report.memory), ".");
  }
  return concat(" The memory of a rank, ", size_text(*report.memory), ", is beyond the top.");
}

std::string in_few_words(const Report& report, const Plot& plot) {
  const auto most = std::ranges::max_element(plot.columns, {}, &Column::most);
  const bool is_one = passes_in_column(plot.place.passes.size()) == 1;
  return concat(place_name(report, plot.place), ": ", size_text(always_held(plot.place)),
                " always held, at most ", size_text(plot.place.peak), ", in ",
                is_one ? "the " : "or near a ", word_of(most->is_forward), " of ",
                escaped(most->unit));
}

std::string step_picture(const Report& report, const Plot& plot, bool has_titles) {
  const std::string box = concat("viewBox=\"0 0 ", plot.columns.size(), " ");
  constexpr int kBase = kPlotTop + kPlotHeight;
  const bool is_over = report.memory && *report.memory < always_held(plot.place);
  std::string text = concat("<svg y=\"", kPlotTop, "\" width=\"100%\" height=\"", kPlotHeight,
                            "\" ", box, kTop, "\" preserveAspectRatio=\"none\">", areas(plot),
                            has_titles ? titles(plot) : "", "</svg>\n", grid(plot));
  text += peak_mark(plot) + limit_of(report, plot);
  text += concat("<rect y=\"", kBase, "\" width=\"100%\" height=\"", kBaseHeight, "\" class=\"",
                 is_over ? "base over" : "base", "\"/><text x=\"4\" y=\"", kBase + 17,
                 "\">always held: ", size_text(always_held(plot.place)),
                 " (not to scale)</text>\n<svg y=\"", kBase + kBaseHeight + 4,
                 "\" width=\"100%\" height=\"8\" ", box, "1\" preserveAspectRatio=\"none\">",
                 directions(plot), "</svg>");
  return chart(concat("step", plot.place.pp),
               concat("Memory over a step of ", in_few_words(report, plot)),
               kBase + kBaseHeight + 14, text);
}

/// All passes of a unit in one direction.
struct PassRow {
  std::string name = {};
  std::int64_t count = 0;
  std::int64_t most = 0;
  std::int64_t kept = 0;  ///< from before to after, in the last one
};

std::vector<PassRow> pass_rows(const Place& place) {
  std::vector<PassRow> rows;
  std::map<std::string, std::size_t> known;
  for (const HeldInPass& pass : place.passes) {
    const std::string name = concat(word_of(pass.is_forward), " of ", pass.unit);
    const auto [at, is_new] = known.emplace(name, rows.size());
    if (is_new) rows.push_back({.name = name});
    PassRow& row = rows[at->second];
    ++row.count;
    row.most = std::max(row.most, pass.most);
    row.kept = pass.after - pass.before;
  }
  return rows;
}

Table pass_table(const Report& report, const Place& place) {
  auto rows = pass_rows(place);
  const std::size_t all = rows.size();
  if (all > kMostPasses) {
    std::vector<std::int64_t> most;
    for (const PassRow& row : rows) most.push_back(row.most);
    std::ranges::nth_element(most, most.begin() + (kMostPasses - 1), std::greater<>());
    const std::int64_t least = most[kMostPasses - 1];
    std::erase_if(rows, [&](const PassRow& row) { return row.most < least; });
    rows.resize(std::min(rows.size(), kMostPasses));
  }
  Table table{
      .caption = concat("Passes of ", place_name(report, place),
                        all > rows.size() ? concat(": the ", rows.size(), " of ", all,
                                                   " that need most (--json has all)")
                                          : ""),
      .heads = {"pass", "times", "at most", "on top of what is always held", "kept behind it"}};
  const std::int64_t base = counted_in_passes(place), pool = always_held(place) - base;
  for (const PassRow& row : rows) {
    table.rows.push_back({escaped(row.name), grouped(row.count), bytes_cell(row.most + pool),
                          bytes_cell(row.most - base), bytes_cell(row.kept)});
  }
  return table;
}

}  // namespace

std::string step_memory(const Report& report) {
  const ShownPlaces shown = shown_places(report);
  std::size_t columns = 0, merged_passes = 1;
  double common = 0;
  for (const Place* place : shown.places) {
    const auto all = columns_of(*place);
    common = std::max(common, highest(all));
    columns += all.size();
    merged_passes = std::max(merged_passes, passes_in_column(all.size()));
  }
  if (columns == 0) return "";
  std::string text;
  std::vector<Table> tables;
  for (const Place* place : shown.places) {
    if (place->passes.empty()) continue;
    const Plot plot = plot_of(report, *place, common);
    text += concat("<figure>", step_picture(report, plot, columns <= kMostTitled), "<figcaption>",
                   in_few_words(report, plot), ".", about_memory(report, plot),
                   "</figcaption></figure>\n");
    tables.push_back(pass_table(report, *place));
  }
  text += to_markup({{"part6", "kept from pass to pass"},
                     {"passing", "at most within a pass"},
                     {"base", "always held"},
                     {"forward", "forward"},
                     {"backward", "backward"}});
  text += concat(
      "<p class=\"note\">Passes of units from left to right, as wide as each other: no time. ",
      merged_passes > 1 ? concat("Up to ", merged_passes, " passes are one column. ") : "",
      "Blocks of gathers and reductions count as held all the time.", which_places(shown),
      "</p>\n");
  return text + folded(tables, Printed::kNo);
}

}  // namespace tessera::check
