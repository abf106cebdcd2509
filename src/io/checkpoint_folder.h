// A checkpoint on disk, read by whoever wants any part of it: the trainer on any number of ranks,
// generate, convert, inspect.
//
// Opening reads the manifest and looks at every file's size, not at weights. Tensors are looked up
// in its blocks, which are read, compared with their hashes and kept one by one. Ranges of a
// tensor's flattened elements are read out of whatever pieces hold them; nothing is ever held
// whole. What open() did not check, verify() does: it reads a file through once. Writing:
// checkpoint/saver.h; which folders are complete: checkpoint_store.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/checkpoint_manifest.h"
#include "io/checkpoint_store.h"
#include "io/hashed_file.h"
#include "io/safetensors_header.h"
#include "io/tensor_source.h"
#include "layout/range.h"

namespace tessera {

/// Of a checkpoint's config.json, in bytes.
inline constexpr std::int64_t kMaxConfigBytes = 4 << 20;

class CheckpointFolder {
 public:
  /// Whether `path` is meant as a checkpoint: holds manifest.json; or step-N and no config.json,
  /// as the folder above checkpoints. A file `latest` alone says nothing. Errors: kIo.
  static bool is_one(const std::filesystem::path& path);

  /// `path` is step-N, or the folder above it (its `latest` is taken).
  /// Errors: kIo for what is missing or cannot be read; kFormat naming the file for a manifest that
  /// is malformed or was altered, a config.json that was altered, a file of another size, a step-N
  /// that holds another step.
  static CheckpointFolder open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }  ///< of step-N
  /// As it was read, without tensors.
  const CheckpointManifest& manifest() const { return manifest_; }
  /// The manifest's own hash: equal where ranks see the same checkpoint, blocks included.
  const Hash128& manifest_hash() const { return manifest_hash_; }
  const std::string& config_text() const { return config_text_; }  ///< config.json, verified

  /// "model/<name>" and "optim/<state>/<name>", each with dtype and global shape. Reads all blocks:
  /// memory of all pieces of all ranks. Errors: as find().
  const CheckpointTensorMap& tensors() const;
  /// nullptr where there is none; reads the block that it belongs to. Errors: kFormat naming the
  /// file for a block that was altered or is malformed; kIo. Threads: one at a time.
  const CheckpointTensor* find(std::string_view name) const;
  /// Names that begin with `prefix` in the `part`-th of `parts` shares of the blocks: together all.
  /// Reads no block of another share. Errors: as find().
  std::vector<std::string> names(std::string_view prefix, std::size_t part = 0,
                                 std::size_t parts = 1) const;

  /// Names of all files with data, rank_2 before rank_10: the work that ranks divide.
  std::vector<std::string> data_files() const;
  /// Compares a file's content with the manifest's hash: reads it through once, and leaves bytes
  /// that are wanted where they are wanted (chunks() says which those are). Errors: kFormat
  /// naming the file; kIo.
  void verify(const std::string& file, std::vector<WantedBytes> wanted = {}) const;
  /// Every file, and every tensor's pieces. Errors: as verify() and find().
  void verify_all() const;

  /// Copies the elements [begin, end) of the flattened tensor; `out` has exactly their bytes, in
  /// the tensor's dtype. Errors: kFormat for an unknown name or where a file does not hold what the
  /// manifest says; kUsage outside the tensor; kIo. Threads: one at a time.
  void read(std::string_view name, std::int64_t begin, std::int64_t end,
            std::span<std::byte> out) const;

  /// The same of the flattened `box` of the tensor.
  void read_box(std::string_view name, const TensorBox& box, std::int64_t begin, std::int64_t end,
                std::span<std::byte> out) const;

  /// Elements of a box that lie one after the other from `offset` of a file on.
  struct Chunk {
    std::string file;
    std::int64_t offset = 0;
    layout::Range elements;
  };
  /// Where the elements [begin, end) of the flattened `box` lie, for who reads whole files anyway:
  /// none where a piece holds them in rows of another box; read_box() puts those together. Errors:
  /// as read().
  std::vector<Chunk> chunks(std::string_view name, const TensorBox& box, std::int64_t begin,
                            std::int64_t end) const;

 private:
  const CheckpointTensor& checked(std::string_view name, std::int64_t begin,
                                  std::int64_t end) const;
  const TensorInfo& where_in_file(const CheckpointPiece& piece, DType dtype) const;
  void read_block(std::size_t index) const;

  std::filesystem::path path_;
  CheckpointManifest manifest_;
  /// Of the blocks that were read; of version 1 all.
  mutable CheckpointTensorMap tensors_;
  mutable std::vector<bool> block_is_read_;
  std::vector<std::int64_t> block_offsets_;
  mutable std::shared_ptr<const InputFile> blocks_file_;
  Hash128 manifest_hash_;
  std::string config_text_;
  /// Headers of the files that were read from.
  mutable std::map<std::string, SafetensorsHeader, std::less<>> headers_;
};

/// The checkpoint that `path` stands for: `path` itself where it holds manifest.json, else the latest
/// one of the folder (CheckpointStore::latest); none where it has none. What is older is not taken
/// without being told. Errors: as latest(); kFormat where the latest is not whole, with the newest
/// one before it that is.
std::optional<std::filesystem::path> find_checkpoint(const std::filesystem::path& path);
/// Whoever copied or removed it came to the end: it holds manifest.json. Errors: kFormat.
void require_whole(const std::filesystem::path& checkpoint);
/// The newest checkpoint of a step before this one that can be opened; `text` continues an error
/// with its path, or with that there is none.
struct WholeBefore {
  std::optional<std::int64_t> step;
  std::string text;
};
WholeBefore newest_whole_before(const CheckpointStore& store, std::int64_t step);

/// The model's tensors of it as a TensorSource: what ranks cut apart reads as a whole here.
class CheckpointTensors final : public TensorSource {
 public:
  explicit CheckpointTensors(CheckpointFolder folder);

  const CheckpointFolder& folder() const { return folder_; }
  const std::filesystem::path& path() const override { return folder_.path(); }
  const Tensors& tensors() const override { return tensors_; }
  void read(std::string_view name, std::int64_t begin, std::int64_t end,
            std::span<std::byte> out) const override;
  std::vector<HashedFile> hashed_files() const override;
  void verify(const HashedFile& file) const override { folder_.verify(file.name); }

 private:
  CheckpointFolder folder_;
  Tensors tensors_;  // without "model/", and without the optimizer's
};

/// Makes the folder, which holds all other files of `manifest`, a checkpoint: writes tensors.jsonl,
/// then manifest.json, and waits until both are on disk. Errors: kFormat as validate(); kIo, also
/// as texts_of(), before anything is written.
void write_manifest(const std::filesystem::path& folder, CheckpointManifest manifest);

}  // namespace tessera
