// manifest.json and blocks of tensors.jsonl as text from anywhere: every value is looked at before
// it is used.
#include <algorithm>
#include <cmath>

#include "base/json_reader.h"
#include "base/printable.h"
#include "io/checkpoint_manifest.h"
#include "io/safetensors_header.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr int kMaxManifestDepth = 8;

std::int64_t rank_of(const JsonCursor& value) {
  const std::int64_t found = value.integer();
  value.require(found >= 0, "the number of a rank");
  return found;
}

Hash128 hash_of(const JsonCursor& value) {
  const auto hash = parse_hash128(value.text());
  value.require(hash.has_value(), "32 hexadecimal digits");
  return *hash;
}

DType dtype_of(const JsonCursor& value) {
  const auto dtype = parse_dtype(value.text());
  value.require(dtype.has_value(), "the name of a dtype");
  return *dtype;
}

/// Of a shape or a box.
std::vector<std::int64_t> integers_of(const JsonCursor& value) {
  TESSERA_CHECK(!value.value().is_array() || value.value().size() <= kMaxTensorDims,
                ErrorKind::kFormat, value.where(), ": found ", value.value().size(),
                " dims, expected at most ", kMaxTensorDims);
  return value.list([](const JsonCursor& item) { return item.integer(); });
}

/// Of a list of `few` or `many` items: how many it has.
std::size_t count_of(const JsonCursor& value, std::size_t few, std::size_t many) {
  const nlohmann::json& list = value.value();
  TESSERA_CHECK(list.is_array() && (list.size() == few || list.size() == many), ErrorKind::kFormat,
                value.where(), ": found ", value.shown(),
                list.is_array() ? concat(" of ", list.size(), " items") : "",
                ", expected a list of ", few, " or ", many);
  return list.size();
}

std::string text_of(const JsonCursor& value) { return value.text(); }

CheckpointData read_data(const JsonCursor& value) {
  CheckpointData data;
  data.path = value.member("path").list(text_of);
  data.bytes = value.member("bytes").integer();
  data.xxh3_128 = hash_of(value.member("xxh3_128"));
  data.seq_len = value.member("seq_len").integer();
  data.global_batch_size = value.member("global_batch_size").integer();
  return data;
}

CheckpointLora read_lora(const JsonCursor& value) {
  CheckpointLora lora;
  lora.base_xxh3_128 = hash_of(value.member("base_xxh3_128"));
  lora.rank = value.member("rank").integer();
  lora.alpha = value.member("alpha").number();
  lora.dropout = value.member("dropout").number();
  lora.layers = value.member("layers").list(text_of);
  return lora;
}

LossScaleState read_loss_scale(const JsonCursor& value) {
  constexpr std::int64_t kFarOut = 1024;  // no double: validate() refuses it as it refuses infinity
  const auto log2 = std::clamp(value.member("log2").integer(), -2 * kFarOut, kFarOut);
  return {std::ldexp(1.0, static_cast<int>(log2)), value.member("good_steps").integer(),
          value.member("skipped_steps").integer()};
}

CheckpointFile read_file(const JsonCursor& value) {
  return {value.member("bytes").integer(), hash_of(value.member("xxh3_128"))};
}

CheckpointPiece read_piece(const JsonCursor& value) {
  const JsonCursor box = value.member("box");
  return {value.member("file").text(),
          value.member("key").text(),
          {integers_of(box.member("offset")), integers_of(box.member("size"))},
          value.member("begin").integer(),
          value.member("end").integer()};
}

/// All but its pieces.
CheckpointTensor read_tensor_head(const JsonCursor& value) {
  CheckpointTensor tensor;
  tensor.dtype = dtype_of(value.member("dtype"));
  tensor.shape = integers_of(value.member("shape"));
  if (const auto source = value.find("source_dtype")) tensor.source_dtype = dtype_of(*source);
  return tensor;
}

CheckpointTensor read_tensor(const JsonCursor& value) {
  CheckpointTensor tensor = read_tensor_head(value);
  tensor.pieces = value.member("pieces").list(read_piece);
  return tensor;
}

/// With pieces as [rank, begin, end] or [rank, begin, end, offset, size].
CheckpointTensor read_short_tensor(const JsonCursor& value) {
  CheckpointTensor tensor = read_tensor_head(value);
  const TensorBox whole = TensorBox::whole(tensor.shape);
  std::map<std::int64_t, std::size_t> numbers;  // of pieces in each file so far
  tensor.pieces = value.member("pieces").list([&](const JsonCursor& item) {
    const std::size_t parts = count_of(item, 3, 5);
    const std::int64_t rank = rank_of(item.at(0));
    return CheckpointPiece{
        rank_file(rank), piece_key(value.name(), ++numbers[rank]),
        parts == 3 ? whole : TensorBox{integers_of(item.at(3)), integers_of(item.at(4))},
        item.at(1).integer(), item.at(2).integer()};
  });
  return tensor;
}

CheckpointBlock read_block(const JsonCursor& value) {
  return {value.member("first").text(), value.member("bytes").integer(),
          hash_of(value.member("xxh3_128"))};
}

}  // namespace

CheckpointManifest parse_manifest_part(std::string_view text, std::string_view where) {
  const nlohmann::json json = parse_json_object(text, where, kMaxManifestDepth);
  const JsonCursor root(json, where, JsonStyle::kData);
  CheckpointManifest part;
  part.files = root.member("files").by_name(read_file);
  part.tensors = root.member("tensors").by_name(read_short_tensor);
  return part;
}

CheckpointManifest parse_checkpoint_manifest(std::string_view text, std::string_view where) {
  const nlohmann::json json = parse_json_object(text, where, kMaxManifestDepth);
  const JsonCursor root(json, where, JsonStyle::kData);
  CheckpointManifest manifest;
  manifest.format = root.member("format").integer();
  // Another format may have other keys: its number is what the message is to be about.
  if (manifest.format < CheckpointManifest::kFirstFormat ||
      manifest.format > CheckpointManifest::kFormat) {
    validate(manifest, where);
  }
  manifest.step = root.member("step").integer();
  manifest.world_size = root.member("world_size").integer();
  manifest.config_hash = hash_of(root.member("config_hash"));
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
  const nlohmann::json json = parse_json_object(text, where, kMaxManifestDepth);
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
  auto tensors = JsonCursor(json, where, JsonStyle::kData).by_name(read_short_tensor);
  for (const auto& [name, tensor] : tensors) validate(tensor, name, manifest, where);
  return tensors;
}

}  // namespace tessera
