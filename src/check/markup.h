// Markup of the page of a check: texts made safe, numbers as people read them, tables.
//
// A page is well formed as XML, too, so that any reader of either can go through it. No
// text of a report comes into it but through escaped(). Pure. Next: page.h, pictures.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::check {

/// Bytes of an escaped text at most: of a name, and of a sentence.
inline constexpr std::size_t kMostName = 100;
inline constexpr std::size_t kMostSentence = 480;

/// `text` for an element or a quoted attribute. What XML does not allow, control characters, broken
/// UTF-8 and characters that turn the direction of writing are shown as \xNN; line ends as spaces.
/// Cut with an ellipsis behind `most` bytes.
std::string escaped(std::string_view text, std::size_t most = kMostName);

/// "19,702,532,500".
std::string grouped(std::int64_t value);
/// "12.3 ms", "3.71 s"; "unknown" for what is no number.
std::string time_text(double ms);
/// A coordinate: at most two digits after the point; 0 for what is no number.
std::string coordinate(double value);
/// "43.21%" of 0.4321, which is held between 0 and 1.
std::string percent(double share);
/// "43 %"; one digit after the point below 10.
std::string percent_text(double share);

/// A number of bytes to copy, and below it one to read.
std::string bytes_cell(std::int64_t bytes);

/// All texts are markup already.
struct Table {
  std::string caption = {};
  std::vector<std::string> heads = {};
  std::vector<std::vector<std::string>> rows = {};  ///< the first cell names the row
};
/// A table that scrolls to the side where a page is narrower.
std::string to_markup(const Table& table);
/// Tables that a reader opens. Long ones are not printed.
enum class Printed { kYes, kNo };
std::string folded(const std::vector<Table>& tables, Printed printed = Printed::kYes);

/// A picture as wide as the page. `id` is one of the page's own, `title` what is read out in its
/// place.
std::string chart(std::string_view id, std::string_view title, int height,
                  std::string_view content);

/// The class of a colour and what it stands for, as markup.
struct LegendEntry {
  std::string colour = {};
  std::string words = {};
};
std::string to_markup(const std::vector<LegendEntry>& legend);

}  // namespace tessera::check
