#include "io/token_source.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <system_error>
#include <vector>

#include "base/text/json_reader.h"
#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera {

void TokenSource::copy_mask(std::int64_t begin, std::span<std::uint8_t> out) const {
  check_range(begin, out.size());
  std::fill(out.begin(), out.end(), std::uint8_t{1});
}

void TokenSource::check_range(std::int64_t begin, std::size_t count) const {
  const std::int64_t total = num_tokens();
  TESSERA_CHECK(begin >= 0 && begin <= total && static_cast<std::int64_t>(count) <= total - begin,
                ErrorKind::kUsage, name(), ": tokens from ", begin, ", ", count,
                " of them, do not lie inside its ", total);
}

namespace {

static_assert(std::endian::native == std::endian::little, "token files are read as they lie");

constexpr std::int64_t kMaxInfoBytes = 1 << 20;
constexpr int kMaxInfoDepth = 16;
constexpr std::int64_t kScanTokens = 1 << 18;  // 2 MiB of ids at a time

std::int64_t positive_integer(const nlohmann::json& root, std::string_view key,
                              std::string_view where) {
  const auto found = root.find(key);
  TESSERA_CHECK(found != root.end(), ErrorKind::kFormat, where, ": lacks the key ", key,
                ", expected a positive integer; tools/tokenize.py writes this file");
  const bool fits = found->is_number_unsigned() && found->get<std::uint64_t>() > 0 &&
                    found->get<std::uint64_t>() < (std::uint64_t{1} << 60U);
  TESSERA_CHECK(fits, ErrorKind::kFormat, where, ": found ", key, " = ",
                printable(found->dump(-1, ' ', true, nlohmann::json::error_handler_t::replace)),
                ", expected a positive integer");
  return found->get<std::int64_t>();
}

template <class Id>
void widen(std::span<const std::byte> bytes, std::span<std::int64_t> out) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    Id id{};
    std::memcpy(&id, bytes.data() + i * sizeof(Id), sizeof(Id));
    out[i] = static_cast<std::int64_t>(id);
  }
}

}  // namespace

TokenFileInfo parse_token_file_info(std::string_view text, std::string_view where) {
  const nlohmann::json root = parse_json_object(text, where, kMaxInfoDepth);
  TokenFileInfo info;
  const auto dtype = root.find("dtype");
  TESSERA_CHECK(
      dtype != root.end() && dtype->is_string(), ErrorKind::kFormat, where,
      ": lacks the key dtype, expected \"uint16\" or \"uint32\"; tools/tokenize.py writes "
      "this file");
  const auto& word = dtype->get_ref<const std::string&>();
  TESSERA_CHECK(word == "uint16" || word == "uint32", ErrorKind::kFormat, where,
                ": found dtype = ", printable(word), ", expected \"uint16\" or \"uint32\"");
  info.dtype = word == "uint16" ? DType::kUInt16 : DType::kUInt32;
  info.num_tokens = positive_integer(root, "num_tokens", where);
  info.vocab_size = positive_integer(root, "vocab_size", where);
  return info;
}

TokenFile::TokenFile(const std::filesystem::path& path) : tokens_(path) {
  std::filesystem::path beside = path;
  beside.replace_extension(".json");
  info_ = parse_token_file_info(read_text_file(beside, kMaxInfoBytes), beside.native());
  TESSERA_CHECK(tokens_.size_bytes() == info_.num_tokens * size_of(info_.dtype), ErrorKind::kFormat,
                path.native(), ": found ", tokens_.size_bytes(), " bytes, expected ",
                info_.num_tokens * size_of(info_.dtype), " for the ", info_.num_tokens, " ",
                to_string(info_.dtype), " tokens that ", beside.native(), " states");
  tokens_.advise(Access::kRandom);
  beside.replace_extension(".mask.bin");
  std::error_code ignored;
  if (!std::filesystem::exists(std::filesystem::symlink_status(beside, ignored))) return;
  mask_.emplace(beside);
  TESSERA_CHECK(mask_->size_bytes() == info_.num_tokens, ErrorKind::kFormat, beside.native(),
                ": found ", mask_->size_bytes(), " bytes, expected one a token, ",
                info_.num_tokens);
  mask_->advise(Access::kRandom);
}

std::int64_t TokenFile::token(std::int64_t position) const {
  std::int64_t id = 0;
  copy(position, {&id, 1});
  return id;
}

void TokenFile::copy(std::int64_t begin, std::span<std::int64_t> out) const {
  check_range(begin, out.size());
  const std::int64_t size = size_of(info_.dtype);
  const auto bytes = tokens_.range(begin * size, static_cast<std::int64_t>(out.size()) * size);
  if (info_.dtype == DType::kUInt16) {
    widen<std::uint16_t>(bytes, out);
  } else {
    widen<std::uint32_t>(bytes, out);
  }
  // Rows come in random order: kept, their pages would add up to the whole file.
  tokens_.release(bytes);
}

