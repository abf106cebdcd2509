#include "base/text/wrapped.h"

#include <algorithm>

namespace tessera {

std::string wrapped(std::string_view text, std::size_t indent, std::size_t columns) {
  std::string out(indent, ' ');
  std::size_t column = indent;
  while (!text.empty()) {
    const std::size_t space = std::min(text.find(' '), text.size());
    const std::string_view word = text.substr(0, space);
    if (column > indent && column + 1 + word.size() > columns) {
      out += '\n';
      out.append(indent, ' ');
      column = indent;
    } else if (column > indent) {
      out += ' ';
      ++column;
    }
    out += word;
    column += word.size();
    text.remove_prefix(std::min(space + 1, text.size()));
  }
  return out += '\n';
}

}  // namespace tessera
