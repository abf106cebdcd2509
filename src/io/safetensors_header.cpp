#include "io/safetensors_header.h"

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>
#include <utility>

#include "base/text/json_reader.h"
#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::int64_t kLengthBytes = 8;

struct DTypeName {
  DType dtype;
  std::string_view name;
};

constexpr std::array<DTypeName, 15> kDTypeNames{{{DType::kFloat64, "F64"},
                                                 {DType::kFloat32, "F32"},
                                                 {DType::kFloat16, "F16"},
                                                 {DType::kBFloat16, "BF16"},
                                                 {DType::kFloat8E4M3, "F8_E4M3"},
                                                 {DType::kFloat8E5M2, "F8_E5M2"},
                                                 {DType::kInt64, "I64"},
                                                 {DType::kInt32, "I32"},
                                                 {DType::kInt16, "I16"},
                                                 {DType::kInt8, "I8"},
                                                 {DType::kUInt64, "U64"},
                                                 {DType::kUInt32, "U32"},
                                                 {DType::kUInt16, "U16"},
                                                 {DType::kUInt8, "U8"},
                                                 {DType::kBool, "BOOL"}}};

/// Takes the events of nlohmann's parser, which uses no call stack, and accepts exactly the three
/// levels of a header. Anything else ends the parse at once, so neither depth nor the number of
/// values can do harm.
class HeaderReader {
 public:
  using Json = nlohmann::json;

  HeaderReader(SafetensorsHeader& header, std::string_view where)
      : header_(header), where_(where) {}

  // The parser's events, under the names that it calls.
  bool null() { return unexpected("null"); }
  bool boolean(bool) { return unexpected("a boolean"); }
  bool number_float(double, const std::string& text) { return unexpected(text); }
  bool binary(Json::binary_t&) { return unexpected("binary data"); }
  bool number_integer(std::int64_t value) { return unexpected(std::to_string(value)); }
  bool number_unsigned(std::uint64_t value);
  bool string(std::string& value);
  bool start_object(std::size_t);
  bool key(std::string& name);
  bool end_object();
  bool start_array(std::size_t);
  bool end_array();
  bool parse_error(std::size_t at, const std::string&, const Json::exception& error);

 private:
  enum class Place { kOutside, kRoot, kMetadata, kTensor, kShape, kOffsets, kDone };

  [[noreturn]] bool unexpected(std::string_view found) const {
    throw Error(ErrorKind::kFormat, concat(where_, ": found ", printable(found), " ", position(),
                                           ", expected ", expected()));
  }
  std::string position() const;
  std::string_view expected() const;
  void check_once(bool first, std::string_view key) const {
    TESSERA_CHECK(first, ErrorKind::kFormat, where_, ": found the key ", printable(key), " twice ",
                  position());
  }

  SafetensorsHeader& header_;
  std::string_view where_;
  Place place_ = Place::kOutside;
  std::string key_;  // of the open object, where a value is expected
  bool has_metadata_ = false;
  std::optional<DType> dtype_;
  std::optional<std::vector<std::int64_t>> shape_;
  std::optional<std::vector<std::int64_t>> offsets_;
};

std::string HeaderReader::position() const {
  switch (place_) {
    case Place::kOutside:
    case Place::kDone:
      return "as the header";
    case Place::kRoot:
      return key_.empty() ? "in the header" : concat("as the entry of ", printable(key_));
    case Place::kMetadata:
      return "in __metadata__";
    case Place::kShape:
      return concat("in the shape of ", printable(header_.tensors.back().name));
    case Place::kOffsets:
      return concat("in the data_offsets of ", printable(header_.tensors.back().name));
    case Place::kTensor:
      break;
  }
  return concat("in the entry of ", printable(header_.tensors.back().name));
}

std::string_view HeaderReader::expected() const {
  switch (place_) {
    case Place::kOutside:
    case Place::kDone:
      return "one JSON object";
    case Place::kRoot:
      return "an object with dtype, shape and data_offsets";
    case Place::kMetadata:
      return "strings only";
    case Place::kTensor:
      return "dtype (a string), shape and data_offsets (lists of integers) only";
    case Place::kShape:
      return "at most 64 integers from 0 to 2^63 - 1";
    case Place::kOffsets:
      return "two integers from 0 to 2^63 - 1";
  }
  return "nothing";
}

bool HeaderReader::number_unsigned(std::uint64_t value) {
  if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    return unexpected(std::to_string(value));
  }
  if (place_ == Place::kShape && shape_->size() < kMaxTensorDims) {
    shape_->push_back(static_cast<std::int64_t>(value));
    return true;
  }
  if (place_ == Place::kOffsets && offsets_->size() < 2) {
    offsets_->push_back(static_cast<std::int64_t>(value));
    return true;
  }
  return unexpected(std::to_string(value));
}

