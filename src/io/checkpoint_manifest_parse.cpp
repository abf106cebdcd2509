// manifest.json and blocks of tensors.jsonl as text from anywhere: every value is looked at before
// it is used.
#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "base/json_reader.h"
#include "base/printable.h"
#include "io/checkpoint_manifest.h"
#include "io/safetensors_header.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

constexpr int kMaxManifestDepth = 8;

/// A value and its place in the text ("FILE: tensors: 'NAME': pieces"), which is spelled out for
/// messages only.
class Value {
 public:
  Value(const Json& json, std::string_view name, const Value* parent = nullptr)
      : json_(json), name_(name), parent_(parent) {}

  Value member(const char* key) const {
    require(json_.is_object(), "an object");
    const auto found = json_.find(key);
    TESSERA_CHECK(found != json_.end(), ErrorKind::kFormat, where(), ": found no \"", key,
                  "\", expected one");
    return {*found, key, this};
  }
  std::optional<Value> find(const char* key) const {
    return json_.contains(key) ? std::optional(member(key)) : std::nullopt;
  }

  std::int64_t integer() const {
    constexpr auto kLargest = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    const bool fits = json_.is_number_integer() &&
                      (!json_.is_number_unsigned() || json_.get<std::uint64_t>() <= kLargest);
    require(fits, "an integer below 2^63");
    return json_.get<std::int64_t>();
  }
  std::int64_t rank() const {
    const std::int64_t found = integer();
    require(found >= 0, "the number of a rank");
    return found;
  }
  double number() const {
    require(json_.is_number(), "a number");
    return json_.get<double>();
  }
  const std::string& text() const {
    require(json_.is_string(), "a string");
    return json_.get_ref<const std::string&>();
  }
  Hash128 hash() const {
    const auto hash = parse_hash128(text());
    require(hash.has_value(), "32 hexadecimal digits");
    return *hash;
  }
  DType dtype() const {
    const auto dtype = parse_dtype(text());
    require(dtype.has_value(), "the name of a dtype");
    return *dtype;
  }
  template <class Read>
  auto list(const Read& read) const {
    require(json_.is_array(), "a list");
    std::vector<std::decay_t<decltype(read(*this))>> items;
    for (const Json& item : json_) items.push_back(read(Value(item, "an item", this)));
    return items;
  }
  /// Of a list of `few` or `many` items: how many it has.
  std::size_t count_of(std::size_t few, std::size_t many) const {
    TESSERA_CHECK(json_.is_array() && (json_.size() == few || json_.size() == many),
                  ErrorKind::kFormat, where(), ": found ", shown(),
                  json_.is_array() ? concat(" of ", json_.size(), " items") : "",
                  ", expected a list of ", few, " or ", many);
    return json_.size();
  }
  /// Of a list that has it.
  Value at(std::size_t index) const { return {json_[index], "an item", this}; }
  std::string_view name() const { return name_; }
  /// Of a shape or a box.
  std::vector<std::int64_t> integers() const {
    TESSERA_CHECK(!json_.is_array() || json_.size() <= kMaxTensorDims, ErrorKind::kFormat, where(),
                  ": found ", json_.size(), " dims, expected at most ", kMaxTensorDims);
    return list([](const Value& item) { return item.integer(); });
  }
  template <class Read>
  auto by_name(const Read& read) const {
    require(json_.is_object(), "an object");
    std::map<std::string, decltype(read(*this)), std::less<>> items;
    for (const auto& [name, item] : json_.items()) {
      items.emplace(name, read(Value(item, name, this)));
    }
    return items;
  }

 private:
  std::string where() const {
    return parent_ == nullptr ? std::string(name_)
                              : concat(parent_->where(), ": ", printable(name_));
  }
  std::string shown() const {
    if (json_.is_structured()) return json_.is_array() ? "a list" : "an object";
    return printable(json_.dump(-1, ' ', false, Json::error_handler_t::replace), 60);
  }
  void require(bool condition, const char* expected) const {
    TESSERA_CHECK(condition, ErrorKind::kFormat, where(), ": found ", shown(), ", expected ",
                  expected);
  }

  const Json& json_;
  std::string_view name_;
  const Value* parent_;
};

CheckpointData read_data(const Value& value) {
  CheckpointData data;
  data.path = value.member("path").list([](const Value& item) { return item.text(); });
  data.bytes = value.member("bytes").integer();
  data.xxh3_128 = value.member("xxh3_128").hash();
  data.seq_len = value.member("seq_len").integer();
  data.global_batch_size = value.member("global_batch_size").integer();
  return data;
}

CheckpointLora read_lora(const Value& value) {
  CheckpointLora lora;
  lora.base_xxh3_128 = value.member("base_xxh3_128").hash();
  lora.rank = value.member("rank").integer();
  lora.alpha = value.member("alpha").number();
  lora.dropout = value.member("dropout").number();
  lora.layers = value.member("layers").list([](const Value& item) { return item.text(); });
  return lora;
}

LossScaleState read_loss_scale(const Value& value) {
  constexpr std::int64_t kFarOut = 1024;  // no double: validate() refuses it as it refuses infinity
  const auto log2 = std::clamp(value.member("log2").integer(), -2 * kFarOut, kFarOut);
  return {std::ldexp(1.0, static_cast<int>(log2)), value.member("good_steps").integer(),
          value.member("skipped_steps").integer()};
}

