// Where training tokens come from: one long row of ids, read by position; made beforehand, or plain
// text as bytes.
//
// A source says nothing about rows, batches or order; that is train/data. Sources are read from
// mappings and hold no copy.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/mapped_file.h"
#include "tessera/dtype.h"

namespace tessera {

class TokenSource {
 public:
  virtual ~TokenSource() = default;

  virtual std::int64_t num_tokens() const = 0;

  /// Ids of the tokens [begin, begin + out.size()). Errors: kUsage outside the source. Threads:
  /// any.
  virtual void copy(std::int64_t begin, std::span<std::int64_t> out) const = 0;

  /// Whether some tokens are no targets.
  virtual bool has_mask() const { return false; }

  /// 1 where the token is a target, 0 where its label is -100. Errors and threads: as copy().
  virtual void copy_mask(std::int64_t begin, std::span<std::uint8_t> out) const;

  /// Errors: kFormat naming the first id >= `vocab_size`, its position and what to do. May read
  /// all.
  virtual void check_ids(std::int64_t vocab_size) const = 0;

  /// The path that messages show.
  virtual std::string name() const = 0;

 protected:
  TokenSource() = default;
  TokenSource(TokenSource&&) = default;
  TokenSource& operator=(TokenSource&&) = default;

  void check_range(std::int64_t begin, std::size_t count) const;
};

/// What NAME.json says of NAME.bin: {"dtype": "uint16"|"uint32", "num_tokens", "vocab_size"}.
struct TokenFileInfo {
  DType dtype = DType::kUInt16;
  std::int64_t num_tokens = 0;
  std::int64_t vocab_size = 0;  ///< of the tokenizer; the model's may differ
  bool operator==(const TokenFileInfo&) const = default;
};

/// NAME.json's text. Other keys are allowed (a tokenizer's name, ...). Errors: kFormat.
TokenFileInfo parse_token_file_info(std::string_view text, std::string_view where);

/// Tokens made beforehand: NAME.bin beside NAME.json, and perhaps NAME.mask.bin. NAME.bin holds raw
/// little-endian ids and nothing else; NAME.mask.bin has a byte a token, 0 = not a target. Written
/// by tools/tokenize.py.
class TokenFile final : public TokenSource {
 public:
  /// `path` is NAME.bin. Errors: kIo for missing files, kFormat where sizes do not agree or there
  /// is no token.
  explicit TokenFile(const std::filesystem::path& path);

  const TokenFileInfo& info() const { return info_; }
  std::int64_t token(std::int64_t position) const;

  std::int64_t num_tokens() const override { return info_.num_tokens; }
  void copy(std::int64_t begin, std::span<std::int64_t> out) const override;
  bool has_mask() const override { return mask_.has_value(); }
  void copy_mask(std::int64_t begin, std::span<std::uint8_t> out) const override;
  void check_ids(std::int64_t vocab_size) const override;
  std::string name() const override { return tokens_.path().native(); }

 private:
  TokenFileInfo info_;
  MappedFile tokens_;
  std::optional<MappedFile> mask_;
};

/// A text file itself, or the *.txt files of a folder in the order of their names (folders below it
/// are not entered). Errors: kIo.
std::vector<std::filesystem::path> text_files(const std::filesystem::path& path);

/// Plain text as byte tokens: ids 0-255 are the file's bytes, 256 ends each file. The files are
/// mapped, not loaded, and read as one row, each followed by its end. No encoding is assumed. A
/// model for it needs a vocabulary of at least 257.
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