void TokenFile::copy_mask(std::int64_t begin, std::span<std::uint8_t> out) const {
  if (!mask_) return TokenSource::copy_mask(begin, out);
  check_range(begin, out.size());
  const auto bytes = mask_->range(begin, static_cast<std::int64_t>(out.size()));
  std::transform(bytes.begin(), bytes.end(), out.begin(), [](std::byte kept) {
    return static_cast<std::uint8_t>(kept == std::byte{0} ? 0 : 1);
  });
  mask_->release(bytes);
}

void TokenFile::check_ids(std::int64_t vocab_size) const {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(std::min(kScanTokens, num_tokens())));
  tokens_.advise(Access::kSequential);
  for (std::int64_t begin = 0; begin < num_tokens(); begin += kScanTokens) {
    const std::int64_t count = std::min(kScanTokens, num_tokens() - begin);
    const auto part = std::span(ids).first(static_cast<std::size_t>(count));
    copy(begin, part);
    const auto bad = std::find_if(part.begin(), part.end(),
                                  [vocab_size](std::int64_t id) { return id >= vocab_size; });
    if (bad == part.end()) continue;
    throw Error(
        ErrorKind::kFormat,
        concat(name(), ": found the token id ", *bad, " at position ", begin + (bad - part.begin()),
               ", expected ids below the model's vocabulary of ", vocab_size,
               "; tokenize the text with the model's own tokenizer"));
  }
  tokens_.advise(Access::kRandom);
}

namespace {

namespace fs = std::filesystem;

// Each file is a mapping and a process has 65530 by default; others need some too.
constexpr std::size_t kMaxFiles = 16384;

}  // namespace

std::vector<fs::path> text_files(const fs::path& path) {
  std::error_code failed;
  if (!fs::is_directory(path, failed)) return {path};
  std::vector<fs::path> files;
  fs::directory_iterator entry(path, failed);
  for (; !failed && entry != fs::directory_iterator(); entry.increment(failed)) {
    std::error_code ignored;
    if (entry->path().extension() == ".txt" && entry->is_regular_file(ignored)) {
      files.push_back(entry->path());
    }
  }
  TESSERA_CHECK(!failed, ErrorKind::kIo, "cannot list ", shown(path), ": ", failed.message());
  std::sort(files.begin(), files.end());
  return files;
}

TextCorpus::TextCorpus(const fs::path& path) : name_(path.native()) { map(text_files(path)); }

TextCorpus::TextCorpus(const std::vector<fs::path>& files) {
  if (!files.empty()) name_ = files.front().native();
  if (files.size() > 1) name_ += concat(" and ", files.size() - 1, " more");
  std::vector<fs::path> all;
  for (const fs::path& entry : files) {
    const std::vector<fs::path> found = text_files(entry);
    all.insert(all.end(), found.begin(), found.end());
  }
  map(all);
}

void TextCorpus::map(const std::vector<fs::path>& files) {
  TESSERA_CHECK(!files.empty(), ErrorKind::kFormat, name_,
                ": found no text file, expected at least "
                "one (in a folder those that end in .txt)");
  TESSERA_CHECK(files.size() <= kMaxFiles, ErrorKind::kFormat, name_, ": found ", files.size(),
                " text files, expected at most ", kMaxFiles,
                "; join them or make one NAME.bin of them with tools/tokenize.py");
  std::int64_t end = 0;
  files_.reserve(files.size());
  ends_.reserve(files.size());
  for (const fs::path& file : files) {
    files_.emplace_back(file);
    files_.back().advise(Access::kRandom);
    end += files_.back().size_bytes() + 1;
    ends_.push_back(end);
  }
  TESSERA_CHECK(end > static_cast<std::int64_t>(files.size()), ErrorKind::kFormat, name_,
                ": found no byte of text, expected some");
}

void TextCorpus::copy(std::int64_t begin, std::span<std::int64_t> out) const {
  check_range(begin, out.size());
  auto file =
      static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
  std::size_t done = 0;
  while (done < out.size()) {
    const MappedFile& text = files_[file];
    const std::int64_t file_begin = ends_[file] - 1 - text.size_bytes();
    const std::int64_t at = begin + static_cast<std::int64_t>(done) - file_begin;
    const std::int64_t count =
        std::min(text.size_bytes() - at, static_cast<std::int64_t>(out.size() - done));
    const auto bytes = text.range(at, count);
    for (const std::byte byte : bytes) out[done++] = std::to_integer<std::int64_t>(byte);
    text.release(bytes);  // as in TokenFile::copy
    if (done < out.size()) {
      out[done++] = kEndOfDocument;
      ++file;
    }
  }
}

void TextCorpus::check_ids(std::int64_t vocab_size) const {
  TESSERA_CHECK(vocab_size >= kVocabSize, ErrorKind::kFormat, name_,
                ": text is read as bytes and needs a vocabulary of at least ", kVocabSize,
                ", found a model with ", vocab_size,
                "; use a model with more, or tokenize with tools/tokenize.py");
}

}  // namespace tessera
