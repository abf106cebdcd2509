// Tokens made beforehand: NAME.bin beside NAME.json, and perhaps NAME.mask.bin.
//
// NAME.bin holds raw little-endian ids and nothing else; NAME.json says {"dtype":
// "uint16"|"uint32", "num_tokens", "vocab_size"}; NAME.mask.bin has a byte a token, 0 = not a
// target. Written by tools/tokenize.py.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/mapped_file.h"
#include "io/token_source.h"
#include "tessera/dtype.h"

namespace tessera {

struct TokenFileInfo {
  DType dtype = DType::kUInt16;
  std::int64_t num_tokens = 0;
  std::int64_t vocab_size = 0;  ///< of the tokenizer; the model's may differ
  bool operator==(const TokenFileInfo&) const = default;
};

/// NAME.json's text. Other keys are allowed (a tokenizer's name, ...). Errors: kFormat.
TokenFileInfo parse_token_file_info(std::string_view text, std::string_view where);

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

}  // namespace tessera
