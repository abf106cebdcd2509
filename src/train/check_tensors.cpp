// That a folder holds what config.json describes, from its headers alone.
#include <algorithm>
#include <map>
#include <set>
#include <string_view>

#include "base/printable.h"
#include "tessera/error.h"
#include "train/load_balance.h"
#include "train/weights.h"

namespace tessera::train {
namespace {

/// Names that other programs write and that hold nothing we need: buffers that are computed.
bool is_computed_buffer(const std::string& name) {
  return name.ends_with("rotary_emb.inv_freq") || name.ends_with("rotary_emb.cos_cached") ||
         name.ends_with("rotary_emb.sin_cached");
}

void check_shape(const TensorSource& folder, const std::string& name,
                 const std::vector<std::int64_t>& shape) {
  const auto* info = folder.find(name);
  const bool is_packed = info == nullptr && folder.find(name + "_blocks") != nullptr;
  TESSERA_CHECK(info != nullptr, ErrorKind::kFormat, folder.path().string(), ": found no tensor ",
                name, ", expected one since config.json describes it",
                is_packed ? concat("; ", name,
                                   "_blocks is there: quantization_config of config.json "
                                   "does not say how it is packed")
                          : "");
  TESSERA_CHECK(info->shape == shape, ErrorKind::kFormat, folder.path().string(), ": tensor ", name,
                ": found shape ", shape_text(info->shape), ", expected ", shape_text(shape),
                " from config.json");
}

/// What the names of stacked tensors begin with: "model.layers.0.mlp.experts.".
std::string_view stem_of(const models::ParameterSpec& parameter) {
  const std::string_view first = parameter.stacked.front();
  const std::string_view last = parameter.stacked.back();
  const auto common =
      static_cast<std::size_t>(std::ranges::mismatch(first, last).in1 - first.begin());
  return first.substr(0, first.rfind('.', common == 0 ? 0 : common - 1) + 1);
}

/// Each of them, of one shape and one dtype: they become one parameter.
void check_stacked(const TensorSource& folder, const models::ParameterSpec& parameter) {
  std::size_t missing = 0;
  const std::string* first_missing = nullptr;
  for (const std::string& name : parameter.stacked) {
    if (folder.find(name) != nullptr) continue;
    if (missing++ == 0) first_missing = &name;
  }
  TESSERA_CHECK(missing == 0, ErrorKind::kFormat, folder.path().string(), ": found no tensor ",
                *first_missing, missing > 1 ? concat(" (and ", missing - 1, " more)") : "",
                ", expected all ", parameter.stacked.size(), " that ", parameter.name,
                " stacks, as many as config.json describes");
  const SourceTensor& first = *folder.find(parameter.stacked.front());
  for (const std::string& name : parameter.stacked) {
    check_shape(folder, name, parameter.stacked_shape);
    const SourceTensor& tensor = *folder.find(name);
    TESSERA_CHECK(tensor.dtype == first.dtype && tensor.original == first.original,
                  ErrorKind::kFormat, folder.path().string(), ": tensor ", name, ": found dtype ",
                  to_string(tensor.dtype == first.dtype ? tensor.original : tensor.dtype),
                  ", expected ",
                  to_string(tensor.dtype == first.dtype ? first.original : first.dtype), " as of ",
                  parameter.stacked.front(), ": both are part of ", parameter.name);
  }
}

/// What a tensor that the model does not have was most likely meant as.
std::string meaning_of(const std::string& name, const std::vector<models::ParameterSpec>& table) {
  for (const auto& parameter : table) {
    if (parameter.stacked.empty()) continue;
    if (name == parameter.name) {
      return concat(", expected only the ", parameter.stacked.size(), " tensors ",
                    parameter.stacked.front(), ", ... that hold its values");
    }
    if (name.starts_with(stem_of(parameter))) {
      return concat(
          ", expected only as many experts as config.json describes: ", parameter.stacked.front(),
          " to ", parameter.stacked.back(), " in ", parameter.name);
    }
  }
  return ", expected only those of the model; is config.json the right one?";
}

/// A tied head may be stored all the same; the embedding's values count.
std::set<std::string_view> known_names(const std::vector<models::ParameterSpec>& table,
                                       const std::vector<models::BufferSpec>& buffers) {
  std::set<std::string_view> names;
  for (const auto& parameter : table) {
    if (parameter.stacked.empty()) names.insert(parameter.name);
    names.insert(parameter.stacked.begin(), parameter.stacked.end());
  }
  for (const auto& buffer : buffers) names.insert(buffer.name);
  return names;
}

}  // namespace

Error not_floating(const TensorSource& folder, std::string_view what, const std::string& name,
                   DType dtype) {
  return {ErrorKind::kFormat,
          concat(folder.path().string(), ": ", what, " ", name, ": found dtype ", to_string(dtype),
                 ", expected a floating one")};
}

void check_tensors(const TensorSource& folder, const std::vector<models::ParameterSpec>& table,
                   const std::vector<models::BufferSpec>& buffers) {
  for (const auto& parameter : table) {
    if (!parameter.stacked.empty()) {
      check_stacked(folder, parameter);
    } else if (parameter.tied_to.empty()) {
      check_shape(folder, parameter.name, parameter.shape);
    }
  }
  for (const auto& buffer : buffers) {
    check_shape(folder, buffer.name, buffer.shape);
    const DType dtype = folder.find(buffer.name)->dtype;
    if (!is_floating(dtype) || is_float8(dtype)) {
      throw not_floating(folder, "buffer", buffer.name, dtype);
    }
  }
  const auto known = known_names(table, buffers);
  std::size_t unknown = 0;
  const std::string* first = nullptr;
  for (const auto& [name, tensor] : folder.tensors()) {
    if (known.contains(name) || is_computed_buffer(name)) continue;
    if (unknown++ == 0) first = &name;
  }
  TESSERA_CHECK(unknown == 0, ErrorKind::kFormat, folder.path().string(), ": found the tensor ",
                *first, unknown > 1 ? concat(" (and ", unknown - 1, " more)") : "",
                meaning_of(*first, table));
}

void check_tensors(const ModelSource& source) {
  auto buffers = source.description.buffers;
  const auto biases = stored_expert_biases(*source.folder, source.spec);
  buffers.insert(buffers.end(), biases.begin(), biases.end());
  auto table = source.description.parameters;
  std::erase_if(table, [](const auto& row) { return models::is_adapter(row.name); });
  check_tensors(*source.folder, table, buffers);
}

void check_adapters(const ModelSource& source) {
  const TensorSource& folder = *source.adapters;
  auto table = source.description.parameters;
  std::erase_if(table, [](const auto& row) { return !models::is_adapter(row.name); });
  for (const auto& row : table) {
    check_shape(folder, row.name, row.shape);
    const DType dtype = folder.find(row.name)->dtype;
    TESSERA_CHECK(dtype == DType::kFloat32, ErrorKind::kFormat, folder.path().string(),
                  ": adapter ", row.name, ": found dtype ", to_string(dtype),
                  ", expected float32, in which adapters are trained and saved");
  }
  TESSERA_CHECK(folder.tensors().size() == table.size(), ErrorKind::kFormat, folder.path().string(),
                ": found ", folder.tensors().size(), " tensors, expected ", table.size(),
                ", two of each layer that its manifest lists");
}

}  // namespace tessera::train
