#include "io/checkpoint_manifest.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/printable.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::string quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

template <class T, class Write>
std::string listed(const std::vector<T>& items, const Write& write) {
  std::string text = "[";
  for (const T& item : items) text += (text.size() > 1 ? ", " : "") + write(item);
  return text + "]";
}

std::string numbers(const std::vector<std::int64_t>& items) {
  return listed(items, [](std::int64_t item) { return std::to_string(item); });
}

template <class Write>
std::string tensor_line(const CheckpointTensor& tensor, const Write& write_piece) {
  std::string text =
      concat(R"({"dtype": ")", to_string(tensor.dtype), R"(", "shape": )", numbers(tensor.shape));
  if (tensor.source_dtype) {
    text += concat(R"(, "source_dtype": ")", to_string(*tensor.source_dtype), "\"");
  }
  return text + R"(, "pieces": )" + listed(tensor.pieces, write_piece) + "}";
}

/// Of a name that rank_file() gives.
std::int64_t rank_of(const CheckpointPiece& piece) {
  constexpr std::string_view kBefore = "rank_";
  std::int64_t rank = -1;
  const std::string_view name = piece.file;
  if (name.starts_with(kBefore)) {
    std::from_chars(name.data() + kBefore.size(), name.data() + name.size(), rank);
  }
  TESSERA_INVARIANT(rank >= 0 && rank_file(rank) == name, "a piece in ", name);
  return rank;
}

/// Pieces as [rank, begin, end] of the whole tensor, or with offset and size of their box behind.
std::string short_line(const std::string& name, const CheckpointTensor& tensor) {
  const TensorBox whole = TensorBox::whole(tensor.shape);
  std::map<std::int64_t, std::size_t> numbers_of;  // of pieces in each file so far
  const auto short_piece = [&](const CheckpointPiece& piece) {
    const std::int64_t rank = rank_of(piece);
    TESSERA_INVARIANT(piece.key == piece_key(name, ++numbers_of[rank]), "the piece ", piece.key,
                      " of ", name);
    std::string text = concat("[", rank, ", ", piece.begin, ", ", piece.end);
    if (!(piece.box == whole)) {
      text += concat(", ", numbers(piece.box.offset), ", ", numbers(piece.box.size));
    }
    return text + "]";
  };
  return tensor_line(tensor, short_piece);
}

std::string block_line(const CheckpointBlock& block) {
  return concat(R"({"first": )", quoted(block.first), R"(, "bytes": )", block.bytes,
                R"(, "xxh3_128": ")", to_string(block.xxh3_128), "\"}");
}

std::string piece_text(const CheckpointPiece& piece) {
  return concat(R"({"file": )", quoted(piece.file), R"(, "key": )", quoted(piece.key),
                R"(, "box": {"offset": )", numbers(piece.box.offset), R"(, "size": )",
                numbers(piece.box.size), R"(}, "begin": )", piece.begin, R"(, "end": )", piece.end,
                "}");
}

std::string file_line(const CheckpointFile& file) {
  return concat(R"({"bytes": )", file.bytes, R"(, "xxh3_128": ")", to_string(file.xxh3_128), "\"}");
}

std::string number(double value) { return nlohmann::json(value).dump(); }

std::string lora_line(const CheckpointLora& lora) {
  return concat(R"({"base_xxh3_128": ")", to_string(lora.base_xxh3_128), R"(", "rank": )",
                lora.rank, R"(, "alpha": )", number(lora.alpha), R"(, "dropout": )",
                number(lora.dropout), R"(, "layers": )", listed(lora.layers, quoted), "}");
}

/// The scale by its exponent: an integer, whatever it is.
std::string loss_scale_line(const LossScaleState& state) {
  return concat(",\n \"loss_scale\": {\"log2\": ", std::ilogb(state.scale),
                ", \"good_steps\": ", state.good_steps,
                ", \"skipped_steps\": ", state.skipped_steps, "}");
}

std::string blocks_line(const std::vector<CheckpointBlock>& blocks) {
  std::string text = "[";
  for (const CheckpointBlock& block : blocks) {
    text += (text.size() > 1 ? ",\n  " : "\n  ") + block_line(block);
  }
  return text + "\n ]";
}

template <class Map, class Write>
std::string by_name(const Map& items, const Write& write) {
  std::string text = "{";
  for (const auto& [name, item] : items) {
    text += (text.size() > 1 ? ",\n  " : "\n  ") + quoted(name) + ": " + write(item);
  }
  return text + "\n }";
}

// Of what a line may have.
constexpr std::int64_t kLargestNumber = std::numeric_limits<std::int64_t>::max();

std::int64_t longest_file_line() {
  const std::map<std::string, CheckpointFile> files = {
      {rank_file(kLargestNumber), {kLargestNumber, {}}}};
  return std::ssize(by_name(files, file_line));
}

