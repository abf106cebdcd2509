#include "check/markup.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iomanip>
#include <sstream>

#include "base/text/printable.h"
#include "base/text/three_digits.h"
#include "tessera/error.h"

namespace tessera::check {
namespace {

constexpr std::string_view kEllipsis = "\u2026";

std::string hex_of(std::string_view bytes) {
  static constexpr std::string_view kHex = "0123456789abcdef";
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    text += {'\\', 'x', kHex[byte >> 4U], kHex[byte & 0xFU]};
  }
  return text;
}

/// Noncharacters, which XML does not allow; marks that turn the direction of writing or part lines.
bool is_shown_in_hex(std::string_view character) {
  if (character.size() != 3) return false;
  static constexpr std::array<std::string_view, 4> kMarks{"\u200e", "\u200f", "\u2028", "\u2029"};
  return character == "\xEF\xBF\xBE" || character == "\xEF\xBF\xBF" ||
         std::ranges::find(kMarks, character) != kMarks.end() ||
         (character >= "\u202a" && character <= "\u202e") ||
         (character >= "\u2066" && character <= "\u2069");
}

/// `piece`: one character, or \xNN.
std::string safe(const std::string& piece) {
  if (piece.size() == 1) {
    switch (piece[0]) {
      case '&':
        return "&amp;";
      case '<':
        return "&lt;";
      case '>':
        return "&gt;";
      case '"':
        return "&quot;";
      case '\'':
        return "&#39;";
      case '\n':
      case '\r':
      case '\t':
        return " ";
      default:
        return piece;
    }
  }
  return is_shown_in_hex(piece) ? hex_of(piece) : piece;
}

std::string row_of(const std::vector<std::string>& cells) {
  std::string text = "<tr>";
  for (std::size_t i = 0; i < cells.size(); ++i) {
    text += i == 0 ? concat("<th scope=\"row\">", cells[i], "</th>")
                   : concat("<td>", cells[i], "</td>");
  }
  return text + "</tr>\n";
}

}  // namespace

std::string escaped(std::string_view text, std::size_t most) {
  std::string out;
  ByteText bytes;
  bool is_cut = false;
  const auto add = [&](const std::string& shown) {
    // A byte that breaks off a character gives two things: \xNN for each of its bytes, then itself.
    const std::size_t broken = shown.starts_with("\\x") ? shown.size() - shown.size() % 4 : 0;
    const std::string piece = shown.substr(0, broken) + safe(shown.substr(broken));
    is_cut = is_cut || out.size() + piece.size() > most;
    if (!is_cut) out += piece;
  };
  for (std::size_t i = 0; i < text.size() && !is_cut; ++i) {
    add(bytes.add(static_cast<unsigned char>(text[i])));
  }
  if (!is_cut) add(bytes.finish());
  return is_cut ? concat(out, kEllipsis) : out;
}

std::string grouped(std::int64_t value) {
  std::string text = std::to_string(value);
  const std::size_t first = text.starts_with('-') ? 1 : 0;
  for (std::size_t at = text.size(); at > first + 3;) text.insert(at -= 3, ",");
  return text;
}

std::string time_text(double ms) {
  if (!std::isfinite(ms) || ms < 0.0) return "unknown";
  return ms < 999.5 ? concat(three_digits(ms), " ms") : concat(three_digits(ms / 1e3), " s");
}

std::string coordinate(double value) {
  if (!std::isfinite(value)) return "0";
  std::ostringstream text;
  text << std::fixed << std::setprecision(2) << value;
  std::string digits = text.str();
  digits.erase(digits.find_last_not_of('0') + 1);
  if (digits.ends_with('.')) digits.pop_back();
  return digits == "-0" ? "0" : digits;
}

std::string percent(double share) {
  return concat(coordinate(std::isfinite(share) ? 100.0 * std::clamp(share, 0.0, 1.0) : 0.0), "%");
}

std::string percent_text(double share) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(share < 0.0995 ? 1 : 0)
       << (std::isfinite(share) ? 100.0 * share : 0.0) << " %";
  return text.str();
}

std::string bytes_cell(std::int64_t bytes) {
  if (bytes < 1024) return grouped(bytes);
  return concat(grouped(bytes), "<small>", size_text(bytes), "</small>");
}

std::string to_markup(const Table& table) {
  std::string text = concat("<div class=\"wide\" tabindex=\"0\"><table><caption>", table.caption,
                            "</caption>\n<thead><tr>");
  for (const std::string& head : table.heads) text += concat("<th scope=\"col\">", head, "</th>");
  text += "</tr></thead>\n<tbody>\n";
  for (const auto& row : table.rows) text += row_of(row);
  return text + "</tbody></table></div>\n";
}

std::string folded(const std::vector<Table>& tables, Printed printed) {
  std::string text = concat(printed == Printed::kYes ? "<details>" : "<details class=\"long\">",
                            "<summary>Exact numbers</summary>\n");
  for (const Table& table : tables) text += to_markup(table);
  return text + "</details>\n";
}

std::string chart(std::string_view id, std::string_view title, int height,
                  std::string_view content) {
  return concat("<svg class=\"chart\" width=\"100%\" height=\"", height,
                "\" role=\"img\" aria-labelledby=\"", id, "\"><title id=\"", id, "\">", title,
                "</title>\n", content, "</svg>\n");
}

std::string to_markup(const std::vector<LegendEntry>& legend) {
  std::string text = "<ul class=\"legend\">";
  for (const LegendEntry& entry : legend) {
    text += concat("<li><span class=\"swatch ", entry.colour, "\"></span><span>", entry.words,
                   "</span></li>\n");
  }
  return text + "</ul>\n";
}

}  // namespace tessera::check
