#include "io/safetensors.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <tuple>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera {

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : file_(path),
      header_(parse_safetensors_header(file_.bytes(), file_.size_bytes(), path.native())) {
  if (!header_.tensors.empty()) {  // the header's text is not read again
    file_.release(file_.bytes().first(static_cast<std::size_t>(header_.tensors.front().begin)));
  }
}

const TensorInfo& SafetensorsFile::info(std::string_view name) const {
  const TensorInfo* const tensor = header_.find(name);
  TESSERA_CHECK(tensor != nullptr, ErrorKind::kFormat, path().native(), ": found no tensor ",
                printable(name), " among its ", header_.tensors.size());
  return *tensor;
}

std::span<const std::byte> SafetensorsFile::bytes(std::string_view name) const {
  const TensorInfo& tensor = info(name);
  return file_.range(tensor.begin, tensor.size_bytes());
}

std::span<const std::byte> SafetensorsFile::range(std::string_view name, std::int64_t begin_element,
                                                  std::int64_t end_element) const {
  return range(info(name), begin_element, end_element);
}

std::span<const std::byte> SafetensorsFile::range(const TensorInfo& tensor,
                                                  std::int64_t begin_element,
                                                  std::int64_t end_element) const {
  TESSERA_CHECK(0 <= begin_element && begin_element <= end_element && end_element <= tensor.numel(),
                ErrorKind::kUsage, path().native(), ": elements [", begin_element, ", ",
                end_element, ") do not lie inside ", printable(tensor.name), " with ",
                tensor.numel(), " elements");
  const std::int64_t size = size_of(tensor.dtype);
  return file_.range(tensor.begin + begin_element * size, (end_element - begin_element) * size);
}

namespace {

constexpr std::size_t kLengthFieldBytes = 8;
constexpr std::size_t kHeaderAlignment = 8;

std::string json_string(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    throw Error(ErrorKind::kUsage, concat("safetensors: found the name or value ", printable(text),
                                          ", expected UTF-8"));
  }
}

/// Offsets are relative to the data part here, as in the header's text.
SafetensorsHeader lay_out(std::vector<TensorSpec> tensors, TensorOrder order) {
  if (order == TensorOrder::kAligned) {
    std::sort(tensors.begin(), tensors.end(), [](const TensorSpec& a, const TensorSpec& b) {
      return std::make_tuple(-size_of(a.dtype), std::string_view(a.name)) <
             std::make_tuple(-size_of(b.dtype), std::string_view(b.name));
    });
  }
  SafetensorsHeader header;
  std::int64_t at = 0;
  for (TensorSpec& spec : tensors) {
    TESSERA_CHECK(spec.name != "__metadata__" &&
                      header.by_name.emplace(spec.name, header.tensors.size()).second,
                  ErrorKind::kUsage, "safetensors: found the tensor name ", printable(spec.name),
                  spec.name == "__metadata__" ? ", which the format keeps for itself" : " twice");
    const std::int64_t bytes =
        checked_numel(spec.shape, spec.dtype, ErrorKind::kUsage, printable(spec.name)) *
        size_of(spec.dtype);
    TESSERA_CHECK(
        bytes <= std::numeric_limits<std::int64_t>::max() - at - 2 * kMaxSafetensorsHeaderBytes,
        ErrorKind::kUsage, "safetensors: the tensors up to ", printable(spec.name),
        " do not fit into 2^63 bytes");
    header.tensors.push_back({.name = std::move(spec.name),
                              .dtype = spec.dtype,
                              .shape = std::move(spec.shape),
                              .begin = at,
                              .end = at + bytes});
    at += bytes;
  }
  return header;
}

std::string header_text(const SafetensorsHeader& header) {
  std::string text = "{";
  const auto separate = [&text] {
    if (text.size() > 1) text += ',';
  };
  if (!header.metadata.empty()) {
    text += "\"__metadata__\":{";
    for (const auto& [key, value] : header.metadata) {
      if (text.back() != '{') text += ',';
      text += json_string(key) + ":" + json_string(value);
    }
    text += '}';
  }
  for (const TensorInfo& tensor : header.tensors) {
    separate();
    text += json_string(tensor.name) + ":{\"dtype\":\"";
    text += safetensors_name(tensor.dtype);
    text += "\",\"shape\":" + nlohmann::json(tensor.shape).dump();
    text += ",\"data_offsets\":[" + std::to_string(tensor.begin) + "," +
            std::to_string(tensor.end) + "]}";
  }
  text += '}';
  // The 8 bytes of the length come before, so the data begins at a multiple of 8 as well.
  text.resize((text.size() + kHeaderAlignment - 1) / kHeaderAlignment * kHeaderAlignment, ' ');
  TESSERA_CHECK(text.size() <= static_cast<std::size_t>(kMaxSafetensorsHeaderBytes),
                ErrorKind::kUsage, "safetensors: a header of ", text.size(),
                " bytes is more than readers accept; write several files");
  return text;
}

}  // namespace

