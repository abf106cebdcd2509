#include "check/page.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/text/count_text.h"
#include "base/text/printable.h"
#include "check/markup.h"
#include "check/pictures.h"
#include "check/schedule_picture.h"
#include "check/step_memory.h"
#include "tessera/error.h"

namespace tessera::check {
namespace {

constexpr std::size_t kMostFindings = 50;
constexpr std::size_t kOpenFindings = 6;  // those that a reader sees first
constexpr std::size_t kMostLines = 40;    // of notes, and of what was compared

// Colours in pairs, on white and on dark.
constexpr std::string_view kStyle = R"(
:root { color-scheme: light dark;
  --paper: #ffffff; --card: #f5f7fa; --ink: #1b2330; --soft: #566173; --line: #d8dee8;
  --good: #0f7a48; --good-back: #e5f5ec; --bad: #bd1f3a; --bad-back: #fdebee;
  --c0: #2f66b3; --c1: #7fb0e6; --c2: #6a51a8; --c3: #a895d6; --c4: #14866f; --c5: #7cc9b2;
  --c6: #ec8f1f; --c6-soft: #f8d9a8; --c7: #d4536a; --c8: #a7b0be; --base: #dfe5ee; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #10141b; --card: #1a202b; --ink: #e7ebf2; --soft: #a3aec0; --line: #313a49;
  --good: #58d199; --good-back: #13301f; --bad: #ff8092; --bad-back: #3a1a21;
  --c0: #5b93e0; --c1: #a5cbf4; --c2: #9079d6; --c3: #c3b3ea; --c4: #2fae92; --c5: #97dcc7;
  --c6: #f2a33a; --c6-soft: #6b4d1f; --c7: #e5788c; --c8: #6d788a; --base: #2a3240; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  overflow-wrap: anywhere; }
header, main, footer { max-width: 1080px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 36px; }
h1 { font-size: clamp(1.5rem, 4vw, 2.1rem); line-height: 1.2; margin: 0 0 6px; }
h2 { font-size: 1.25rem; margin: 44px 0 12px; padding-top: 14px; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 28px 0 4px; }
p { margin: 8px 0; }
.soft, figcaption, .note, footer, caption, summary { color: var(--soft); font-size: 0.875rem; }
code { font: 0.875em ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  list-style: none; margin: 22px 0 0; padding: 0; }
.tiles li { background: var(--card); border-radius: 10px; padding: 12px 16px;
  border-left: 4px solid var(--line); }
.tiles .good { border-color: var(--good); background: var(--good-back); }
.tiles .bad { border-color: var(--bad); background: var(--bad-back); }
.tiles b { display: block; font-size: 1.6rem; line-height: 1.25; }
.tiles .good b { color: var(--good); }
.tiles .bad b { color: var(--bad); }
.tiles span { display: block; color: var(--soft); font-size: 0.875rem; }
.findings { list-style: none; margin: 0; padding: 0; }
.findings li { border: 1px solid var(--line); border-left: 4px solid var(--bad); border-radius: 8px;
  padding: 10px 16px; margin: 12px 0; }
.findings h3 { margin: 0; }
.kind { display: inline-block; background: var(--bad-back); color: var(--bad); border-radius: 5px;
  padding: 0 8px; margin-right: 8px; font-size: 0.8125rem; }
dl { display: grid; grid-template-columns: 6.5em 1fr; gap: 2px 12px; margin: 8px 0 0; }
dt { color: var(--soft); }
dd { margin: 0; }
.mend { font-weight: 600; }
figure { margin: 16px 0 20px; break-inside: avoid; }
figcaption { margin-top: 6px; }
svg { display: block; max-width: 100%; }
.wide svg { max-width: none; }
.chart { overflow: visible; }
svg text { font-size: 12px; fill: var(--ink); }
svg .soft { fill: var(--soft); }
svg .strong { font-weight: 600; }
svg .end { text-anchor: end; }
svg .middle { text-anchor: middle; }
.tick, .limit-text, .haloed, .strong { paint-order: stroke; stroke: var(--paper); stroke-width: 3px;
  stroke-linejoin: round; }
svg .tick { fill: var(--soft); }
.grid { stroke: var(--line); stroke-dasharray: 2 3; }
.limit-back { stroke: var(--paper); stroke-width: 6; }
.limit { stroke: var(--bad); stroke-width: 2; stroke-dasharray: 6 4; }
svg .limit-text { fill: var(--bad); font-weight: 600; }
.mark { stroke: var(--ink); }
.pointed { fill: transparent; }
.pointed:hover { fill: var(--ink); fill-opacity: 0.15; }
.part0, .time0, .axis-dp { fill: var(--c0); background: var(--c0); }
.part1, .time1, .forward { fill: var(--c1); background: var(--c1); }
.part2, .axis-pp, .backward { fill: var(--c2); background: var(--c2); }
.part3 { fill: var(--c3); background: var(--c3); }
.part4, .axis-ep { fill: var(--c4); background: var(--c4); }
.part5, .axis-cp { fill: var(--c5); background: var(--c5); }
.part6, .time2, .axis-tp { fill: var(--c6); background: var(--c6); }
.passing { fill: var(--c6-soft); background: var(--c6-soft); }
.time3 { fill: var(--c7); background: var(--c7); }
.other, .time4 { fill: var(--c8); background: var(--c8); }
.base { fill: var(--base); background: var(--base); }
.over { fill: var(--bad-back); stroke: var(--bad); }
.slots rect { stroke: var(--paper); }
.slots .numbers text { fill: #14181f; font-size: 11px; text-anchor: middle; pointer-events: none; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; margin: 8px 0 0; padding: 0;
  font-size: 0.875rem; }
.legend li { display: flex; align-items: center; gap: 7px; }
.swatch { flex: none; width: 12px; height: 12px; border-radius: 3px; }
.wide { overflow-x: auto; }
details { margin: 8px 0; }
summary { cursor: pointer; }
table { border-collapse: collapse; font-size: 0.875rem; margin: 10px 0 18px; }
caption { text-align: left; padding-bottom: 4px; }
th, td { padding: 4px 14px 4px 0; text-align: right; vertical-align: top;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th { font-weight: 600; }
th:first-child { text-align: left; min-width: 9em; overflow-wrap: anywhere; }
td small { display: block; color: var(--soft); }
footer { margin-top: 48px; padding-bottom: 36px; }
@media (max-width: 520px) { dl { grid-template-columns: 1fr; } dt { margin-top: 6px; }
  header, main, footer { padding: 0 14px; } }
@media print { body { font-size: 11pt; } h2, h3 { break-after: avoid; } .findings li { break-inside: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .wide { overflow: visible; } .wide svg { max-width: 100%; height: auto; }
  details::details-content { content-visibility: visible; height: auto; }
  summary, .long { display: none; } }
)";

/// "qwen3-30b-a3b" of ".../qwen3-30b-a3b/config.json".
std::string short_name(std::string_view model) {
  constexpr std::string_view kFile = "/config.json";
  if (model.ends_with(kFile)) model.remove_suffix(kFile.size());
  while (model.size() > 1 && model.ends_with('/')) model.remove_suffix(1);
  const std::string_view last = model.substr(model.find_last_of('/') + 1);
  return escaped(last.empty() ? "a model" : last);
}

std::string head(const Report& report) {
  return concat(
      "<!DOCTYPE html>\n<html lang=\"en\" xmlns=\"http://www.w3.org/1999/xhtml\">\n<head>\n"
      "<meta charset=\"utf-8\"/>\n<meta name=\"viewport\" content=\"width=device-width\"/>\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src &#39;none&#39;; "
      "style-src "
      "&#39;unsafe-inline&#39;\"/>\n<title>",
      short_name(report.model), " on ", count_text(report.world, "rank"),
      ": tessera check</title>\n<style>", kStyle, "</style>\n</head>\n");
}

enum class Tone { kPlain, kGood, kBad };

std::string tile(Tone tone, std::string_view above, const std::string& value,
                 const std::string& below) {
  const std::string_view name = tone == Tone::kGood ? "good" : tone == Tone::kBad ? "bad" : "plain";
  return concat("<li class=\"", name, "\"><span>", above, "</span><b>", value, "</b><span>", below,
                "</span></li>\n");
}

std::string memory_tile(const Report& report) {
  std::int64_t most = 0;
  for (const Place& place : report.places) most = std::max(most, place.peak);
  const std::string without = report.knows_tokens ? "" : ", without activations";
  if (!report.memory) {
    return tile(Tone::kPlain, "memory of a rank", size_text(most), concat("at most", without));
  }
  const std::string of = concat("at most, of ", size_text(*report.memory), " (",
                                escaped(report.memory_from), ")", without);
  return most <= *report.memory
             ? tile(Tone::kGood, "memory of a rank: fits", size_text(most), of)
             : tile(Tone::kBad, "memory of a rank: does not fit", size_text(most), of);
}

std::string totals(const Report& report) {
  std::string text = "<ul class=\"tiles\">\n";
  const auto count = std::ssize(report.findings);
  text += count == 0 ? tile(Tone::kGood, "findings", "none", "nothing wrong was found")
                     : tile(Tone::kBad, "findings", grouped(count), "see below");
  if (!report.places.empty()) text += memory_tile(report);
  if (report.time) {
    text += tile(Tone::kPlain, "a step", time_text(report.time->step_ms),
                 concat("at least, by ", escaped(report.time->by)));
  }
  return text + tile(Tone::kPlain, "ranks", grouped(report.world), "checked, none was started") +
         "</ul>\n";
}

std::string to_markup(const Finding& finding) {
  std::string text = concat("<li><h3><span class=\"kind\">", to_string(finding.kind), "</span>");
  const std::string& name = !finding.parameter.empty() ? finding.parameter
                            : !finding.unit.empty()    ? finding.unit
                                                       : finding.operation;
  text += concat("<code>", escaped(name, kMostSentence), "</code></h3>\n<dl>");
  const auto row = [&](std::string_view term, const std::string& value, std::string_view how) {
    if (value.empty() || &value == &name) return;
    text += concat("<dt>", term, "</dt><dd", how, ">", escaped(value, kMostSentence), "</dd>\n");
  };
  row("operation", finding.operation, "");
  row("unit", finding.unit, "");
  row("axis", finding.axis, "");
  row("found", finding.found, "");
  row("expected", finding.expected, "");
  row("mend", finding.mend, " class=\"mend\"");
  return text + "</dl></li>\n";
}

std::string list_of(std::span<const Finding> findings) {
  std::string text = "<ul class=\"findings\">\n";
  for (const Finding& finding : findings) text += to_markup(finding);
  return text + "</ul>\n";
}

std::string findings(const Report& report) {
  std::string text = "<h2>Findings</h2>\n";
  const std::span all(report.findings);
  if (all.empty()) return text + "<p>None.</p>\n";
  const std::size_t open = std::min(all.size(), kOpenFindings);
  const std::size_t shown = std::min(all.size(), kMostFindings);
  text += list_of(all.first(open));
  if (shown > open) {
    text += concat("<details><summary>", shown - open, " more</summary>\n",
                   list_of(all.subspan(open, shown - open)), "</details>\n");
  }
  if (shown < all.size()) {
    text += concat("<p>These are the first ", shown, " of ", all.size(),
                   ": <code>--json</code> has all.</p>\n");
  }
  return text;
}

std::string lines(std::string_view heading, const std::vector<std::string>& all) {
  if (all.empty()) return "";
  const std::size_t shown = std::min(all.size(), kMostLines);
  std::string text = concat("<h3>", heading, "</h3>\n<ul>\n");
  for (std::size_t i = 0; i < shown; ++i) {
    text += concat("<li>", escaped(all[i], kMostSentence), "</li>\n");
  }
  if (shown < all.size()) text += concat("<li>and ", all.size() - shown, " more</li>\n");
  return text + "</ul>\n";
}

std::string pictures(const Report& report) {
  if (report.places.empty()) return "";
  std::string text = concat("<h2>Memory</h2>\n", held_picture(report));
  if (!report.knows_tokens) {
    text += "<p>Activations are not counted: <code>training.seq_len</code> is not set.</p>\n";
  }
  const std::string steps = step_memory(report);
  if (!steps.empty()) text += concat("<h3>Over a step</h3>\n", steps);
  text += concat("<h2>Bytes sent</h2>\n", sent_picture(report));
  if (report.time) text += concat("<h2>Time of a step</h2>\n", time_picture(report));
  if (!report.schedule.empty()) {
    text += concat("<h2>Pipeline</h2>\n", schedule_picture(report.schedule));
  }
  return text;
}

}  // namespace

std::string page_of(const Report& report) {
  return concat(
      head(report), "<body>\n<header>\n<h1>", short_name(report.model), " on ",
      count_text(report.world, "rank"), "</h1>\n<p class=\"soft\"><code>",
      escaped(report.model, kMostSentence), "</code></p>\n<p class=\"soft\">Layout: <code>",
      escaped(report.layout, kMostSentence), "</code></p>\n", totals(report), "</header>\n<main>\n",
      findings(report), pictures(report), "<h2>What was checked</h2>\n",
      lines("Compared", report.compared), lines("Worth knowing", report.notes),
      "</main>\n<footer><p>Made by <code>tessera check</code> before a run starts: no weight is "
      "read, no device is used.</p></footer>\n</body>\n</html>\n");
}

}  // namespace tessera::check
