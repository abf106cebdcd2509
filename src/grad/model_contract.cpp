// The text, the comparison and the hash of contracts; resolve.cpp makes them.
#include "tessera/model_contract.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <string>
#include <string_view>
#include <vector>

#include "base/hash.h"
#include "base/text/printable.h"
#include "base/text/wrapped.h"
#include "grad/enum_words.h"
#include "tessera/error.h"

namespace tessera {
namespace grad {

// Turns the whole contract into bytes for a hash and lines for a comparison. Both are made from the
// text of every value, by the name of its field.

namespace {

struct FieldText {
  std::string_view field;
  std::string value;
};

std::string text(DType dtype) { return std::string(to_string(dtype)); }
std::string text(const std::optional<DType>& dtype) { return dtype ? text(*dtype) : "none"; }
std::string text(bool value) { return value ? "true" : "false"; }
std::string text(const std::optional<bool>& value) { return value ? text(*value) : "none"; }

/// Returns the shortest digits that read back as the same number.
std::string text(double value) {
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  return {digits.data(), end};
}

std::string text(const std::vector<std::int64_t>& shape) {
  std::string joined = "[";
  for (const std::int64_t size : shape) joined += concat(joined.size() > 1 ? ", " : "", size);
  return joined + "]";
}

/// Writes names with their lengths, so that no name can look like two.
std::string text(const std::vector<std::string>& names) {
  std::string joined = "[";
  for (const std::string& name : names) {
    joined += concat(joined.size() > 1 ? ", " : "", name.size(), " ", name);
  }
  return joined + "]";
}

/// Returns every value of the layout; sharded_shape only where it is not the parameter's.
std::string text(const ParameterLayout& layout) {
  std::string joined = layout.mesh == MeshKind::kDense ? "dense" : "sparse";
  if (!layout.sharded_shape.empty()) joined += concat(" ", text(layout.sharded_shape));
  if (!layout.sections.empty()) joined += concat(" sections ", text(layout.sections));
  for (const AxisPlacement& axis : layout.axes) {
    joined += concat(", ", axis.axis.size(), " ", to_string(axis));
  }
  return joined;
}

std::vector<FieldText> values_of(const GradContract& c) {
  return {{"name", c.name},
          {"shape", text(c.shape)},
          {"storage", text(c.storage.dtype)},
          {"compute", text(c.compute.dtype)},
          {"rounding", std::string(word_of(c.compute.rounding))},
          {"grad", text(c.grad)},
          {"accumulate", text(c.accumulate)},
          {"reduce", text(c.reduce)},
          {"final", text(c.final)},
          {"trainable", text(c.trainable)},
          {"frozen_as", std::string(to_string(c.frozen_as))},
          {"master", std::string(to_string(c.master))},
          {"state", text(c.state)},
          {"decays", text(c.decays)},
          {"raw_sum_by_autograd", text(c.raw_sum_by_autograd)},
          {"shard_axes", text(c.reductions.shard_axes)},
          {"replica_axes", text(c.reductions.replica_axes)},
          {"divide_factor", text(c.reductions.divide_factor)},
          {"aliases", text(c.aliases)}};
}

/// Returns all fields, the name first. Different values have different texts; reasons are left out.
/// A field that is not listed here is in no hash.
std::vector<FieldText> fields_of(const GradContract& c) {
  auto fields = values_of(c);
  // Listed only where there are any, so that hashes and texts of other models stay the same.
  if (!c.reductions.copies.empty()) {
    std::string ranks;
    for (const int rank : c.reductions.copies) ranks += concat(ranks.empty() ? "" : " ", rank);
    fields.push_back({"copies", ranks});
  }
  // Listed only where there is one, so that runs on data axes alone keep their hashes.
  if (c.layout != ParameterLayout()) fields.push_back({"placement", text(c.layout)});
  if (c.loaded_through) fields.push_back({"loaded_through", text(c.loaded_through)});
  return fields;
}

std::vector<FieldText> fields_of(const BufferContract& c) {
  return {{"name", c.name},
          {"shape", text(c.shape)},
          {"storage", text(c.storage)},
          {"compute", text(c.compute)},
          {"stored", text(c.stored)}};
}

std::vector<FieldText> fields_of(const UnitContract& c) {
  return {{"name", c.name},
          {"nested", text(c.nested)},
          {"input", text(c.input)},
          {"activation", text(c.activation)},
          {"output", text(c.output)}};
}

}  // namespace
}  // namespace grad
namespace {

template <class Contract>
void add(Hasher& hasher, std::string_view kind, const std::vector<Contract>& contracts) {
  hasher.add(kind).add(std::uint64_t{contracts.size()});
  for (const Contract& contract : contracts) {
    for (const auto& [field, value] : grad::fields_of(contract)) {
      hasher.add(field).add(std::string_view(value));
    }
  }
}

/// Escapes names, which come from modules and files: a line break in one would make two lines.
std::string shown(const std::string& name) {
  const std::string quoted = printable(name, name.size());
  return quoted.substr(1, quoted.size() - 2);
}

template <class Contract>
void add_lines(std::string& lines, std::string_view kind, const std::vector<Contract>& contracts) {
  for (const Contract& contract : contracts) {
    const auto fields = grad::fields_of(contract);
    const std::string whose = concat(kind, " ", unit_label(contract.name));
    for (std::size_t i = 1; i < fields.size(); ++i) {
      lines += shown(concat(whose, " ", fields[i].field, " ", fields[i].value)) + "\n";
    }
  }
}

}  // namespace

std::uint64_t hash(const std::vector<GradContract>& contracts) {
  Hasher hasher;
  hasher.add(std::string_view("contract 2"));
  add(hasher, "parameters", contracts);
  return hasher.digest();
}

std::uint64_t hash(const ModelContract& contract) {
  Hasher hasher;
  hasher.add(std::string_view("model contract 2"));
  add(hasher, "parameters", contract.parameters);
  add(hasher, "buffers", contract.buffers);
  add(hasher, "units", contract.units);
  return hasher.digest();
}

std::string to_lines(const ModelContract& contract) {
  std::string lines;
  add_lines(lines, "parameter", contract.parameters);
  add_lines(lines, "buffer", contract.buffers);
  add_lines(lines, "unit", contract.units);
  return lines;
}

// The printed form of contracts: aligned columns, and below them every reason once, with a number.

namespace {

/// Numbers the distinct reasons in order of first use.
class Legend {
 public:
  /// Returns " (3)"; "" for no reason.
  std::string mark(const std::string& reason);
  std::string print() const;