/// By how many digits pieces may become longer that are cut elsewhere in their boxes.
std::int64_t longest_cut(const CheckpointTensor& tensor) {
  const auto digits = [](std::int64_t number) { return std::ssize(std::to_string(number)); };
  std::int64_t more = 0;
  for (const CheckpointPiece& piece : tensor.pieces) {
    more += 2 * digits(piece.box.numel()) - digits(piece.begin) - digits(piece.end);
  }
  return more;
}

// The text ends with its own hash, that of all bytes before the digits.
constexpr std::string_view kHashKey = ",\n \"xxh3_128\": \"";
constexpr std::string_view kAfterHash = "\"\n}\n";
constexpr std::size_t kHashDigits = 32;

}  // namespace

std::string rank_file(std::int64_t rank) { return concat("rank_", rank, ".safetensors"); }

std::string piece_key(std::string_view tensor, std::size_t number) {
  return number == 1 ? std::string(tensor) : concat(tensor, "#", number);
}

std::int64_t CheckpointTensor::numel() const { return TensorBox::whole(shape).numel(); }

std::string to_json(const CheckpointManifest& manifest) {
  const CheckpointData& data = manifest.data;
  std::string text = concat(
      "{\n \"format\": ", manifest.format, ",\n \"step\": ", manifest.step,
      ",\n \"world_size\": ", manifest.world_size, ",\n \"config_hash\": \"",
      to_string(manifest.config_hash), "\",\n \"model_path\": ", quoted(manifest.model_path),
      ",\n \"seed\": ", manifest.seed, ",\n \"data\": {\"path\": ", listed(data.path, quoted),
      ", \"bytes\": ", data.bytes, ", \"xxh3_128\": \"", to_string(data.xxh3_128),
      "\", \"seq_len\": ", data.seq_len, ", \"global_batch_size\": ", data.global_batch_size, "}",
      manifest.optimizer.empty() ? "" : ",\n \"optimizer\": " + quoted(manifest.optimizer),
      manifest.lora ? ",\n \"lora\": " + lora_line(*manifest.lora) : "",
      manifest.loss_scale ? loss_scale_line(*manifest.loss_scale) : "",
      ",\n \"files\": ", by_name(manifest.files, file_line));
  if (manifest.format > 1) {
    text += concat(",\n \"blocks\": ", blocks_line(manifest.blocks));
  } else {
    const auto line = [](const CheckpointTensor& tensor) {
      return tensor_line(tensor, piece_text);
    };
    text += concat(",\n \"tensors\": ", by_name(manifest.tensors, line));
  }
  text += kHashKey;
  text += to_string(Hash128Stream().add(text).digest());
  return text += kAfterHash;
}

CheckpointTexts texts_of(CheckpointManifest manifest) {
  CheckpointTexts texts;
  std::string line;
  const std::string* first = nullptr;
  const auto end_block = [&] {
    line += "}\n";
    TESSERA_CHECK(std::ssize(line) <= kMaxBlockBytes, ErrorKind::kIo, kTensorsFile, ": found ",
                  line.size(), " bytes from ", printable(*first), " on, expected at most ",
                  kMaxBlockBytes, " in a block, which readers take; run on fewer ranks");
    manifest.blocks.push_back({*first, std::ssize(line), Hash128Stream().add(line).digest()});
    texts.tensors += line;
    line.clear();
  };
  manifest.blocks.clear();
  for (const auto& [name, tensor] : manifest.tensors) {
    TESSERA_CHECK(name.size() <= kMaxTensorNameBytes, ErrorKind::kIo, kTensorsFile,
                  ": found a name of ", name.size(), " bytes, ", printable(name),
                  ", expected at most ", kMaxTensorNameBytes);
    if (line.empty()) first = &name;
    line += concat(line.empty() ? "{" : ", ", quoted(name), ": ", short_line(name, tensor));
    if (std::ssize(line) >= kBlockBytes) end_block();
  }
  if (!line.empty()) end_block();
  manifest.files[std::string(kTensorsFile)] = {std::ssize(texts.tensors),
                                               Hash128Stream().add(texts.tensors).digest()};
  manifest.format = CheckpointManifest::kFormat;
  texts.manifest = to_json(manifest);
  TESSERA_CHECK(std::ssize(texts.manifest) <= kMaxManifestBytes, ErrorKind::kIo, kManifestFile,
                ": found ", texts.manifest.size(), " bytes, expected at most ", kMaxManifestBytes,
                ", which readers take; run on fewer ranks");
  return texts;
}