bool HeaderReader::string(std::string& value) {
  if (place_ == Place::kMetadata) {
    check_once(header_.metadata.emplace(key_, std::move(value)).second, key_);
    return true;
  }
  if (place_ != Place::kTensor || key_ != "dtype") return unexpected(value);
  check_once(!dtype_, key_);
  const auto* const known = std::find_if(kDTypeNames.begin(), kDTypeNames.end(),
                                         [&](const DTypeName& n) { return n.name == value; });
  TESSERA_CHECK(known != kDTypeNames.end(), ErrorKind::kFormat, where_, ": found the dtype ",
                printable(value), " of ", printable(header_.tensors.back().name),
                ", expected F64, F32, F16, BF16, F8_E4M3, F8_E5M2, I64, I32, I16, I8, U64, U32, "
                "U16, U8 or BOOL");
  dtype_ = known->dtype;
  return true;
}

bool HeaderReader::start_object(std::size_t) {
  if (place_ == Place::kOutside) {
    place_ = Place::kRoot;
    return true;
  }
  if (place_ != Place::kRoot) return unexpected("an object");
  if (key_ == "__metadata__") {
    check_once(!std::exchange(has_metadata_, true), key_);
    place_ = Place::kMetadata;
    return true;
  }
  check_once(header_.by_name.emplace(key_, header_.tensors.size()).second, key_);
  header_.tensors.push_back({.name = key_, .dtype = {}, .shape = {}, .begin = 0, .end = 0});
  place_ = Place::kTensor;
  return true;
}

bool HeaderReader::key(std::string& name) {
  key_ = std::move(name);
  return true;
}

bool HeaderReader::end_object() {
  if (place_ == Place::kRoot) {
    place_ = Place::kDone;
    return true;
  }
  if (place_ == Place::kTensor) {
    TensorInfo& tensor = header_.tensors.back();
    TESSERA_CHECK(dtype_ && shape_ && offsets_, ErrorKind::kFormat, where_, ": the entry of ",
                  printable(tensor.name), " lacks ",
                  !dtype_   ? "dtype"
                  : !shape_ ? "shape"
                            : "data_offsets");
    tensor.dtype = *std::exchange(dtype_, std::nullopt);
    tensor.shape = std::move(*std::exchange(shape_, std::nullopt));
    const auto offsets = std::move(*std::exchange(offsets_, std::nullopt));
    TESSERA_CHECK(offsets.size() == 2, ErrorKind::kFormat, where_, ": found ", offsets.size(),
                  " data_offsets of ", printable(tensor.name), ", expected 2");
    tensor.begin = offsets[0];
    tensor.end = offsets[1];
  }
  place_ = Place::kRoot;
  key_.clear();
  return true;
}

bool HeaderReader::start_array(std::size_t) {
  if (place_ == Place::kTensor && key_ == "shape") {
    check_once(!shape_, key_);
    shape_.emplace();
    place_ = Place::kShape;
    return true;
  }
  if (place_ == Place::kTensor && key_ == "data_offsets") {
    check_once(!offsets_, key_);
    offsets_.emplace();
    place_ = Place::kOffsets;
    return true;
  }
  return unexpected("a list");
}

bool HeaderReader::end_array() {
  place_ = Place::kTensor;
  return true;
}

bool HeaderReader::parse_error(std::size_t at, const std::string&, const Json::exception& error) {
  throw Error(ErrorKind::kFormat, concat(where_, ": malformed JSON at byte ", at,
                                         " of the header: ", complaint_of(error)));
}

/// Returns the bytes of the JSON text, after checking the length in front of it against the file.
std::span<const std::byte> header_text_of(std::span<const std::byte> first_bytes,
                                          std::int64_t file_size, std::string_view where) {
  TESSERA_CHECK(file_size >= kLengthBytes && first_bytes.size() >= kLengthBytes, ErrorKind::kFormat,
                where, ": found ", file_size,
                " bytes, expected a safetensors file, which has at least 8");
  std::uint64_t length = 0;
  for (std::size_t i = kLengthBytes; i-- > 0;) {
    length = (length << 8U) | std::to_integer<std::uint64_t>(first_bytes[i]);
  }
  TESSERA_CHECK(length <= static_cast<std::uint64_t>(kMaxSafetensorsHeaderBytes),
                ErrorKind::kFormat, where, ": found a header length of ", length,
                " bytes, expected at most ", kMaxSafetensorsHeaderBytes,
                " (is this a safetensors file?)");
  const auto available = static_cast<std::uint64_t>(
      std::min(file_size, static_cast<std::int64_t>(first_bytes.size())) - kLengthBytes);
  TESSERA_CHECK(length <= available, ErrorKind::kFormat, where, ": found a header length of ",
                length, " bytes, expected at most the ", available,
                " bytes that follow it: the file is cut short or not a safetensors file");
  return first_bytes.subspan(kLengthBytes, static_cast<std::size_t>(length));
}

