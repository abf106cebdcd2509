// CheckpointManifest: a checkpoint as a value: manifest.json, and tensors.jsonl to which it refers,
// next to the files that hold the bytes.
//
// A tensor is named under the model's (Hugging Face) names and has its global shape; its elements
// are in pieces, each a flat range inside a box of the tensor, so that nothing here depends on the
// number of ranks that wrote it or will read it. Tensors are in blocks, in the order of their
// names, each with all of its pieces, and manifest.json says where a block begins: a reader parses
// only the blocks that it needs. The text carries its own hash and that of each block, so a flipped
// bit is found in them as in every other file. The format in full, and version 1, which had the
// tensors in manifest.json: docs/checkpoint.md. Next: checkpoint_folder.h reads one.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/hash.h"
#include "base/lora_spec.h"
#include "base/text/fields.h"
#include "layout/tensor_box.h"
#include "tessera/checkpoint_values.h"
#include "tessera/dtype.h"
#include "tessera/loss_scale.h"

namespace tessera {

inline std::optional<Hash128> from_text(Of<Hash128>, std::string_view text) {
  return parse_hash128(text);
}
constexpr std::string_view expected_text(Of<Hash128>) { return "32 hexadecimal digits"; }

struct Dims {};          ///< dims of a shape, or of the offset or size of a box
struct Exponent {};      ///< a power of two, which files hold as its exponent
struct FormatNumber {};  ///< the number of the format, on which the keys after it depend
/// The range of a list or an object that has a line for each item, in files of these formats.
struct OnLines {
  std::int64_t first_format = 1;
  std::int64_t last_format = 2;
};

template <class V>
constexpr void fields(V& visit, Of<TensorBox>) {
  visit("offset", &TensorBox::offset, Dims{});
  visit("size", &TensorBox::size, Dims{});
}

/// The elements [begin, end) of `box`, flattened in row-major order; they are the tensor `key` of
/// `file`.
struct CheckpointPiece {
  std::string file;
  std::string key;
  TensorBox box;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool operator==(const CheckpointPiece&) const = default;
};

template <class V>
constexpr void fields(V& visit, Of<CheckpointPiece>) {
  visit("file", &CheckpointPiece::file);
  visit("key", &CheckpointPiece::key);
  visit("box", &CheckpointPiece::box);
  visit("begin", &CheckpointPiece::begin);
  visit("end", &CheckpointPiece::end);
}

struct CheckpointTensor {
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;  ///< global
  /// The dtype that a tensor of the model had in the folder with which training began.
  std::optional<DType> source_dtype;
  std::vector<CheckpointPiece> pieces;

  std::int64_t numel() const;
  bool operator==(const CheckpointTensor&) const = default;
};

template <class V>
constexpr void fields(V& visit, Of<CheckpointTensor>) {
  visit("dtype", &CheckpointTensor::dtype);
  visit("shape", &CheckpointTensor::shape, Dims{});
  visit({"source_dtype", Missing::kLeftOut}, &CheckpointTensor::source_dtype);
  visit("pieces", &CheckpointTensor::pieces);
}

using CheckpointTensorMap = std::map<std::string, CheckpointTensor, std::less<>>;

/// A line of tensors.jsonl; the lines before it determine where it begins.
struct CheckpointBlock {
  std::string first;  ///< name of its first tensor
  std::int64_t bytes = 0;
  Hash128 xxh3_128;
  bool operator==(const CheckpointBlock&) const = default;
};

template <class V>
constexpr void fields(V& visit, Of<CheckpointBlock>) {
  visit("first", &CheckpointBlock::first);
  visit("bytes", &CheckpointBlock::bytes);
  visit("xxh3_128", &CheckpointBlock::xxh3_128);
}

struct CheckpointFile {
  std::int64_t bytes = 0;
  Hash128 xxh3_128;
  bool operator==(const CheckpointFile&) const = default;
};

template <class V>
constexpr void fields(V& visit, Of<CheckpointFile>) {
  visit("bytes", &CheckpointFile::bytes);
  visit("xxh3_128", &CheckpointFile::xxh3_128);
}

/// The properties that determine the rows of a step, in addition to the seed and the number of the
/// step.
struct CheckpointData {
  std::vector<std::string> path;  ///< as the config had it; data may have moved
  std::int64_t bytes = 0;         ///< of all its files together
  Hash128 xxh3_128;               ///< hash of their content (docs/checkpoint.md)
  std::int64_t seq_len = 0;
  std::int64_t global_batch_size = 0;
  bool operator==(const CheckpointData&) const = default;
};

template <class V>
constexpr void fields(V& visit, Of<CheckpointData>) {
  visit("path", &CheckpointData::path);
  visit("bytes", &CheckpointData::bytes);
  visit("xxh3_128", &CheckpointData::xxh3_128);
  visit("seq_len", &CheckpointData::seq_len);
  visit("global_batch_size", &CheckpointData::global_batch_size);
}

/// The adapters of a run with a frozen model next to them: the checkpoint holds only the adapters.
struct CheckpointLora : LoraSpec {
  /// hash of the tensors of the model at model_path (docs/checkpoint.md)
  Hash128 base_xxh3_128 = {};
  bool operator==(const CheckpointLora&) const = default;
};

template <class V>
constexpr void fields(V& visit, Of<LoraSpec>) {
  visit("rank", &LoraSpec::rank);
  visit("alpha", &LoraSpec::alpha);
  visit("dropout", &LoraSpec::dropout);
  visit("layers", &LoraSpec::layers);
}

template <class V>
constexpr void fields(V& visit, Of<CheckpointLora>) {
  visit("base_xxh3_128", &CheckpointLora::base_xxh3_128);
  fields(visit, Of<LoraSpec>{});
}
template <>
struct BaseOf<CheckpointLora> {
  using Type = LoraSpec;
};

template <class V>
constexpr void fields(V& visit, Of<LossScaleState>) {
  visit("log2", &LossScaleState::scale, Exponent{});
  visit("good_steps", &LossScaleState::good_steps);
  visit("skipped_steps", &LossScaleState::skipped_steps);
}

struct CheckpointManifest {
  static constexpr std::int64_t kFormat = 2;       ///< what is written
  static constexpr std::int64_t kFirstFormat = 1;  ///< all formats from this one on are read

