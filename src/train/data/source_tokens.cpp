#include "train/data/source_tokens.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/log.h"
#include "base/mapped_file.h"
#include "base/text/printable.h"
#include "tessera/error.h"
#include "train/data/data_files.h"
#include "train/data/document_rows.h"

namespace tessera::train {
namespace {

/// Comes first: whether a name is text cannot be known where nothing has the name.
void require_there(const NamedSource& source) {
  namespace fs = std::filesystem;
  for (const std::string& path : source.path) {
    std::error_code ignored;
    TESSERA_CHECK(fs::status(path, ignored).type() != fs::file_type::not_found, ErrorKind::kIo,
                  source.key, ": cannot open ", shown(path),
                  ": found no such file or folder, expected a text file, a folder of *.txt, "
                  "NAME.bin or X.safetensors");
  }
}

struct FirstBytes {
  std::string_view bytes;
  std::string_view kind;
};
// Bytes with which no text begins.
constexpr std::array kNoText{FirstBytes{"PAR1", "parquet"}, FirstBytes{"\x1f\x8b", "gzip"},
                             FirstBytes{"\x28\xb5\x2f\xfd", "zstd"}};

/// Every byte would be a token. Errors: kIo; kFormat for a file that is packed or compressed.
void require_text(const std::string& path) {
  for (const std::filesystem::path& entry : text_files(path)) {
    const InputFile file(entry);
    std::array<char, 4> begin{};
    const auto there = std::span(begin).first(
        static_cast<std::size_t>(std::min<std::int64_t>(file.size_bytes(), begin.size())));
    file.read_range(0, std::as_writable_bytes(there));
    const std::string_view found(there.data(), there.size());
    for (const FirstBytes& one : kNoText) {
      TESSERA_CHECK(!found.starts_with(one.bytes), ErrorKind::kFormat, shown(entry), ": found a ",
                    one.kind,
                    " file, expected plain text, whose bytes are the tokens; make NAME.bin of it "
                    "with tools/tokenize.py");
    }
  }
  if (path.ends_with(".jsonl") || path.ends_with(".json")) {
    log::warn(shown(path),
              ": is read as plain text, with its braces, keys and quotes; tools/tokenize.py makes "
              "NAME.bin of a field of JSON lines");
  }
}

/// The files of a source, and where documents end in all of them together.
class Parts {
 public:
  explicit Parts(bool has_documents) : has_documents_(has_documents) {}

  /// Texts that follow each other, then cleared.
  void add_texts(std::vector<std::filesystem::path>& texts) {
    if (texts.empty()) return;
    auto corpus = texts.size() == 1 ? std::make_unique<TextCorpus>(texts[0])
                                    : std::make_unique<TextCorpus>(texts);
    add_ends(corpus->ends());
    add(std::move(corpus));
    texts.clear();
  }

  void add_tokens(const std::string& path) {
    auto file = std::make_unique<TokenFile>(path);
    if (has_documents_) {
      const auto borders = borders_of(path);
      std::error_code ignored;
      TESSERA_CHECK(std::filesystem::exists(borders, ignored), ErrorKind::kFormat,
                    "data.packing = documents: found no ", shown(borders.native()), " next to ",
                    shown(path),
                    ", expected the ends of its documents, which tools/tokenize.py "
                    "writes; or set data.packing = stream");
      add_ends(read_document_ends(borders, file->num_tokens()));
    }
    add(std::move(file));
  }

  SourceTokens joined() && {
    if (parts_.size() == 1) return {std::move(parts_.front()), std::move(ends_)};
    return {std::make_unique<JoinedTokens>(std::move(parts_)), std::move(ends_)};
  }

 private:
  void add(std::unique_ptr<TokenSource> part) {
    tokens_ += part->num_tokens();
    parts_.push_back(std::move(part));
  }
  void add_ends(std::span<const std::int64_t> ends) {
    for (const std::int64_t end : ends) ends_.push_back(tokens_ + end);
  }

  bool has_documents_;
  std::int64_t tokens_ = 0;
  std::vector<std::unique_ptr<TokenSource>> parts_;
  std::vector<std::int64_t> ends_;
};

}  // namespace

SourceTokens open_source_tokens(const NamedSource& source, bool reads_bytes, bool has_documents) {
  require_there(source);
  Parts parts(has_documents);
  std::vector<std::filesystem::path> texts;
  for (const std::string& path : source.path) {
    if (path.ends_with(".bin")) {
      parts.add_texts(texts);
      parts.add_tokens(path);
      continue;
    }
    TESSERA_CHECK(reads_bytes, ErrorKind::kConfig, source.key, ": found text (", shown(path),
                  "), but this model has a tokenizer of its own; make NAME.bin of the text with "
                  "tools/tokenize.py");
    require_text(path);
    texts.emplace_back(path);
  }
  parts.add_texts(texts);
  return std::move(parts).joined();
}

}  // namespace tessera::train
