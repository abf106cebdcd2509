// Parses manifest.json and blocks of tensors.jsonl, as text from any source: every value is checked
// before it is used, and then their relations.
#include <algorithm>
#include <cmath>
#include <span>
#include <tuple>

#include "base/text/json_fields.h"
#include "base/text/json_reader.h"
#include "base/text/printable.h"
#include "io/checkpoint_manifest.h"
#include "io/folder.h"
#include "io/safetensors_header.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr int kMaxManifestDepth = 8;

/// Errors: kFormat for a format that no reader here knows.
void check_format(std::int64_t format, std::string_view where) {
  TESSERA_CHECK(format >= CheckpointManifest::kFirstFormat && format <= CheckpointManifest::kFormat,
                ErrorKind::kFormat, where, ": found format ", format, ", expected ",
                CheckpointManifest::kFirstFormat, " to ", CheckpointManifest::kFormat,
                "; it was written by another version of tessera, read it with that one");
}

std::int64_t rank_of(const JsonCursor& value) {
  const std::int64_t found = value.integer();
  value.require(found >= 0, "the number of a rank");
  return found;
}

/// Reads a shape or a box.
std::vector<std::int64_t> integers_of(const JsonCursor& value) {
  TESSERA_CHECK(!value.value().is_array() || value.value().size() <= kMaxTensorDims,
                ErrorKind::kFormat, value.where(), ": found ", value.value().size(),
                " dims, expected at most ", kMaxTensorDims);
  return value.list([](const JsonCursor& item) { return item.integer(); });
}

/// Returns the size of a list that must have `few` or `many` items.
std::size_t count_of(const JsonCursor& value, std::size_t few, std::size_t many) {
  const nlohmann::json& list = value.value();
  TESSERA_CHECK(list.is_array() && (list.size() == few || list.size() == many), ErrorKind::kFormat,
                value.where(), ": found ", value.shown(),
                list.is_array() ? concat(" of ", list.size(), " items") : "",
                ", expected a list of ", few, " or ", many);
  return list.size();
}

enum class PieceForm : std::uint8_t {
  kLong,
  kShort,  ///< [rank, begin, end] or [rank, begin, end, offset, size]
};

/// Reads the values of a manifest whose form in JSON differs from their members, and those that
/// depend on its format.
class ManifestFromJson {
 public:
  ManifestFromJson(std::string_view where, PieceForm form) : where_(where), form_(form) {}

  /// Another format may have other keys, so an error is to name its number.
  template <class Read>
  void read(Read&, std::int64_t& format, const JsonCursor& at, FormatNumber) {
    format = at.integer();
    check_format(format, where_);
    format_ = format;
  }
  template <class Read, class Items>
  void read(Read& reader, Items& items, const JsonCursor& at, OnLines in) {
    if (format_ >= in.first_format && format_ <= in.last_format) reader(items, at);
  }
  void check(const JsonCursor& at, const CheckpointManifest& manifest) const {
    at.member(manifest.format > 1 ? "blocks" : "tensors");
  }

  template <class Read>
  void read(Read&, double& scale, const JsonCursor& at, Exponent) {
    constexpr std::int64_t kFarOut = 1024;  // validate() refuses it as it refuses infinity
    const auto log2 = std::clamp(at.integer(), -2 * kFarOut, kFarOut);
    scale = std::ldexp(1.0, static_cast<int>(log2));
  }
  template <class Read>
  void read(Read&, CheckpointValues& values, const JsonCursor& at, AnyValue) {
    values = at.by_name([](const JsonCursor& one) -> CheckpointValues::mapped_type {
      if (one.value().is_string()) return one.text();
      one.require(one.value().is_number_integer(), "an integer or a text");
      return one.integer();
    });
  }

  template <class Read>
  void read(Read&, std::vector<std::int64_t>& dims, const JsonCursor& at, Dims) {
    dims = integers_of(at);
  }
  template <class Read>
  void read(Read& reader, CheckpointTensor& tensor, const JsonCursor& at, AnyValue) {
    name_ = at.name();
    shape_ = &tensor.shape;
    reader.object(tensor, at);
  }
  template <class Read>
  void read(Read& reader, std::vector<CheckpointPiece>& pieces, const JsonCursor& at, AnyValue) {
    if (form_ == PieceForm::kLong) return reader.list(pieces, at, AnyValue{});
    const TensorBox whole = TensorBox::whole(*shape_);
    std::map<std::int64_t, std::size_t> numbers;  // the number of pieces in each file so far
    pieces = at.list([&](const JsonCursor& item) {
      const std::size_t parts = count_of(item, 3, 5);
      const std::int64_t rank = rank_of(item.at(0));
      return CheckpointPiece{
          rank_file(rank), piece_key(name_, ++numbers[rank]),
          parts == 3 ? whole : TensorBox{integers_of(item.at(3)), integers_of(item.at(4))},
          item.at(1).integer(), item.at(2).integer()};
    });
  }