  std::int64_t format = kFormat;
  std::int64_t step = 0;        ///< the last one that was completed
  std::int64_t world_size = 1;  ///< ranks that wrote it
  Hash128 config_hash;          ///< hash of the text of the run's config.toml
  std::string model_path;       ///< model.path of that config; empty for a model from scratch
  std::int64_t seed = 0;
  CheckpointData data;
  /// As the configuration spells it: "AdamW"; empty in checkpoints that were written before this
  /// key existed.
  std::string optimizer;
  /// The fused weights (as gate and up in one tensor) that Muon steps as one matrix each. None for
  /// other optimizers and models, and in checkpoints that were written before this key existed.
  std::optional<std::vector<std::string>> fused_as_one;
  std::optional<CheckpointLora> lora;
  /// The state of the loss scaler, where the run scales its loss.
  std::optional<LossScaleState> loss_scale;
  /// The number of steps up to `step` that made no update: those that the scaler skipped, and those
  /// without a label. None in checkpoints that were written before this key existed, and in those
  /// of library users.
  std::optional<std::int64_t> left_out_steps;
  /// The values of a library user's checkpoint (tessera/checkpoint.h); empty for the trainer.
  CheckpointValues user;
  std::map<std::string, CheckpointFile, std::less<>> files;  ///< all but manifest.json
  /// In the order of names. Only in manifest.json of version 2.
  std::vector<CheckpointBlock> blocks;
  /// "model/<name>" and "optim/<state>/<name>". Read from manifest.json of version 1; for version 2
  /// the tensors to be written.
  CheckpointTensorMap tensors;

