// Tables of contracts as text: aligned columns, and every reason once, below, by its number.
#pragma once

#include <string>
#include <vector>

namespace tessera::grad {

/// Numbers the distinct reasons in order of first use.
class Legend {
 public:
  /// " (3)"; nothing for no reason.
  std::string mark(const std::string& reason);
  std::string print() const;

 private:
  std::vector<std::string> reasons_;
};

using Row = std::vector<std::string>;
/// A line a row, the last column without padding. All rows have as many cells as the first.
std::string aligned(const std::vector<Row>& rows);

}  // namespace tessera::grad