CheckpointFile read_file(const Value& value) {
  return {value.member("bytes").integer(), value.member("xxh3_128").hash()};
}

CheckpointPiece read_piece(const Value& value) {
  const Value box = value.member("box");
  return {value.member("file").text(),
          value.member("key").text(),
          {box.member("offset").integers(), box.member("size").integers()},
          value.member("begin").integer(),
          value.member("end").integer()};
}

/// All but its pieces.
CheckpointTensor read_tensor_head(const Value& value) {
  CheckpointTensor tensor;
  tensor.dtype = value.member("dtype").dtype();
  tensor.shape = value.member("shape").integers();
  if (const auto source = value.find("source_dtype")) tensor.source_dtype = source->dtype();
  return tensor;
}

CheckpointTensor read_tensor(const Value& value) {
  CheckpointTensor tensor = read_tensor_head(value);
  tensor.pieces = value.member("pieces").list(read_piece);
  return tensor;
}

/// With pieces as [rank, begin, end] or [rank, begin, end, offset, size].
CheckpointTensor read_short_tensor(const Value& value) {
  CheckpointTensor tensor = read_tensor_head(value);
  const TensorBox whole = TensorBox::whole(tensor.shape);
  std::map<std::int64_t, std::size_t> numbers;  // of pieces in each file so far
  tensor.pieces = value.member("pieces").list([&](const Value& item) {
    const std::size_t parts = item.count_of(3, 5);
    const std::int64_t rank = item.at(0).rank();
    return CheckpointPiece{
        rank_file(rank), piece_key(value.name(), ++numbers[rank]),
        parts == 3 ? whole : TensorBox{item.at(3).integers(), item.at(4).integers()},
        item.at(1).integer(), item.at(2).integer()};
  });
  return tensor;
}

CheckpointBlock read_block(const Value& value) {
  return {value.member("first").text(), value.member("bytes").integer(),
          value.member("xxh3_128").hash()};
}

}  // namespace

CheckpointManifest parse_manifest_part(std::string_view text, std::string_view where) {
  const Json json = parse_json_object(text, where, kMaxManifestDepth);
  const Value root(json, where);
  CheckpointManifest part;
  part.files = root.member("files").by_name(read_file);
  part.tensors = root.member("tensors").by_name(read_short_tensor);
  return part;
}

CheckpointManifest parse_checkpoint_manifest(std::string_view text, std::string_view where) {
  const Json json = parse_json_object(text, where, kMaxManifestDepth);
  const Value root(json, where);
  CheckpointManifest manifest;
  manifest.format = root.member("format").integer();
  // Another format may have other keys: its number is what the message is to be about.
  if (manifest.format < CheckpointManifest::kFirstFormat ||
      manifest.format > CheckpointManifest::kFormat) {
    validate(manifest, where);
  }
  manifest.step = root.member("step").integer();
  manifest.world_size = root.member("world_size").integer();
  manifest.config_hash = root.member("config_hash").hash();
  manifest.model_path = root.member("model_path").text();
  manifest.seed = root.member("seed").integer();
  manifest.data = read_data(root.member("data"));
  if (const auto optimizer = root.find("optimizer")) manifest.optimizer = optimizer->text();
  if (const auto lora = root.find("lora")) manifest.lora = read_lora(*lora);
  if (const auto scale = root.find("loss_scale")) manifest.loss_scale = read_loss_scale(*scale);
  manifest.files = root.member("files").by_name(read_file);
  if (manifest.format > 1) {
    manifest.blocks = root.member("blocks").list(read_block);
  } else {
    manifest.tensors = root.member("tensors").by_name(read_tensor);
  }
  validate(manifest, where);
  return manifest;
}

CheckpointTensorMap parse_checkpoint_block(std::string_view text,
                                           const CheckpointManifest& manifest, std::size_t index,
                                           std::string_view where) {
  TESSERA_INVARIANT(index < manifest.blocks.size(), "block ", index);
  const std::string& first = manifest.blocks[index].first;
  const std::string* const next =
      index + 1 < manifest.blocks.size() ? &manifest.blocks[index + 1].first : nullptr;
  const Json json = parse_json_object(text, where, kMaxManifestDepth);
  // Before anything of the size of names times pieces is made.
  for (const auto& [name, item] : json.items()) {
    TESSERA_CHECK(name.size() <= kMaxTensorNameBytes, ErrorKind::kFormat, where,
                  ": found a name of ", name.size(), " bytes, ", printable(name),
                  ", expected at most ", kMaxTensorNameBytes);
    TESSERA_CHECK(name >= first && (next == nullptr || name < *next), ErrorKind::kFormat, where,
                  ": found the tensor ", printable(name), " in the block from ", printable(first),
                  ", expected only those up to ", next ? printable(*next) : "the last");
  }
  TESSERA_CHECK(json.contains(first), ErrorKind::kFormat, where, ": found no tensor ",
                printable(first), ", expected it to be the first of its block");
  auto tensors = Value(json, where).by_name(read_short_tensor);
  for (const auto& [name, tensor] : tensors) validate(tensor, name, manifest, where);
  return tensors;
}

}  // namespace tessera
