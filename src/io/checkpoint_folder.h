// CheckpointFolder: a checkpoint on disk, for all readers of any part of it: the trainer on any
// number of ranks, generate, convert, inspect.
//
// Opening reads the manifest and the size of every file, and no weights. Tensors are looked up in
// its blocks, which are read, compared with their hashes and kept one by one. Ranges of a tensor's
// flattened elements are read from the pieces that hold them; nothing is ever held as a whole.
// verify() checks what open() does not: it reads a file through once. Writing: checkpoint/saver.h;
// which folders are complete: checkpoint_store.h.
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

/// The limit of a checkpoint's config.json, in bytes.
inline constexpr std::int64_t kMaxConfigBytes = 4 << 20;

class CheckpointFolder {
 public:
  /// Whether `path` is meant as a checkpoint: it holds manifest.json; or step-N and no config.json,
  /// as the folder above checkpoints. A file `latest` alone says nothing. Errors: kIo.
  static bool is_one(const std::filesystem::path& path);

  /// `path` is step-N, or the folder above it (its `latest` is taken).
  /// Errors: kIo for what is missing or cannot be read; kFormat naming the file for a manifest that
  /// is malformed or was altered, a config.json that was altered, a file of another size, a step-N
  /// that holds another step.
  static CheckpointFolder open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }  ///< of the folder step-N
  /// The manifest as it was read, without tensors.
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

  /// Names of all files with data, rank_2 before rank_10: the units of work that ranks divide.
  std::vector<std::string> data_files() const;
  /// Compares a file's content with the manifest's hash: reads it through once, and copies the
  /// wanted bytes to where they are wanted (chunks() says which those are). Errors: kFormat naming
  /// the file; kIo.
  void verify(const std::string& file, std::vector<WantedBytes> wanted = {}) const;
  /// Verifies every file, and every tensor's pieces. Errors: as verify() and find().
  void verify_all() const;

  /// Copies the elements [begin, end) of the flattened tensor; `out` has exactly their bytes, in
  /// the tensor's dtype. Errors: kFormat for an unknown name or where a file does not hold what the
  /// manifest says; kUsage outside the tensor; kIo. Threads: one at a time.
  void read(std::string_view name, std::int64_t begin, std::int64_t end,
            std::span<std::byte> out) const;

  /// The same for the flattened `box` of the tensor.
  void read_box(std::string_view name, const TensorBox& box, std::int64_t begin, std::int64_t end,
                std::span<std::byte> out) const;

  /// Elements of a box that are consecutive in a file, from `offset` on.
  struct Chunk {
    std::string file;
    std::int64_t offset = 0;
    layout::Range elements;
  };
  /// Returns where the elements [begin, end) of the flattened `box` are, for callers that read
  /// whole files anyway. Returns none where a piece holds them in rows of another box; read_box()
  /// puts those together. Errors: as read().
  std::vector<Chunk> chunks(std::string_view name, const TensorBox& box, std::int64_t begin,
                            std::int64_t end) const;

 private:
  const CheckpointTensor& checked(std::string_view name, std::int64_t begin,
                                  std::int64_t end) const;
  const TensorInfo& where_in_file(const CheckpointPiece& piece, DType dtype) const;
  void read_block(std::size_t index) const;

  std::filesystem::path path_;
  CheckpointManifest manifest_;
  /// The tensors of the blocks that were read; all tensors in version 1.
  mutable CheckpointTensorMap tensors_;
  mutable std::vector<bool> block_is_read_;
  std::vector<std::int64_t> block_offsets_;
  mutable std::shared_ptr<const InputFile> blocks_file_;
  Hash128 manifest_hash_;
  std::string config_text_;
  /// The headers of the files that were read from.
  mutable std::map<std::string, SafetensorsHeader, std::less<>> headers_;
};

/// Returns the checkpoint for which `path` stands: `path` itself where it holds manifest.json, else
/// the latest one of the folder (CheckpointStore::latest); none where it has none. An older one is
/// never taken unless `path` names it. Errors: as latest(); kFormat where the latest is not whole,
/// with the newest whole one before it.
std::optional<std::filesystem::path> find_checkpoint(const std::filesystem::path& path);
/// Checks that copying or removing it was not interrupted: it holds manifest.json. Errors: kFormat.
void require_whole(const std::filesystem::path& checkpoint);
/// The newest checkpoint of an earlier step that can be opened; `text` continues an error with its
/// path, or says that there is none.
struct WholeBefore {
  std::optional<std::int64_t> step;
  std::string text;
};
WholeBefore newest_whole_before(const CheckpointStore& store, std::int64_t step);

/// The model's tensors as a TensorSource, which reads whole tensors that ranks have cut.
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
  Tensors tensors_;  // names without "model/"; without those of the optimizer
};

/// Makes the folder, which holds all other files of `manifest`, a checkpoint: writes tensors.jsonl,
/// then manifest.json, and waits until both are on disk. Errors: kFormat as validate(); kIo, also
/// as texts_of(), before anything is written.
void write_manifest(const std::filesystem::path& folder, CheckpointManifest manifest);

}  // namespace tessera
