#include "io/token_source.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <iterator>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/text/json_reader.h"
#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera {

void TokenSource::copy_mask(std::int64_t begin, std::span<std::uint8_t> out) const {
  check_range(begin, out.size());
  std::fill(out.begin(), out.end(), std::uint8_t{1});
}

bool TokenSource::has_target(std::int64_t begin, std::int64_t end) {
  check_range(begin, static_cast<std::size_t>(std::max<std::int64_t>(end - begin, 0)));
  return begin < end;
}

void check_ids(const TokenSource& source, std::int64_t begin, std::span<const std::int64_t> ids,
               std::int64_t vocab_size) {
  const auto bad =
      std::ranges::find_if(ids, [vocab_size](std::int64_t id) { return id >= vocab_size; });
  if (bad == ids.end()) return;
  const TokenPlace place = source.place(begin + (bad - ids.begin()));
  throw Error(ErrorKind::kFormat,
              concat(place.name, ": found the token id ", *bad, " at position ", place.position,
                     ", expected ids below the model's vocabulary of ", vocab_size,
                     "; tokenize the text with the model's own tokenizer"));
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

namespace {

struct ShardKind {
  std::int32_t magic;
  std::int32_t version;
  DType dtype;
};
constexpr std::array kShardKinds{ShardKind{20240520, 1, DType::kUInt16},
                                 ShardKind{20240801, 7, DType::kUInt32}};

std::int32_t number_at(std::span<const std::byte> bytes, std::size_t index) {
  std::int32_t number = 0;
  std::memcpy(&number, bytes.data() + index * sizeof(number), sizeof(number));
  return number;
}

TokenFileInfo describe_tokens(const InputFile& file, const std::filesystem::path& info_path) {
  std::error_code ignored;
  if (!std::filesystem::exists(info_path, ignored)) {
    std::vector<std::byte> begin(
        static_cast<std::size_t>(std::min<std::int64_t>(file.size_bytes(), kShardHeaderBytes)));
    file.read_range(0, begin);
    const auto shard = parse_shard_header(begin, file.path().native());
    TESSERA_CHECK(
        shard, ErrorKind::kIo, file.path().native(), ": found no ", info_path.native(),
        " and no header of a shard, expected either; tools/tokenize.py writes both files");
    return *shard;
  }
  return parse_token_file_info(read_text_file(info_path, kMaxInfoBytes), info_path.native());
}

}  // namespace

std::optional<TokenFileInfo> parse_shard_header(std::span<const std::byte> begin,
                                                std::string_view where) {
  if (begin.size() < sizeof(std::int32_t)) return std::nullopt;
  const std::int32_t magic = number_at(begin, 0);
  const auto* const kind = std::ranges::find(kShardKinds, magic, &ShardKind::magic);
  if (kind == kShardKinds.end()) return std::nullopt;
  TESSERA_CHECK(static_cast<std::int64_t>(begin.size()) >= kShardHeaderBytes, ErrorKind::kFormat,
                where, ": found ", begin.size(), " bytes of a shard with the magic ", magic,
                ", expected a header of ", kShardHeaderBytes);
  TESSERA_CHECK(number_at(begin, 1) == kind->version, ErrorKind::kFormat, where, ": found version ",
                number_at(begin, 1), " of a shard with the magic ", magic, ", expected ",
                kind->version);
  TESSERA_CHECK(number_at(begin, 2) > 0, ErrorKind::kFormat, where, ": found a shard of ",
                number_at(begin, 2), " tokens, expected at least one");
  return TokenFileInfo{kind->dtype, number_at(begin, 2), 0, kShardHeaderBytes};
}

TokenFileInfo read_token_file_info(const std::filesystem::path& path) {
  const InputFile file(path);
  std::filesystem::path info_path = path;
  info_path.replace_extension(".json");
  const TokenFileInfo info = describe_tokens(file, info_path);
  const std::int64_t expected = info.header_bytes + info.num_tokens * size_of(info.dtype);
  TESSERA_CHECK(file.size_bytes() == expected, ErrorKind::kFormat, path.native(), ": found ",
                file.size_bytes(), " bytes, expected ", expected, " for the ", info.num_tokens, " ",
                to_string(info.dtype), " tokens that ",
                info.header_bytes > 0 ? std::string("its header") : info_path.native(), " states");
  return info;
}

TokenFile::TokenFile(const std::filesystem::path& path)
    : info_(read_token_file_info(path)), tokens_(path) {
  tokens_.advise(Access::kRandom);
  std::filesystem::path mask = path;
  mask.replace_extension(".mask.bin");
  std::error_code ignored;
  if (!std::filesystem::exists(std::filesystem::symlink_status(mask, ignored))) return;
  mask_.emplace(mask);
  TESSERA_CHECK(mask_->size_bytes() == info_.num_tokens, ErrorKind::kFormat, mask.native(),
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
  const auto bytes = tokens_.range(info_.header_bytes + begin * size,
                                   static_cast<std::int64_t>(out.size()) * size);
  if (info_.dtype == DType::kUInt16) {
    widen<std::uint16_t>(bytes, out);
  } else {
    widen<std::uint32_t>(bytes, out);
  }
  // Rows come in random order: if their pages were kept they would add up to the whole file.
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

std::vector<std::string> TokenFile::files() const {
  return {concat(shown(tokens_.path().filename()), " of ", info_.num_tokens, " ",
                 to_string(info_.dtype), " tokens", mask_ ? " with a mask" : " without a mask")};
}

bool TokenFile::has_target(std::int64_t begin, std::int64_t end) {
  if (!mask_) return TokenSource::has_target(begin, end);
  check_range(begin, static_cast<std::size_t>(std::max<std::int64_t>(end - begin, 0)));
  if (!labels_) labels_.emplace(open_labels());
  return labels_->any(*mask_, begin, end);
}

LabelIndex TokenFile::open_labels() const {
  std::filesystem::path path = tokens_.path();
  path.replace_extension(".labels.bin");
  std::error_code ignored;
  if (std::filesystem::exists(std::filesystem::symlink_status(path, ignored))) {
    return {path, *mask_};
  }
  LabelIndex made(*mask_);
  try {
    made.write(path);
  } catch (
      const Error& error) {  // the folder may belong to another user; the next run counts again
    log::info(error.what(), ": the index of unmasked targets is not stored");
  }
  return made;
}

namespace {

namespace fs = std::filesystem;

// Each file is a mapping and a process has 65530 by default; other code needs some, too.
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

struct JoinedTokens::Chunk {
  TokenSource& part;
  std::int64_t begin;  // offset within the part
  std::int64_t count;
};

JoinedTokens::JoinedTokens(std::vector<std::unique_ptr<TokenSource>> parts)
    : parts_(std::move(parts)) {
  TESSERA_INVARIANT(!parts_.empty(), "no tokens to join");
  std::int64_t end = 0;
  for (const auto& part : parts_) ends_.push_back(end += part->num_tokens());
}

std::vector<JoinedTokens::Chunk> JoinedTokens::chunks(std::int64_t begin,
                                                      std::int64_t count) const {
  check_range(begin, static_cast<std::size_t>(count));
  std::vector<Chunk> found;
  auto at = static_cast<std::size_t>(std::ranges::upper_bound(ends_, begin) - ends_.begin());
  for (; count > 0; ++at) {
    const std::int64_t here = std::min(count, ends_[at] - begin);
    found.push_back({*parts_[at], parts_[at]->num_tokens() - (ends_[at] - begin), here});
    begin += here;
    count -= here;
  }
  return found;
}

void JoinedTokens::copy(std::int64_t begin, std::span<std::int64_t> out) const {
  for (const Chunk& chunk : chunks(begin, std::ssize(out))) {
    chunk.part.copy(chunk.begin, out.first(static_cast<std::size_t>(chunk.count)));
    out = out.subspan(static_cast<std::size_t>(chunk.count));
  }
}

bool JoinedTokens::has_mask() const {
  return std::ranges::any_of(parts_, [](const auto& part) { return part->has_mask(); });
}

void JoinedTokens::copy_mask(std::int64_t begin, std::span<std::uint8_t> out) const {
  for (const Chunk& chunk : chunks(begin, std::ssize(out))) {
    chunk.part.copy_mask(chunk.begin, out.first(static_cast<std::size_t>(chunk.count)));
    out = out.subspan(static_cast<std::size_t>(chunk.count));
  }
}

bool JoinedTokens::has_target(std::int64_t begin, std::int64_t end) {
  return std::ranges::any_of(chunks(begin, std::max<std::int64_t>(end - begin, 0)),
                             [](const Chunk& chunk) {
                               return chunk.part.has_target(chunk.begin, chunk.begin + chunk.count);
                             });
}

void JoinedTokens::check_vocabulary(std::int64_t vocab_size) const {
  for (const auto& part : parts_) part->check_vocabulary(vocab_size);
}

TokenPlace JoinedTokens::place(std::int64_t position) const {
  const auto found = chunks(position, 1);
  return found.front().part.place(found.front().begin);
}

std::vector<std::string> JoinedTokens::files() const {
  std::vector<std::string> lines;
  for (const auto& part : parts_) {
    for (std::string& line : part->files()) lines.push_back(std::move(line));
  }
  return lines;
}

std::string JoinedTokens::name() const {
  if (parts_.size() == 1) return parts_.front()->name();
  return concat(parts_.front()->name(), " and ", parts_.size() - 1, " more");
}

namespace {

/// One file of text: its bytes, and the token that ends it.
class TextFile final : public TokenSource {
 public:
  explicit TextFile(const fs::path& path) : text_(path) { text_.advise(Access::kRandom); }

  std::int64_t num_tokens() const override { return text_.size_bytes() + 1; }
  void copy(std::int64_t begin, std::span<std::int64_t> out) const override {
    check_range(begin, out.size());
    if (out.empty()) return;
    const std::int64_t count = std::min(text_.size_bytes() - begin, std::ssize(out));
    const auto bytes = text_.range(begin, count);
    std::ranges::transform(bytes, out.begin(),
                           [](std::byte byte) { return std::to_integer<std::int64_t>(byte); });
    if (count < std::ssize(out)) out.back() = TextCorpus::kEndOfDocument;
    text_.release(bytes);  // as in TokenFile::copy
  }
  std::string name() const override { return text_.path().native(); }
  std::vector<std::string> files() const override {
    return {concat(shown(text_.path().filename()), " of ", text_.size_bytes(), " bytes")};
  }

 private:
  MappedFile text_;
};

std::string name_of(const std::vector<fs::path>& paths) {
  if (paths.empty()) return "";
  const std::string first = paths.front().native();
  return paths.size() == 1 ? first : concat(first, " and ", paths.size() - 1, " more");
}

std::vector<std::unique_ptr<TokenSource>> mapped(const std::vector<fs::path>& paths) {
  std::vector<fs::path> files;
  for (const fs::path& path : paths) std::ranges::copy(text_files(path), std::back_inserter(files));
  TESSERA_CHECK(!files.empty(), ErrorKind::kFormat, name_of(paths),
                ": found no text file, expected at least "
                "one (in a folder those that end in .txt)");
  TESSERA_CHECK(files.size() <= kMaxFiles, ErrorKind::kFormat, name_of(paths), ": found ",
                files.size(), " text files, expected at most ", kMaxFiles,
                "; join them or make one NAME.bin of them with tools/tokenize.py");
  std::vector<std::unique_ptr<TokenSource>> texts;
  for (const fs::path& file : files) texts.push_back(std::make_unique<TextFile>(file));
  return texts;
}

}  // namespace

TextCorpus::TextCorpus(const fs::path& path) : TextCorpus(std::vector<fs::path>{path}) {}

TextCorpus::TextCorpus(const std::vector<fs::path>& paths)
    : JoinedTokens(mapped(paths)), name_(name_of(paths)) {
  TESSERA_CHECK(num_tokens() > std::ssize(ends()), ErrorKind::kFormat, name_,
                ": found no byte of text, expected some");
}

void TextCorpus::check_vocabulary(std::int64_t vocab_size) const {
  TESSERA_CHECK(vocab_size >= kVocabSize, ErrorKind::kFormat, name_,
                ": text is read as bytes and needs a vocabulary of at least ", kVocabSize,
                ", found a model with ", vocab_size,
                "; use a model with more, or tokenize with tools/tokenize.py");
}

}  // namespace tessera
