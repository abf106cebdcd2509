// What a checkpoint is, as a value: manifest.json beside the files that hold the bytes.
//
// A tensor is named under the model's (Hugging Face) names and has its global shape; its elements
// lie in pieces, each a flat range inside a box of it, so that nothing here knows how many ranks
// wrote it or will read it. The text carries its own hash: a flipped bit is found in it as in every
// other file. The format in full: docs/checkpoint.md. Next: checkpoint_folder.h reads one.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/hash.h"
#include "layout/tensor_box.h"
#include "tessera/dtype.h"
#include "tessera/loss_scale.h"

namespace tessera {

/// Elements [begin, end) of `box`, flattened in row-major order, are the tensor `key` of `file`.
struct CheckpointPiece {
  std::string file;
  std::string key;
  TensorBox box;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool operator==(const CheckpointPiece&) const = default;
};

struct CheckpointTensor {
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;  ///< global
  /// Of a model's tensor: the dtype that it had in the folder that training began with.
  std::optional<DType> source_dtype;
  std::vector<CheckpointPiece> pieces;

  std::int64_t numel() const;
  bool operator==(const CheckpointTensor&) const = default;
};

struct CheckpointFile {
  std::int64_t bytes = 0;
  Hash128 xxh3_128;
  bool operator==(const CheckpointFile&) const = default;
};

/// What the rows of a step follow from, besides the seed and the number of the step.
struct CheckpointData {
  std::vector<std::string> path;  ///< as the config had it; data may move
  std::int64_t bytes = 0;         ///< of all its files
  Hash128 xxh3_128;               ///< of their content (docs/checkpoint.md)
  std::int64_t seq_len = 0;
  std::int64_t global_batch_size = 0;
  bool operator==(const CheckpointData&) const = default;
};

/// Of a run that trains adapters beside a frozen model: the checkpoint holds the adapters alone.
struct CheckpointLora {
  Hash128 base_xxh3_128;  ///< of the tensors of the model at model_path (docs/checkpoint.md)
  std::int64_t rank = 0;
  double alpha = 0.0;
  double dropout = 0.0;
  std::vector<std::string> layers;  ///< that have an adapter
  bool operator==(const CheckpointLora&) const = default;
};

struct CheckpointManifest {
  static constexpr std::int64_t kFormat = 1;

  std::int64_t format = kFormat;
  std::int64_t step = 0;        ///< the last one that was done
  std::int64_t world_size = 1;  ///< ranks that wrote it
  Hash128 config_hash;          ///< of the text of the run's config.toml
  std::string model_path;       ///< model.path of that config; empty for a model from scratch
  std::int64_t seed = 0;
  CheckpointData data;
  /// As the configuration spells it: "AdamW"; empty in checkpoints of before it was written.
  std::string optimizer;
  std::optional<CheckpointLora> lora;
  /// Of a run that scales its loss.
  std::optional<LossScaleState> loss_scale;
  std::map<std::string, CheckpointFile, std::less<>> files;  ///< all but manifest.json
  /// "model/<name>" and "optim/<state>/<name>".
  std::map<std::string, CheckpointTensor, std::less<>> tensors;

  bool operator==(const CheckpointManifest&) const = default;
};

inline constexpr std::string_view kManifestFile = "manifest.json";
inline constexpr std::string_view kModelPrefix = "model/";
inline constexpr std::string_view kOptimizerPrefix = "optim/";
/// Of a manifest's text. AdamW on 1000 ranks with 50 units writes about 30 MB; reading one takes up
/// to thirty times its size.
inline constexpr std::int64_t kMaxManifestBytes = std::int64_t{64} << 20;
/// Of a manifest: far above any real one, and steps after it can still be counted.
inline constexpr std::int64_t kMaxStep = std::int64_t{1} << 62;
/// Boxes that one tensor may be cut into: ranks of tensor, expert and pipeline axes together.
inline constexpr std::size_t kMaxBoxes = 4096;

/// Errors: kFormat naming what is wrong: another format, names that are not plain or not listed,
/// boxes outside their tensor, elements that no piece holds or two do.
void validate(const CheckpointManifest& manifest, std::string_view where);

/// One line a file and a tensor; the last key is the text's own hash.
std::string to_json(const CheckpointManifest& manifest);

/// The inverse, validated; the text's own hash is not looked at. Errors: kFormat.
CheckpointManifest parse_checkpoint_manifest(std::string_view text, std::string_view where);

/// The same for what one rank of several wrote: not every element need have a piece, nothing is
/// validated.
CheckpointManifest parse_manifest_part(std::string_view text, std::string_view where);

/// Adds the files and pieces of another rank. Errors: kInternal where both describe a tensor
/// differently or wrote a file of one name.
void merge(CheckpointManifest& whole, const CheckpointManifest& part);

/// Errors: kFormat where the text is not, byte for byte, one that to_json wrote.
void check_manifest_hash(std::string_view text, std::string_view where);

}  // namespace tessera
