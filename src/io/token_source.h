// TokenSource: training tokens as one long row of ids, read by position: made beforehand, or plain
// text as bytes, or several of these one after the other.
//
// A source says nothing about rows, batches or order, which belong to train/data. Sources are read
// from mappings and hold no copy.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/mapped_file.h"
#include "io/label_index.h"
#include "tessera/dtype.h"

namespace tessera {

/// The place of a token, as messages name it.
struct TokenPlace {
  std::string name;
  std::int64_t position = 0;  ///< position in what `name` says
};

class TokenSource {
 public:
  virtual ~TokenSource() = default;

  virtual std::int64_t num_tokens() const = 0;

  /// Copies the ids of the tokens [begin, begin + out.size()). Errors: kUsage outside the source.
  /// Threads: any.
  virtual void copy(std::int64_t begin, std::span<std::int64_t> out) const = 0;

  /// Whether some tokens are no targets.
  virtual bool has_mask() const { return false; }

  /// 1 where the token is a target, 0 where its label is -100. Errors and threads: as copy().
  virtual void copy_mask(std::int64_t begin, std::span<std::uint8_t> out) const;

  /// Whether one of the tokens [begin, end) is a target. For a long mask without an index the first
  /// call writes one next to it (or keeps it in memory where it cannot be written), so only one
  /// rank calls this. Errors: kUsage outside the source; kFormat for an index that is not the
  /// mask's. Threads: one.
  virtual bool has_target(std::int64_t begin, std::int64_t end);

  /// Errors: kFormat where no content of this source could have only ids below `vocab_size`. The
  /// reader of ids checks them (check_ids).
  virtual void check_vocabulary(std::int64_t /*vocab_size*/) const {}

  /// Returns the file of a token.
  virtual TokenPlace place(std::int64_t position) const { return {name(), position}; }

  /// The path that messages show.
  virtual std::string name() const = 0;

  /// Returns a line a file, by its own name and not its folder's: what is known of it without
  /// reading it.
  virtual std::vector<std::string> files() const = 0;

 protected:
  TokenSource() = default;
  TokenSource(TokenSource&&) = default;
  TokenSource& operator=(TokenSource&&) = default;

  void check_range(std::int64_t begin, std::size_t count) const;
};

/// `ids` are those from `begin` on. Errors: kFormat naming the first id >= `vocab_size`, its file
/// and position, and a remedy.
void check_ids(const TokenSource& source, std::int64_t begin, std::span<const std::int64_t> ids,
               std::int64_t vocab_size);

/// The description of NAME.bin in NAME.json: {"dtype": "uint16"|"uint32", "num_tokens",
/// "vocab_size"}; or in the header of a shard.
struct TokenFileInfo {
  DType dtype = DType::kUInt16;
  std::int64_t num_tokens = 0;
  std::int64_t vocab_size = 0;    ///< the tokenizer's; the model's may differ; 0: unknown
  std::int64_t header_bytes = 0;  ///< before the first token
  bool operator==(const TokenFileInfo&) const = default;
};

/// Parses NAME.json's text. Other keys are allowed (a tokenizer's name, ...). Errors: kFormat.
TokenFileInfo parse_token_file_info(std::string_view text, std::string_view where);

inline constexpr std::int64_t kShardHeaderBytes = 1024;

/// Parses the header of a .bin shard as llm.c writes it: 256 little-endian int32, the first three
/// of them magic, version and the number of tokens that follow. 20240520, 1: uint16 tokens of
/// GPT-2; 20240801, 7: uint32 tokens of Llama 3. Returns none where `begin` does not begin with
/// such a magic. Errors: kFormat for another version, or no token. Source:
/// github.com/karpathy/llm.c, dev/data/data_common.py.
std::optional<TokenFileInfo> parse_shard_header(std::span<const std::byte> begin,
                                                std::string_view where);

/// Reads the description of NAME.bin from NAME.json where that exists, else from a shard's header.
/// Errors: kIo where there is neither; kFormat, also where the file's size differs from the
/// description.
TokenFileInfo read_token_file_info(const std::filesystem::path& path);

/// Tokens made beforehand: NAME.bin next to NAME.json, and perhaps NAME.mask.bin; or a shard.
/// NAME.bin holds raw little-endian ids and nothing else; NAME.mask.bin has a byte a token, 0 = not
/// a target, NAME.labels.bin its index. tools/tokenize.py writes them.
class TokenFile final : public TokenSource {
 public:
  /// `path` is NAME.bin. Reads no token. Errors: as read_token_file_info, and for a mask of another
  /// size.
  explicit TokenFile(const std::filesystem::path& path);

  const TokenFileInfo& info() const { return info_; }
  std::int64_t token(std::int64_t position) const;

  std::int64_t num_tokens() const override { return info_.num_tokens; }
  void copy(std::int64_t begin, std::span<std::int64_t> out) const override;
  bool has_mask() const override { return mask_.has_value(); }
  void copy_mask(std::int64_t begin, std::span<std::uint8_t> out) const override;
  bool has_target(std::int64_t begin, std::int64_t end) override;
  std::string name() const override { return tokens_.path().native(); }
  std::vector<std::string> files() const override;

 private:
  LabelIndex open_labels() const;

  TokenFileInfo info_;
  MappedFile tokens_;
  std::optional<MappedFile> mask_;
  std::optional<LabelIndex> labels_;  // none until the first request
};

/// Returns a text file itself, or the *.txt files of a folder in the order of their names (folders
/// below it are not entered). Errors: kIo.
std::vector<std::filesystem::path> text_files(const std::filesystem::path& path);

/// Several sources read as one row, in their order.
class JoinedTokens : public TokenSource {
 public:
  /// At least one.
  explicit JoinedTokens(std::vector<std::unique_ptr<TokenSource>> parts);

  /// The position after the last token of each part.
  std::span<const std::int64_t> ends() const { return ends_; }

  std::int64_t num_tokens() const override { return ends_.back(); }
  void copy(std::int64_t begin, std::span<std::int64_t> out) const override;
  bool has_mask() const override;
  void copy_mask(std::int64_t begin, std::span<std::uint8_t> out) const override;
  bool has_target(std::int64_t begin, std::int64_t end) override;
  void check_vocabulary(std::int64_t vocab_size) const override;
  TokenPlace place(std::int64_t position) const override;
  std::string name() const override;
  std::vector<std::string> files() const override;

 private:
  struct Chunk;
  /// Returns the parts, and their ranges, that make up [begin, begin + count).
  std::vector<Chunk> chunks(std::int64_t begin, std::int64_t count) const;

  std::vector<std::unique_ptr<TokenSource>> parts_;
  std::vector<std::int64_t> ends_;
};

/// Plain text as byte tokens: ids 0-255 are the file's bytes, 256 ends each file. The files are
/// mapped, not loaded, and read as one row, each followed by its end. No encoding is assumed. A
/// model for it needs a vocabulary of at least 257.
class TextCorpus final : public JoinedTokens {
 public:
  static constexpr std::int64_t kEndOfDocument = 256;
  static constexpr std::int64_t kVocabSize = 257;

  /// The text_files() of `path`. Errors: kIo; kFormat where there is no byte of text.
  explicit TextCorpus(const std::filesystem::path& path);

  /// Several of these, in this order. Errors: the same.
  explicit TextCorpus(const std::vector<std::filesystem::path>& paths);

  void check_vocabulary(std::int64_t vocab_size) const override;
  std::string name() const override { return name_; }

 private:
  std::string name_;
};

}  // namespace tessera