  /// left_out_steps; where it is missing, the steps that the scaler skipped.
  std::int64_t left_out() const;
  bool operator==(const CheckpointManifest&) const = default;
};

template <class V>
constexpr void fields(V& visit, Of<CheckpointManifest>) {
  using M = CheckpointManifest;
  visit("format", &M::format, FormatNumber{});
  visit("step", &M::step);
  visit("world_size", &M::world_size);
  visit("config_hash", &M::config_hash);
  visit("model_path", &M::model_path);
  visit("seed", &M::seed);
  visit("data", &M::data);
  visit({"optimizer", Missing::kLeftOut}, &M::optimizer);
  visit({"fused_as_one", Missing::kLeftOut}, &M::fused_as_one);
  visit({"lora", Missing::kLeftOut}, &M::lora);
  visit({"loss_scale", Missing::kLeftOut}, &M::loss_scale);
  visit({"left_out_steps", Missing::kLeftOut}, &M::left_out_steps);
  visit({"user", Missing::kLeftOut}, &M::user);
  visit("files", &M::files, OnLines{});
  visit({"blocks", Missing::kLeftOut}, &M::blocks, OnLines{.first_format = 2});
  visit({"tensors", Missing::kLeftOut}, &M::tensors, OnLines{.last_format = 1});
}

inline constexpr std::string_view kManifestFile = "manifest.json";
inline constexpr std::string_view kTensorsFile = "tensors.jsonl";
inline constexpr std::string_view kModelPrefix = "model/";
inline constexpr std::string_view kOptimizerPrefix = "optim/";
/// The limit of a manifest's text: one of version 2 has less than 2 MB for 1,000 ranks and 200,000
/// tensors. Reading a text takes up to thirty times its size.
inline constexpr std::int64_t kMaxManifestBytes = std::int64_t{64} << 20;
/// A block that has reached this size ends with its tensor. It is small, since one rank of many
/// needs a few tensors here and there: of a layer's 384 expert matrices it holds the elements of
/// one or two.
inline constexpr std::int64_t kBlockBytes = std::int64_t{8} << 10;
/// The limit of any block: a tensor in some 100,000 pieces. Reading a block takes up to two hundred
/// times its size.
inline constexpr std::int64_t kMaxBlockBytes = std::int64_t{4} << 20;
/// The limit in version 2; each piece in memory has a copy of the name.
inline constexpr std::size_t kMaxTensorNameBytes = 512;
/// The limit of a manifest's step: far above any real one, and later steps can still be counted.
inline constexpr std::int64_t kMaxStep = std::int64_t{1} << 62;
/// The limit of boxes into which one tensor may be cut: by ranks of tensor, expert and pipeline
/// axes together.
inline constexpr std::size_t kMaxBoxes = 4096;

/// The limit of CheckpointManifest::user, names and texts together.
inline constexpr std::int64_t kMaxUserBytes = 1 << 20;

/// Returns "rank_12.safetensors", the name of the file that a rank writes.
std::string rank_file(std::int64_t rank);
/// Returns the key of the `number`-th piece (from 1) of a tensor in one file.
std::string piece_key(std::string_view tensor, std::size_t number);

/// Errors: kFormat naming what is wrong: another format, names that are not plain or not listed,
/// blocks out of order or of another size than their file, boxes outside their tensor, elements
/// that no piece holds or two do.
void validate(const CheckpointManifest& manifest, std::string_view where);

/// Call it before they are written. Errors: kUsage for more than kMaxUserBytes, for an empty name,
/// and for a name or a text that is not UTF-8.
void check_user_values(const CheckpointValues& values);

/// Checks one tensor: its name and pieces must be possible with the files of `manifest`.
void validate(const CheckpointTensor& tensor, const std::string& name,
              const CheckpointManifest& manifest, std::string_view where);

/// Returns the text of manifest.json; its last key is its own hash. Version 1 has the tensors in
/// it, one line each; version 2 the blocks.
std::string to_json(const CheckpointManifest& manifest);

/// The inverse, validated; the text's own hash is not checked. Errors: kFormat.
CheckpointManifest parse_checkpoint_manifest(std::string_view text, std::string_view where);

/// Both texts of a checkpoint in version 2.
struct CheckpointTexts {
  std::string manifest;
  std::string tensors;
};
/// Returns the texts of a manifest that is valid and holds its tensors; files and keys of pieces
/// must be those of rank_file() and piece_key(). Errors: kIo where a text is larger than readers
/// take.
CheckpointTexts texts_of(CheckpointManifest manifest);

/// Returns the tensors of the `index`-th block of `manifest`, validated; the hash of the text is
/// not checked. Errors: kFormat, also for names that belong to another block.
CheckpointTensorMap parse_checkpoint_block(std::string_view text,
                                           const CheckpointManifest& manifest, std::size_t index,
                                           std::string_view where);

/// Upper bounds of the sizes that will be written, in bytes.
struct CheckpointPlan {
  std::int64_t tensors = 0;  ///< the whole tensors.jsonl
  std::int64_t pieces = 0;   ///< the pieces of any one tensor there
  std::int64_t head = 0;     ///< the rest of the text of any one tensor
  bool operator==(const CheckpointPlan&) const = default;
};
/// Returns the plan of one rank that will have at most the tensors of `part`, cut anywhere. Errors:
/// kConfig for a name, and for a part, that is larger than readers take.
CheckpointPlan plan_of(const CheckpointManifest& part);
/// Returns the plan of several ranks, in the worst case: the most pieces of each are of one tensor.
CheckpointPlan sum_of(const std::vector<CheckpointPlan>& plans);

/// Checks, before anything is trained or written, that neither manifest.json nor a block of
/// tensors.jsonl will be larger than readers take. `about` is the manifest without files and
/// tensors, `plan` that of all ranks. Returns an upper bound of the size of manifest.json. Errors:
/// kConfig with what was found and the largest allowed.
std::int64_t check_manifest_plan(const CheckpointManifest& about, std::int64_t ranks,
                                 const CheckpointPlan& plan);

/// Returns the text of the files and tensors that one rank of several wrote, for the rank that
/// writes the manifest.
std::string part_text(const CheckpointManifest& part);
/// The inverse. Elements may lack pieces; nothing is validated.
CheckpointManifest parse_manifest_part(std::string_view text, std::string_view where);

/// Adds the files and pieces of another rank. Errors: kInternal where both describe a tensor
/// differently or wrote a file of one name.
void merge(CheckpointManifest& whole, const CheckpointManifest& part);

/// Errors: kFormat where the text is not, byte for byte, one that to_json wrote.
void check_manifest_hash(std::string_view text, std::string_view where);

}  // namespace tessera