/// Turns offsets in the data part into offsets in the file and checks that the tensors tile it.
void place_tensors(SafetensorsHeader& header, std::int64_t data_begin, std::int64_t file_size,
                   std::string_view where) {
  const std::int64_t data_bytes = file_size - data_begin;
  for (TensorInfo& tensor : header.tensors) {
    TESSERA_CHECK(tensor.begin <= tensor.end && tensor.end <= data_bytes, ErrorKind::kFormat, where,
                  ": found data_offsets [", tensor.begin, ", ", tensor.end, "] of ",
                  printable(tensor.name), ", expected a range inside the file's ", data_bytes,
                  " bytes of data");
    const std::int64_t bytes = checked_numel(tensor.shape, tensor.dtype, ErrorKind::kFormat,
                                             concat(where, ": ", printable(tensor.name))) *
                               size_of(tensor.dtype);
    TESSERA_CHECK(tensor.end - tensor.begin == bytes, ErrorKind::kFormat, where, ": found ",
                  tensor.end - tensor.begin, " bytes of ", printable(tensor.name), ", expected ",
                  bytes, " for ", safetensors_name(tensor.dtype), " ", shape_text(tensor.shape));
  }
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const TensorInfo& a, const TensorInfo& b) {
              return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
            });
  std::int64_t covered = 0;
  for (std::size_t i = 0; i < header.tensors.size(); ++i) {
    TensorInfo& tensor = header.tensors[i];
    TESSERA_CHECK(tensor.begin == covered, ErrorKind::kFormat, where, ": ", printable(tensor.name),
                  tensor.begin < covered ? " overlaps the tensor" : " leaves a gap",
                  " before it: found data_offsets from ", tensor.begin, ", expected ", covered);
    covered = tensor.end;
    tensor.begin += data_begin;
    tensor.end += data_begin;
    header.by_name[tensor.name] = i;
  }
  TESSERA_CHECK(covered == data_bytes, ErrorKind::kFormat, where, ": found ", data_bytes,
                " bytes of data, expected the ", covered, " that its header describes");
}

}  // namespace

const TensorInfo* SafetensorsHeader::find(std::string_view name) const {
  const auto found = by_name.find(name);
  return found == by_name.end() ? nullptr : &tensors[found->second];
}

std::string_view safetensors_name(DType dtype) {
  const auto* const known = std::find_if(kDTypeNames.begin(), kDTypeNames.end(),
                                         [&](const DTypeName& n) { return n.dtype == dtype; });
  TESSERA_INVARIANT(known != kDTypeNames.end(), "a dtype without a safetensors name");
  return known->name;
}

std::int64_t checked_numel(std::span<const std::int64_t> shape, DType dtype, ErrorKind kind,
                           std::string_view what) {
  std::int64_t numel = 1;
  // The running product leaves zeros out: [2^62, 2^62, 0] has no element, but no strides either.
  std::int64_t extent = size_of(dtype);
  for (const std::int64_t dim : shape) {
    TESSERA_CHECK(dim >= 0, kind, what, ": found the shape ", shape_text(shape),
                  ", expected no negative dim");
    TESSERA_CHECK(dim == 0 || extent <= std::numeric_limits<std::int64_t>::max() / dim, kind, what,
                  ": found the shape ", shape_text(shape),
                  ", expected a tensor of less than 2^63 bytes");
    extent *= std::max<std::int64_t>(dim, 1);
    numel *= dim;
  }
  return numel;
}

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> first_bytes,
                                           std::int64_t file_size, std::string_view where) {
  const std::span<const std::byte> text = header_text_of(first_bytes, file_size, where);
  TESSERA_CHECK(!text.empty() && text.front() == std::byte{'{'}, ErrorKind::kFormat, where,
                ": found a header that does not begin with '{', expected JSON");
  SafetensorsHeader header;
  HeaderReader reader(header, where);
  const auto* const begin = reinterpret_cast<const char*>(text.data());
  nlohmann::json::sax_parse(begin, begin + text.size(), &reader);
  place_tensors(header, kLengthBytes + static_cast<std::int64_t>(text.size()), file_size, where);
  return header;
}

}  // namespace tessera