 private:
  std::string_view where_;
  PieceForm form_;
  std::int64_t format_ = 1;
  std::string_view name_;  // of the tensor that is being read
  const std::vector<std::int64_t>* shape_ = nullptr;
};

}  // namespace

CheckpointManifest parse_manifest_part(std::string_view text, std::string_view where) {
  const nlohmann::json json = parse_json_object(text, where, kMaxManifestDepth);
  const JsonCursor root(json, where, JsonStyle::kData);
  CheckpointManifest part;
  ManifestFromJson rules(where, PieceForm::kShort);
  JsonFieldsReader read(rules, OtherKeys::kPassedOver);
  read(part.files, root.member("files"));
  read(part.tensors, root.member("tensors"));
  return part;
}

CheckpointManifest parse_checkpoint_manifest(std::string_view text, std::string_view where) {
  const nlohmann::json json = parse_json_object(text, where, kMaxManifestDepth);
  CheckpointManifest manifest;
  ManifestFromJson rules(where, PieceForm::kLong);
  JsonFieldsReader(rules, OtherKeys::kPassedOver).object(manifest, {json, where, JsonStyle::kData});
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
  // Checked before anything of the size of names times pieces is allocated.
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
  CheckpointTensorMap tensors;
  ManifestFromJson rules(where, PieceForm::kShort);
  JsonFieldsReader(rules, OtherKeys::kPassedOver)(tensors, {json, where, JsonStyle::kData});
  for (const auto& [name, tensor] : tensors) validate(tensor, name, manifest, where);
  return tensors;
}

// Checks of a manifest from any source: names, sizes, and pieces that hold every element of a
// tensor once.

namespace {

/// Returns what is being checked, for messages: "FILE: tensor 'NAME'".
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

/// Returns the pieces by box, and within a box by position.
std::vector<const CheckpointPiece*> in_order(const CheckpointTensor& tensor) {
  std::vector<const CheckpointPiece*> pieces;
  for (const CheckpointPiece& piece : tensor.pieces) pieces.push_back(&piece);
  std::sort(pieces.begin(), pieces.end(), [](const auto* a, const auto* b) {
    return std::tie(a->box.offset, a->box.size, a->begin) <
           std::tie(b->box.offset, b->box.size, b->begin);
  });
  return pieces;
}

/// Returns the boxes, in the order of their offsets; the pieces of each must cover it once.
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
  // elements of boxes without common elements: never more than the tensor has
  std::int64_t held = 0;
  for (std::size_t a = 0; a < boxes.size(); ++a) {
    for (std::size_t b = a + 1; b < boxes.size(); ++b) {
      if (!boxes[a]->offset.empty() &&
          boxes[b]->offset[0] >= boxes[a]->offset[0] + boxes[a]->size[0]) {
        break;  // they are sorted, so no later one overlaps either
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

/// Errors: kFormat unless the blocks are in order and make up their file.
void check_blocks(const CheckpointManifest& manifest, std::string_view where) {
  std::int64_t bytes = 0;
  std::string_view before;
  for (const CheckpointBlock& block : manifest.blocks) {
    const std::string what = concat(where, ": block from ", printable(block.first));
    TESSERA_CHECK(is_tensor_name(block.first) && block.first.size() <= kMaxTensorNameBytes,
                  ErrorKind::kFormat, what, ": found this name, expected model/NAME or ",
                  "optim/STATE/NAME of at most ", kMaxTensorNameBytes, " bytes");
    TESSERA_CHECK(before < block.first, ErrorKind::kFormat, what, ": found it behind ",
                  printable(before), ", expected blocks in the order of names, each once");
    TESSERA_CHECK(block.bytes >= 1 && block.bytes <= kMaxBlockBytes, ErrorKind::kFormat, what,
                  ": found ", block.bytes, " bytes, expected 1 to ", kMaxBlockBytes);
    before = block.first;
    bytes += block.bytes;  // a text has at most 64 MiB, so the sum stays far below 2^63
  }
  const auto file = manifest.files.find(kTensorsFile);
  const std::int64_t listed = file == manifest.files.end() ? 0 : file->second.bytes;
  TESSERA_CHECK(listed == bytes, ErrorKind::kFormat, where, ": found blocks of ", bytes,
                " bytes together, expected the ", listed, " of ", kTensorsFile);
}

}  // namespace

void validate(const CheckpointManifest& manifest, std::string_view where) {
  check_format(manifest.format, where);
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
                  ", expected the plain name of a file next to the manifest");
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
  if (const auto& steps = manifest.left_out_steps) {
    TESSERA_CHECK(*steps >= 0 && *steps <= manifest.step, ErrorKind::kFormat, where, ": found ",
                  *steps, " left_out_steps, expected from 0 to the step, ", manifest.step);
  }
  if (manifest.format > 1) check_blocks(manifest, where);
  for (const auto& [name, tensor] : manifest.tensors) validate(tensor, name, manifest, where);
}

void validate(const CheckpointTensor& tensor, const std::string& name,
              const CheckpointManifest& manifest, std::string_view where) {
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

}  // namespace tessera
