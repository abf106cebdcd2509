#include "io/token_file.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/json_reader.h"
#include "base/printable.h"
#include "tessera/error.h"

namespace tessera {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are read as they lie");

constexpr std::int64_t kMaxInfoBytes = 1 << 20;
constexpr int kMaxInfoDepth = 16;
constexpr std::int64_t kScanTokens = 1 << 18;  // 2 MiB of ids at a time

std::int64_t positive_integer(const nlohmann::json& root, std::string_view key,
                              std::string_view where) {
  const auto found = root.find(key);
  TESSERA_CHECK(found != root.end(), ErrorKind::kFormat, where, ": lacks the key ", key);
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
  TESSERA_CHECK(dtype != root.end() && dtype->is_string(), ErrorKind::kFormat, where,
                ": lacks the key dtype, expected \"uint16\" or \"uint32\"");
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

}  // namespace tessera
