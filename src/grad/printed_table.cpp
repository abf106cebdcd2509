#include "grad/printed_table.h"

#include <algorithm>

#include "tessera/error.h"

namespace tessera::grad {

std::string Legend::mark(const std::string& reason) {
  if (reason.empty()) return "";
  const auto found = std::find(reasons_.begin(), reasons_.end(), reason);
  const auto index = static_cast<std::size_t>(found - reasons_.begin());
  if (found == reasons_.end()) reasons_.push_back(reason);
  return concat(" (", index + 1, ")");
}

std::string Legend::print() const {
  std::string text;
  for (std::size_t index = 0; index < reasons_.size(); ++index) {
    text += concat("(", index + 1, ") ", reasons_[index], "\n");
  }
  return text;
}

std::string aligned(const std::vector<Row>& rows) {
  std::vector<std::size_t> width;
  for (const Row& row : rows) {
    width.resize(std::max(width.size(), row.size()));
    for (std::size_t c = 0; c < row.size(); ++c) width[c] = std::max(width[c], row[c].size());
  }
  std::string text;
  for (const Row& row : rows) {
    for (std::size_t c = 0; c + 1 < row.size(); ++c) {
      text += row[c] + std::string(width[c] + 2 - row[c].size(), ' ');
    }
    text += row.back() + "\n";
  }
  return text;
}

}  // namespace tessera::grad