CheckpointPlan plan_of(const CheckpointManifest& part) {
  CheckpointPlan plan;
  for (const auto& [name, tensor] : part.tensors) {
    TESSERA_CHECK(name.size() <= kMaxTensorNameBytes, ErrorKind::kConfig,
                  "checkpoint: found a tensor with a name of ", name.size(), " bytes, ",
                  printable(name), ", expected at most ", kMaxTensorNameBytes,
                  ", which readers take; shorten it, or set checkpoint.enable = false");
    const auto bare =
        std::ssize(short_line(name, {tensor.dtype, tensor.shape, tensor.source_dtype, {}}));
    const auto whole = std::ssize(short_line(name, tensor)) + longest_cut(tensor);
    // Between tensors, and at the ends of a block; between pieces of two ranks.
    const auto head = std::ssize(concat("{", quoted(name), ": ", "}\n")) + bare;
    const auto pieces = whole - bare + std::ssize(std::string_view(", "));
    plan.tensors += head + pieces;
    plan.pieces = std::max(plan.pieces, pieces);
    plan.head = std::max(plan.head, head);
  }
  const auto bytes = plan.tensors + std::ssize(part_text({})) + 2 * longest_file_line();
  TESSERA_CHECK(bytes <= kMaxManifestBytes, ErrorKind::kConfig,
                "checkpoint: found a rank that may have ", bytes, " bytes to say of its ",
                part.tensors.size(), " tensors, expected at most ", kMaxManifestBytes,
                ", which the rank that writes ", kManifestFile,
                " takes; run on more ranks, or set checkpoint.enable = false");
  return plan;
}

CheckpointPlan sum_of(const std::vector<CheckpointPlan>& plans) {
  CheckpointPlan sum;
  for (const CheckpointPlan& plan : plans) {
    sum.tensors += plan.tensors;
    sum.pieces += plan.pieces;
    sum.head = std::max(sum.head, plan.head);
  }
  return sum;
}

std::int64_t check_manifest_plan(const CheckpointManifest& about, std::int64_t ranks,
                                 const CheckpointPlan& plan) {
  // A block ends with the tensor that makes it as long as one has to be.
  const std::int64_t block = kBlockBytes + plan.head + plan.pieces;
  TESSERA_CHECK(block <= kMaxBlockBytes, ErrorKind::kConfig, "checkpoint: found a plan in which ",
                ranks, " ranks may have ", plan.pieces,
                " bytes of pieces of one tensor, a block of ", block, " in ", kTensorsFile,
                ", expected at most ", kMaxBlockBytes,
                ", which readers take; run on fewer ranks, or set checkpoint.enable = false");
  const auto entry_bytes =
      std::ssize(blocks_line({{std::string(kMaxTensorNameBytes, 'x'), kLargestNumber, {}}}));
  const std::int64_t most = std::ssize(to_json(about)) + (ranks + 2) * longest_file_line() +
                            (plan.tensors / kBlockBytes + 1) * entry_bytes;
  TESSERA_CHECK(most <= kMaxManifestBytes, ErrorKind::kConfig, "checkpoint: found a plan whose ",
                kManifestFile, " may have ", most, " bytes for ", ranks, " ranks and ",
                plan.tensors, " bytes of ", kTensorsFile, ", expected at most ", kMaxManifestBytes,
                ", which readers take; run on fewer ranks, or set checkpoint.enable = false");
  return most;
}

std::string part_text(const CheckpointManifest& part) {
  std::string text = concat("{\"files\": ", by_name(part.files, file_line), ", \"tensors\": {");
  std::string_view between;
  for (const auto& [name, tensor] : part.tensors) {
    text += concat(between, quoted(name), ": ", short_line(name, tensor));
    between = ", ";
  }
  return text + "}}";
}

void merge(CheckpointManifest& whole, const CheckpointManifest& part) {
  for (const auto& [name, file] : part.files) {
    TESSERA_INVARIANT(whole.files.emplace(name, file).second, "two ranks wrote the file ", name);
  }
  for (const auto& [name, tensor] : part.tensors) {
    const auto [known, added] = whole.tensors.try_emplace(name, tensor);
    if (added) continue;
    TESSERA_INVARIANT(known->second.dtype == tensor.dtype && known->second.shape == tensor.shape &&
                          known->second.source_dtype == tensor.source_dtype,
                      "two ranks describe ", name, " differently");
    known->second.pieces.insert(known->second.pieces.end(), tensor.pieces.begin(),
                                tensor.pieces.end());
  }
}

void check_manifest_hash(std::string_view text, std::string_view where) {
  const std::size_t tail = kHashDigits + kAfterHash.size();
  TESSERA_CHECK(text.size() > tail && text.ends_with(kAfterHash), ErrorKind::kFormat, where,
                ": found another end than tessera writes; the file was cut off or altered");
  const std::string_view hashed = text.substr(0, text.size() - tail);
  const auto stated = parse_hash128(text.substr(hashed.size(), kHashDigits));
  const Hash128 found = Hash128Stream().add(hashed).digest();
  TESSERA_CHECK(hashed.ends_with(kHashKey) && stated && *stated == found, ErrorKind::kFormat, where,
                ": found a text with XXH3-128 ", to_string(found), ", expected ",
                stated ? to_string(*stated) : "a hash at its end",
                "; the file was altered, take another checkpoint");
}

}  // namespace tessera