 private:
  std::vector<std::string> reasons_;
};

using Row = std::vector<std::string>;
constexpr std::size_t kColumns = 100;

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

/// Returns one line for each row, the last column without padding. All rows have as many cells as
/// the first.
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

/// Whether any contract has a placement on a model axis.
bool has_placements(const std::vector<GradContract>& contracts) {
  return std::any_of(contracts.begin(), contracts.end(),
                     [](const auto& one) { return one.layout != ParameterLayout(); });
}

/// Returns what happens to a gradient before it is added to the slot.
std::string_view arrival_cell(const GradContract& contract) {
  if (contract.grad) return to_string(*contract.grad);
  return contract.raw_sum_by_autograd ? "summed raw" : "raw";
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

/// Takes the columns after the shape out of a table of several rows that have one value each.
/// Returns them as text: "storage float32 (2), reduce float32 (6)".
std::string take_equal_columns(std::vector<Row>& rows) {
  std::string text;
  if (rows.size() < 3) return text;
  for (std::size_t c = rows.front().size(); c-- > 2;) {
    const auto is_equal = [&](const Row& row) { return row[c] == rows[1][c]; };
    if (!std::all_of(rows.begin() + 1, rows.end(), is_equal)) continue;
    text = concat(rows.front()[c], " ", rows[1][c], text.empty() ? "" : ", ", text);
    for (Row& row : rows) row.erase(row.begin() + static_cast<std::ptrdiff_t>(c));
  }
  return text;
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
  const std::string same = take_equal_columns(rows);
  return aligned(rows) + (same.empty() ? "" : "every parameter:\n" + wrapped(same, 2, kColumns));
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
