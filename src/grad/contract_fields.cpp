#include "grad/contract_fields.h"

#include <array>
#include <charconv>

#include "tessera/error.h"

namespace tessera::grad {
namespace {

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

}  // namespace

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

}  // namespace tessera::grad
