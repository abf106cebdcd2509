// The whole contract as bytes for a hash and as lines for a comparison; resolve_model.cpp makes it.
// Both are made of every value once, as text by its name.
#include "tessera/model_contract.h"

#include <array>
#include <charconv>
#include <string>
#include <string_view>
#include <vector>

#include "base/hash.h"
#include "base/printable.h"
#include "base/unit_label.h"
#include "tessera/error.h"

namespace tessera {
namespace grad {
namespace {

struct FieldText {
  std::string_view field;
  std::string value;
};

std::string text(DType dtype) { return std::string(to_string(dtype)); }
std::string text(const std::optional<DType>& dtype) { return dtype ? text(*dtype) : "none"; }
std::string text(bool value) { return value ? "true" : "false"; }
std::string text(const std::optional<bool>& value) { return value ? text(*value) : "none"; }

/// The shortest digits that read back as the same number.
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

/// With their lengths, so that no name can look like two.
std::string text(const std::vector<std::string>& names) {
  std::string joined = "[";
  for (const std::string& name : names) {
    joined += concat(joined.size() > 1 ? ", " : "", name.size(), " ", name);
  }
  return joined + "]";
}

/// Every value of it; the shape that is cut where it is not the parameter's.
std::string text(const ParameterLayout& layout) {
  std::string joined = layout.mesh == MeshKind::kDense ? "dense" : "sparse";
  if (!layout.cut_shape.empty()) joined += concat(" ", text(layout.cut_shape));
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
          {"rounding", c.compute.rounding == Rounding::kHalfAway ? "half_away" : "nearest_even"},
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

/// The name comes first. Different values give different texts; reasons are left out. A field that
/// is not listed here is in no hash.
std::vector<FieldText> fields_of(const GradContract& c) {
  auto fields = values_of(c);
  // Only where there is one: runs on data axes alone keep their hashes.
  if (c.layout != ParameterLayout()) fields.push_back({"placement", text(c.layout)});
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

/// Names come from modules and files: a line break in one would make two lines.
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

}  // namespace tessera
