// The printed form of contracts: aligned columns, and every reason once, below, by its number.
#include <algorithm>
#include <array>

#include "tessera/contract.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::size_t kColumns = 10;
using Row = std::array<std::string, kColumns>;

/// Numbers the distinct reasons in order of first use.
class Legend {
 public:
  std::string mark(const std::string& reason) {
    if (reason.empty()) return "";
    const auto found = std::find(reasons_.begin(), reasons_.end(), reason);
    const auto index = static_cast<std::size_t>(found - reasons_.begin());
    if (found == reasons_.end()) reasons_.push_back(reason);
    return concat(" (", index + 1, ")");
  }
  std::string print() const {
    std::string text;
    for (std::size_t index = 0; index < reasons_.size(); ++index) {
      text += concat("(", index + 1, ") ", reasons_[index], "\n");
    }
    return text;
  }

 private:
  std::vector<std::string> reasons_;
};

std::string shape_text(const std::vector<std::int64_t>& shape) {
  if (shape.empty()) return "scalar";
  std::string text;
  for (const std::int64_t size : shape) text += concat(text.empty() ? "" : "x", size);
  return text;
}

std::string name_text(const GradContract& contract) {
  std::string text = contract.name;
  for (const std::string& alias : contract.aliases) text += " = " + alias;
  return text;
}

Row row_of(const GradContract& contract, Legend& legend) {
  const auto cell = [&](std::string_view value, ContractField field) {
    return std::string(value) + legend.mark(contract.reason(field));
  };
  Row row;
  row[0] = name_text(contract);
  row[1] = shape_text(contract.shape);
  row[2] = cell(contract.trainable ? "trainable" : "frozen", ContractField::kTrainable);
  row[3] = cell(to_string(contract.storage.dtype), ContractField::kStorage);
  row[4] = cell(to_string(contract.compute.dtype), ContractField::kCompute);
  if (contract.trainable) {
    row[5] = cell(contract.grad ? to_string(*contract.grad) : "unrounded", ContractField::kGrad);
    row[6] = cell(to_string(contract.accumulate), ContractField::kAccumulate);
    row[7] = cell(to_string(contract.reduce), ContractField::kReduce);
    row[8] = cell(to_string(contract.final), ContractField::kFinal);
    row[9] = to_string(contract.reductions);
  } else {
    std::fill(row.begin() + 5, row.end(), "-");
  }
  return row;
}

}  // namespace

std::string to_string(const std::vector<GradContract>& contracts) {
  Legend legend;
  std::vector<Row> rows{{"parameter", "shape", "trained", "storage", "compute", "grad",
                         "accumulate", "reduce", "final", "reductions"}};
  for (const GradContract& contract : contracts) rows.push_back(row_of(contract, legend));
  std::array<std::size_t, kColumns> width{};
  for (const Row& row : rows) {
    for (std::size_t c = 0; c < kColumns; ++c) width[c] = std::max(width[c], row[c].size());
  }
  std::string text;
  for (const Row& row : rows) {
    for (std::size_t c = 0; c + 1 < kColumns; ++c) {
      text += row[c] + std::string(width[c] + 2 - row[c].size(), ' ');
    }
    text += row[kColumns - 1] + "\n";
  }
  return text + legend.print();
}

}  // namespace tessera
