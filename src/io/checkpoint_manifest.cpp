#include "io/checkpoint_manifest.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/printable.h"
#include "io/plain_file_name.h"
#include "io/safetensors_header.h"
#include "tessera/error.h"

namespace tessera {
namespace {

/// What is being judged, for messages: "FILE: tensor 'NAME'".
std::string tensor_text(std::string_view where, std::string_view name) {
  return concat(where, ": tensor ", printable(name));
}

bool is_tensor_name(std::string_view name) {
  if (name.starts_with(kModelPrefix)) return name.size() > kModelPrefix.size();
  if (!name.starts_with(kOptimizerPrefix)) return false;
  const std::size_t slash = name.find('/', kOptimizerPrefix.size());
  return slash != std::string_view::npos && slash > kOptimizerPrefix.size() &&
         slash + 1 < name.size();
}

void check_box(const CheckpointPiece& piece, std::span<const std::int64_t> shape,
               const std::string& what) {
  const TensorBox& box = piece.box;
  TESSERA_CHECK(box.offset.size() == shape.size() && box.size.size() == shape.size(),
                ErrorKind::kFormat, what, ": found a box of ", box.offset.size(), " and ",
                box.size.size(), " dims, expected ", shape.size());
  for (std::size_t d = 0; d < shape.size(); ++d) {
    TESSERA_CHECK(box.offset[d] >= 0 && box.size[d] >= 1 && box.size[d] <= shape[d] &&
                      box.offset[d] <= shape[d] - box.size[d],
                  ErrorKind::kFormat, what, ": found a box from ", shape_text(box.offset),
                  " of size ", shape_text(box.size), ", expected one inside ", shape_text(shape));
  }
  TESSERA_CHECK(piece.begin >= 0 && piece.begin < piece.end && piece.end <= box.numel(),
                ErrorKind::kFormat, what, ": found a piece of elements ", piece.begin, " to ",
                piece.end, ", expected some of the ", box.numel(), " of its box");
}

/// Pieces by box, and in a box by position.
std::vector<const CheckpointPiece*> in_order(const CheckpointTensor& tensor) {
  std::vector<const CheckpointPiece*> pieces;
  for (const CheckpointPiece& piece : tensor.pieces) pieces.push_back(&piece);
  std::sort(pieces.begin(), pieces.end(), [](const auto* a, const auto* b) {
    return std::tie(a->box.offset, a->box.size, a->begin) <
           std::tie(b->box.offset, b->box.size, b->begin);
  });
  return pieces;
}

/// The boxes, in the order of their offsets; the pieces of each cover it once.
std::vector<const TensorBox*> covered_boxes(const CheckpointTensor& tensor,
                                            const std::string& what) {
  std::vector<const TensorBox*> boxes;
  std::int64_t covered = 0;
  const auto check_end = [&] {
    TESSERA_CHECK(boxes.empty() || covered == boxes.back()->numel(), ErrorKind::kFormat, what,
                  ": found no piece with element ", covered, " of the box from ",
                  shape_text(boxes.back()->offset), ", expected each element in one");
  };
  for (const CheckpointPiece* piece : in_order(tensor)) {
    if (boxes.empty() || !(*boxes.back() == piece->box)) {
      check_end();
      boxes.push_back(&piece->box);
      covered = 0;
    }
    TESSERA_CHECK(piece->begin == covered, ErrorKind::kFormat, what, ": found ",
                  piece->begin > covered ? "no piece" : "two pieces", " with element ",
                  std::min(piece->begin, covered), " of the box from ",
                  shape_text(piece->box.offset), ", expected each element in one");
    covered = piece->end;
  }
  check_end();
  return boxes;
}

void check_cover(const CheckpointTensor& tensor, const std::string& what) {
  const std::vector<const TensorBox*> boxes = covered_boxes(tensor, what);
  TESSERA_CHECK(boxes.size() <= kMaxBoxes, ErrorKind::kFormat, what, ": found ", boxes.size(),
                " boxes, expected at most ", kMaxBoxes);
  std::int64_t held = 0;  // of boxes without a common element: never more than the tensor has
  for (std::size_t a = 0; a < boxes.size(); ++a) {
    for (std::size_t b = a + 1; b < boxes.size(); ++b) {
      if (!boxes[a]->offset.empty() &&
          boxes[b]->offset[0] >= boxes[a]->offset[0] + boxes[a]->size[0]) {
        break;  // they are sorted: neither does any later one reach back
      }
      TESSERA_CHECK(!overlap(*boxes[a], *boxes[b]), ErrorKind::kFormat, what,
                    ": found the boxes from ", shape_text(boxes[a]->offset), " and ",
                    shape_text(boxes[b]->offset), " with common elements, expected each in one");
    }
    held += boxes[a]->numel();
  }
  TESSERA_CHECK(held == tensor.numel(), ErrorKind::kFormat, what, ": found ", held,
                " elements in its pieces, expected ", tensor.numel(), " of ",
                shape_text(tensor.shape));
}

void check_tensor(const CheckpointManifest& manifest, const std::string& name,
                  const CheckpointTensor& tensor, std::string_view where) {
  const std::string what = tensor_text(where, name);
  TESSERA_CHECK(is_tensor_name(name), ErrorKind::kFormat, what,
                ": found this name, expected model/NAME or optim/STATE/NAME");
  TESSERA_CHECK(tensor.shape.size() <= kMaxTensorDims, ErrorKind::kFormat, what, ": found ",
                tensor.shape.size(), " dims, expected at most ", kMaxTensorDims);
  checked_numel(tensor.shape, tensor.dtype, ErrorKind::kFormat, what);
  for (const CheckpointPiece& piece : tensor.pieces) {
    TESSERA_CHECK(manifest.files.contains(piece.file), ErrorKind::kFormat, what,
                  ": found a piece in ", printable(piece.file),
                  ", expected one of the files that the manifest lists");
    check_box(piece, tensor.shape, what);
  }
  check_cover(tensor, what);
}

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

std::string piece_text(const CheckpointPiece& piece) {
  return concat(R"({"file": )", quoted(piece.file), R"(, "key": )", quoted(piece.key),
                R"(, "box": {"offset": )", numbers(piece.box.offset), R"(, "size": )",
                numbers(piece.box.size), R"(}, "begin": )", piece.begin, R"(, "end": )", piece.end,
                "}");
}

std::string tensor_line(const CheckpointTensor& tensor) {
  std::string text =
      concat(R"({"dtype": ")", to_string(tensor.dtype), R"(", "shape": )", numbers(tensor.shape));
  if (tensor.source_dtype) {
    text += concat(R"(, "source_dtype": ")", to_string(*tensor.source_dtype), "\"");
  }
  return text + R"(, "pieces": )" + listed(tensor.pieces, piece_text) + "}";
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

template <class Map, class Write>
std::string by_name(const Map& items, const Write& write) {
  std::string text = "{";
  for (const auto& [name, item] : items) {
    text += (text.size() > 1 ? ",\n  " : "\n  ") + quoted(name) + ": " + write(item);
  }
  return text + "\n }";
}

// The text ends with its own hash, that of all bytes before the digits.
constexpr std::string_view kHashKey = ",\n \"xxh3_128\": \"";
constexpr std::string_view kAfterHash = "\"\n}\n";
constexpr std::size_t kHashDigits = 32;

}  // namespace

std::int64_t CheckpointTensor::numel() const { return TensorBox::whole(shape).numel(); }

void validate(const CheckpointManifest& manifest, std::string_view where) {
  TESSERA_CHECK(manifest.format == CheckpointManifest::kFormat, ErrorKind::kFormat, where,
                ": found format ", manifest.format, ", expected ", CheckpointManifest::kFormat,
                "; it was written by another version of tessera");
  TESSERA_CHECK(manifest.step >= 0 && manifest.step < kMaxStep && manifest.world_size >= 1 &&
                    manifest.seed >= 0,
                ErrorKind::kFormat, where, ": found step ", manifest.step, ", world_size ",
                manifest.world_size, ", seed ", manifest.seed, ", expected a step below ", kMaxStep,
                ", numbers that are not negative, and a rank");
  if (const auto& lora = manifest.lora) {
    TESSERA_CHECK(lora->rank >= 1 && std::isfinite(lora->alpha) && lora->alpha > 0 &&
                      lora->dropout >= 0 && lora->dropout < 1 && !lora->layers.empty(),
                  ErrorKind::kFormat, where, ": lora: found rank ", lora->rank, ", alpha ",
                  lora->alpha, ", dropout ", lora->dropout, ", ", lora->layers.size(),
                  " layers, expected a rank, an alpha above 0, a dropout from 0 to below 1, and a "
                  "layer");
  }
  for (const auto& [name, file] : manifest.files) {
    TESSERA_CHECK(is_plain_file_name(name) && name != kManifestFile, ErrorKind::kFormat, where,
                  ": found the file ", printable(name),
                  ", expected the plain name of a file beside the manifest");
    TESSERA_CHECK(file.bytes >= 0, ErrorKind::kFormat, where, ": file ", printable(name),
                  ": found ", file.bytes, " bytes");
  }
  if (const auto& state = manifest.loss_scale) {
    TESSERA_CHECK(
        is_loss_scale(state->scale) && state->has_possible_counts(), ErrorKind::kFormat, where,
        ": found the loss scale ", state->scale, " after ", state->good_steps, " finite and ",
        state->skipped_steps,
        " skipped steps, expected a power of two that float32 holds, and numbers from 0 to "
        "less than ",
        LossScaleState::kMaxSteps);
  }
  for (const auto& [name, tensor] : manifest.tensors) check_tensor(manifest, name, tensor, where);
}

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
      ",\n \"files\": ", by_name(manifest.files, file_line),
      ",\n \"tensors\": ", by_name(manifest.tensors, tensor_line), kHashKey);
  text += to_string(Hash128Stream().add(text).digest());
  return text += kAfterHash;
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
