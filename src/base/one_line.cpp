#include "base/one_line.h"

namespace tessera {
namespace {

// What begins the stack that c10::Error appends to its message.
constexpr std::string_view kStack = "\nException raised from ";

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

}  // namespace

std::string one_line(std::string_view what) {
  what = what.substr(0, what.find(kStack));
  std::string line;
  for (std::size_t i = 0; i < what.size();) {
    std::size_t end = i;
    while (end < what.size() && is_space(what[end])) ++end;
    const std::string_view gap = what.substr(i, end - i);
    if (gap.find('\n') == gap.npos) {
      line += gap;  // spaces within a line stay as they are
    } else if (!line.empty() && end < what.size()) {
      line += ' ';
    }
    if (end < what.size()) line += what[end++];
    i = end;
  }
  return line;
}

}  // namespace tessera
