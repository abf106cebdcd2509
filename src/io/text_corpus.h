// Plain text as byte tokens: ids 0-255 are the file's bytes, 256 ends each file.
//
// The files are mapped, not loaded, and read as one row, each followed by its end. No encoding is
// assumed. A model for it needs a vocabulary of at least 257.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "base/mapped_file.h"
#include "io/token_source.h"

namespace tessera {

/// A text file itself, or the *.txt files of a folder in the order of their names (folders below it
/// are not entered). Errors: kIo.
std::vector<std::filesystem::path> text_files(const std::filesystem::path& path);

class TextCorpus final : public TokenSource {
 public:
  static constexpr std::int64_t kEndOfDocument = 256;
  static constexpr std::int64_t kVocabSize = 257;

  /// The text_files() of `path`. Errors: kIo; kFormat where there is no byte of text.
  explicit TextCorpus(const std::filesystem::path& path);

  /// Several of these, in this order. Errors: the same.
  explicit TextCorpus(const std::vector<std::filesystem::path>& files);

  std::int64_t num_tokens() const override { return ends_.back(); }
  void copy(std::int64_t begin, std::span<std::int64_t> out) const override;
  void check_ids(std::int64_t vocab_size) const override;
  std::string name() const override { return name_; }
  std::size_t num_files() const { return files_.size(); }

 private:
  void map(const std::vector<std::filesystem::path>& files);

  std::string name_;
  std::vector<MappedFile> files_;
  std::vector<std::int64_t> ends_;  // position after each file's end token
};

}  // namespace tessera
