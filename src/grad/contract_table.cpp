// The printed form of contracts: aligned columns, and every reason once, below, by its number.
#include <algorithm>
#include <string>
#include <vector>

#include "base/unit_label.h"
#include "tessera/error.h"
#include "tessera/model_contract.h"

namespace tessera {
namespace {

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

/// A line a row, the last column without padding. All rows have as many cells as the first.
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

std::string shape_cell(const std::vector<std::int64_t>& shape) {
  if (shape.empty()) return "scalar";
  std::string text;
  for (const std::int64_t size : shape) text += concat(text.empty() ? "" : "x", size);
  return text;
}

std::string name_cell(const GradContract& contract) {
  std::string text = contract.name;
  for (const std::string& alias : contract.aliases) text += " = " + alias;
  return text;
}

std::string_view trained_cell(const GradContract& contract) {
  if (contract.trainable) return "trainable";
  return contract.frozen_as == FrozenAs::kReplicate ? "frozen, whole" : "frozen";
}

std::string_view decay_cell(const GradContract& contract) {
  if (!contract.decays) return "unknown";
  return *contract.decays ? "yes" : "no";
}

std::string placement_cell(const ParameterLayout& layout) {
  return layout == ParameterLayout() ? "-" : to_string(layout);
}

/// Without model axes there is nothing to say.
bool has_placements(const std::vector<GradContract>& contracts) {
  return std::any_of(contracts.begin(), contracts.end(),
                     [](const auto& one) { return one.layout != ParameterLayout(); });
}

/// What happens to a gradient before it is added to the slot.
std::string_view arrival_cell(const GradContract& contract) {
  if (contract.grad) return to_string(*contract.grad);
  return contract.raw_sum_by_autograd ? "summed raw" : "as it arrives";
}

Row row_of(const GradContract& contract, Legend& legend) {
  const auto cell = [&](std::string_view value, ContractField field) {
    return std::string(value) + legend.mark(contract.reason(field));
  };
  Row row{name_cell(contract), shape_cell(contract.shape),
          cell(trained_cell(contract), ContractField::kTrainable),
          cell(to_string(contract.storage.dtype), ContractField::kStorage),
          cell(to_string(contract.compute.dtype), ContractField::kCompute)};
  if (contract.trainable) {
    row.push_back(cell(arrival_cell(contract), ContractField::kGrad));
    row.push_back(cell(to_string(contract.accumulate), ContractField::kAccumulate));
    row.push_back(cell(to_string(contract.reduce), ContractField::kReduce));
    row.push_back(cell(to_string(contract.final), ContractField::kFinal));
    row.push_back(cell(to_string(contract.master), ContractField::kMaster));
    row.push_back(cell(to_string(contract.state), ContractField::kState));
    row.push_back(cell(decay_cell(contract), ContractField::kDecay));
    row.push_back(to_string(contract.reductions));
  } else {
    row.insert(row.end(), 8, "-");
  }
  return row;
}

std::string parameter_table(const std::vector<GradContract>& contracts, Legend& legend) {
  std::vector<Row> rows{{"parameter", "shape", "trained", "storage", "compute", "grad",
                         "accumulate", "reduce", "final", "master", "state", "decay",
                         "reductions"}};
  for (const GradContract& contract : contracts) rows.push_back(row_of(contract, legend));
  if (has_placements(contracts)) {
    rows.front().emplace_back("placement");
    for (std::size_t i = 0; i < contracts.size(); ++i) {
      rows[i + 1].push_back(placement_cell(contracts[i].layout));
    }
  }
  return aligned(rows);
}

std::string buffer_table(const std::vector<BufferContract>& contracts, Legend& legend) {
  std::vector<Row> rows{{"buffer", "shape", "storage", "compute", "in checkpoints"}};
  for (const BufferContract& contract : contracts) {
    rows.push_back({contract.name, shape_cell(contract.shape),
                    std::string(to_string(contract.storage)) +
                        legend.mark(contract.reason(BufferField::kStorage)),
                    std::string(to_string(contract.compute)) +
                        legend.mark(contract.reason(BufferField::kCompute)),
                    contract.stored ? "yes" : "no"});
  }
  return aligned(rows);
}

std::string unit_table(const std::vector<UnitContract>& contracts, Legend& legend) {
  std::vector<Row> rows{{"unit", "input", "activation", "output"}};
  for (const UnitContract& contract : contracts) {
    const auto cell = [&](const std::optional<DType>& dtype, const char* none, UnitField field) {
      return (dtype ? std::string(to_string(*dtype)) : none) + legend.mark(contract.reason(field));
    };
    rows.push_back({std::string(unit_label(contract.name)),
                    cell(contract.input, "as it comes", UnitField::kInput),
                    cell(contract.activation, "unknown", UnitField::kActivation),
                    cell(contract.output, "as it comes", UnitField::kOutput)});
  }
  return aligned(rows);
}

}  // namespace

std::string to_string(const std::vector<GradContract>& contracts) {
  Legend legend;
  const std::string table = parameter_table(contracts, legend);
  return table + legend.print();
}

std::string to_string(const ModelContract& contract) {
  Legend legend;
  std::string text = parameter_table(contract.parameters, legend);
  if (!contract.buffers.empty()) text += "\n" + buffer_table(contract.buffers, legend);
  if (!contract.units.empty()) text += "\n" + unit_table(contract.units, legend);
  return text + "\n" + legend.print();
}

}  // namespace tessera