SafetensorsLayout lay_out_safetensors(std::vector<TensorSpec> tensors,
                                      const std::map<std::string, std::string>& metadata,
                                      TensorOrder order) {
  SafetensorsLayout layout;
  layout.header = lay_out(std::move(tensors), order);
  layout.header.metadata = metadata;
  const std::string text = header_text(layout.header);
  for (std::size_t i = 0; i < kLengthFieldBytes; ++i) {
    layout.beginning.push_back(static_cast<char>((text.size() >> (8 * i)) & 0xFFU));
  }
  layout.beginning += text;
  layout.file_bytes = static_cast<std::int64_t>(layout.beginning.size());
  const std::int64_t data_begin = layout.file_bytes;
  for (TensorInfo& tensor : layout.header.tensors) {
    tensor.begin += data_begin;
    tensor.end += data_begin;
    layout.file_bytes = tensor.end;
  }
  return layout;
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path,
                                     std::vector<TensorSpec> tensors,
                                     const std::map<std::string, std::string>& metadata,
                                     TensorOrder order)
    : SafetensorsWriter(path, lay_out_safetensors(std::move(tensors), metadata, order)) {}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, SafetensorsLayout layout)
    : header_(std::move(layout.header)), written_(header_.tensors.size()), file_(path) {
  file_.resize(layout.file_bytes);
  file_.write(0, std::as_bytes(std::span(layout.beginning)));
}

void SafetensorsWriter::write(std::string_view name, std::span<const std::byte> bytes) {
  const TensorInfo* const tensor = header_.find(name);
  TESSERA_CHECK(!tensor || static_cast<std::int64_t>(bytes.size()) == tensor->size_bytes(),
                ErrorKind::kUsage, file_.path().native(), ": found ", bytes.size(), " bytes for ",
                printable(name), ", expected ", tensor->size_bytes());
  write_range(name, 0, bytes);
}

void SafetensorsWriter::write_range(std::string_view name, std::int64_t begin_element,
                                    std::span<const std::byte> bytes) {
  const auto found = header_.by_name.find(name);
  TESSERA_CHECK(found != header_.by_name.end(), ErrorKind::kUsage, file_.path().native(),
                ": the tensor ", printable(name), " was not declared");
  const TensorInfo& tensor = header_.tensors[found->second];
  const std::int64_t size = size_of(tensor.dtype);
  const auto count = static_cast<std::int64_t>(bytes.size());
  TESSERA_CHECK(begin_element >= 0 && begin_element <= tensor.numel() && count % size == 0 &&
                    count / size <= tensor.numel() - begin_element,
                ErrorKind::kUsage, file_.path().native(), ": found ", count, " bytes from element ",
                begin_element, " of ", printable(name), ", expected whole elements of ", size,
                " bytes inside ", shape_text(tensor.shape));
  if (count == 0) return;
  const std::int64_t begin = begin_element * size;
  file_.write(tensor.begin + begin, bytes);
  Ranges& ranges = written_[found->second];
  if (!ranges.empty() && ranges.back().second == begin) {
    ranges.back().second += count;
  } else {
    ranges.emplace_back(begin, begin + count);
  }
}

void SafetensorsWriter::finish() {
  for (std::size_t i = 0; i < written_.size(); ++i) {
    const TensorInfo& tensor = header_.tensors[i];
    std::sort(written_[i].begin(), written_[i].end());
    std::int64_t covered = 0;
    for (const auto& [begin, end] : written_[i]) {
      TESSERA_CHECK(begin == covered, ErrorKind::kUsage, file_.path().native(), ": ",
                    printable(tensor.name), " was written ",
                    begin < covered ? "twice" : "not at all", " at byte ",
                    std::min(begin, covered));
      covered = end;
    }
    TESSERA_CHECK(covered == tensor.size_bytes(), ErrorKind::kUsage, file_.path().native(), ": ",
                  printable(tensor.name), " was written up to byte ", covered, ", expected ",
                  tensor.size_bytes());
  }
  file_.commit();
}

}  // namespace tessera
