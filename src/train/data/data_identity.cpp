#include "train/data/data_identity.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

#include "base/mapped_file.h"
#include "base/text/printable.h"
#include "io/token_source.h"
#include "tessera/error.h"
#include "train/config/config_resolve.h"
#include "train/data/data_files.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

/// Sizes and samples of file after file.
class Content {
 public:
  explicit Content(std::int64_t whole_bytes) : whole_bytes_(whole_bytes) {}

  void add(const fs::path& path) {
    const InputFile file(path);
    const std::int64_t size = file.size_bytes();
    bytes_ += size;
    add_text(concat(size, "\n"));
    if (size <= whole_bytes_) return add_range(file, 0, size);
    const std::int64_t distance = (size - kSampleBytes) / (kSamples - 1);
    for (std::int64_t i = 0; i + 1 < kSamples; ++i) {
      add_range(file, distance * i / kSampleBytes * kSampleBytes, kSampleBytes);
    }
    add_range(file, size - kSampleBytes, kSampleBytes);
  }
  void add_text(const std::string& text) { hash_.add(text); }

  std::int64_t bytes() const { return bytes_; }
  Hash128 digest() const { return hash_.digest(); }

 private:
  void add_range(const InputFile& file, std::int64_t begin, std::int64_t length) {
    for (std::int64_t at = 0; at < length;) {
      const auto count =
          std::min<std::int64_t>(length - at, static_cast<std::int64_t>(chunk_.size()));
      const auto bytes = std::span(chunk_).first(static_cast<std::size_t>(count));
      file.read_range(begin + at, bytes);
      hash_.add(bytes);
      at += count;
    }
  }

  const std::int64_t whole_bytes_;
  Hash128Stream hash_;
  std::int64_t bytes_ = 0;
  std::vector<std::byte> chunk_ = std::vector<std::byte>(std::size_t{1} << 20);
};

/// NAME.bin: how it is read, the tokens, and the mask where there is one.
void add_tokens(const fs::path& path, Content& content) {
  content.add_text(concat(to_string(read_token_file_info(path).dtype), "\n"));
  content.add(path);
  fs::path mask = path;
  mask.replace_extension(".mask.bin");
  std::error_code ignored;
  if (fs::exists(mask, ignored)) content.add(mask);
}

/// With all digits of the number.
std::string weight_line(double weight) {
  std::array<char, 32> digits{};
  const auto* const end = std::to_chars(digits.data(), digits.data() + digits.size(), weight).ptr;
  return concat("weight ", std::string_view(digits.data(), end), "\n");
}

bool is_tokens(const std::string& path) { return path.ends_with(".bin"); }

}  // namespace

CheckpointData data_identity(const DataConfig& data, std::int64_t seq_len,
                             std::int64_t global_batch_size) {
  const auto sources = sources_of(data);
  std::int64_t token_files = 0;
  for (const NamedSource& source : sources)
    token_files += std::ranges::count_if(source.path, is_tokens);
  constexpr std::int64_t kLeastBytes = kSamples * kSampleBytes;
  Content content(
      std::max(kHashedWholeBytes / std::max<std::int64_t>(token_files, 1), kLeastBytes));
  CheckpointData identity;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const bool packs = packs_documents(sources[i].path, data.packing);
    if (packs) content.add_text("documents\n");
    if (!data.source.empty()) content.add_text(weight_line(data.source[i].weight));
    for (const std::string& path : sources[i].path) {
      identity.path.push_back(path);
      if (is_tokens(path)) {
        add_tokens(path, content);
        if (packs) content.add(borders_of(path));
      } else {
        for (const fs::path& file : text_files(path)) content.add(file);
      }
    }
  }
  identity.bytes = content.bytes();
  identity.xxh3_128 = content.digest();
  identity.seq_len = seq_len;
  identity.global_batch_size = global_batch_size;
  return identity;
}

std::int64_t resumed_global_batch_size(const Config& config, int data_ranks,
                                       const CheckpointData& before,
                                       const std::string& checkpoint) {
  const TrainingConfig& training = config.training;
  const bool by_itself =
      training.global_batch_size == -1 && data_kind(config.data) != DataKind::kBatches;
  if (!by_itself) return training.global_batch_size;
  const BatchSizes sizes = resolve_batch(training, data_ranks);
  const std::int64_t rows = before.global_batch_size;
  TESSERA_CHECK(rows > 0 && rows % sizes.global == 0, ErrorKind::kConfig,
                "training.global_batch_size: found -1, which keeps the ", rows,
                " rows of the checkpoint ", checkpoint, ", expected a multiple of ", sizes.global,
                " (local_batch_size ", sizes.local, " x ", data_ranks,
                " data rank(s)); start a number of ranks that divides them, or lower "
                "training.local_batch_size");
  return rows;
}

namespace {

bool gives(const DataConfig& data, const CheckpointData& expected) {
  try {
    const auto found = data_identity(data, 0, 0);
    return found.bytes == expected.bytes && found.xxh3_128 == expected.xxh3_128;
  } catch (const Error&) {
    return false;  // there is no such data
  }
}

std::string names_of(const std::vector<std::string>& paths) {
  return printable(tessera::joined(paths), 1024);
}

/// The first source whose content or weight differs, where both have as many. The paths of files do
/// not matter.
std::string source_that_changed(const DataConfig& now, const DataConfig& before) {
  const auto found = sources_of(now), expected = sources_of(before);
  const auto content_of = [](const NamedSource& source, const DataConfig& data) {
    return data_identity({.path = source.path, .source = {}, .packing = data.packing}, 0, 0);
  };
  for (std::size_t i = 0; i < found.size(); ++i) {
    const auto mine = content_of(found[i], now), theirs = content_of(expected[i], before);
    if (mine.bytes != theirs.bytes) {
      return concat(found[i].key, ": found ", mine.bytes, " bytes in ", names_of(found[i].path),
                    ", expected ", theirs.bytes, " as in ", names_of(expected[i].path));
    }
    if (mine.xxh3_128 != theirs.xxh3_128) {
      return concat(found[i].key, ": found other content in the ", mine.bytes, " bytes of ",
                    names_of(found[i].path), ", expected that of ", names_of(expected[i].path));
    }
    if (!now.source.empty() && now.source[i].weight != before.source[i].weight) {
      return concat(kSourceKey, "[", i + 1, "].weight: found ", now.source[i].weight, ", expected ",
                    before.source[i].weight);
    }
  }
  return {};
}

}  // namespace

std::optional<std::string> key_that_changed(const DataConfig& now,
                                            const std::optional<DataConfig>& before,
                                            const CheckpointData& expected) {
  for (const Packing packing : {Packing::kStream, Packing::kDocuments}) {
    DataConfig other = now;
    other.packing = packing;
    if (!gives(other, expected)) continue;
    const auto found = packing == Packing::kStream ? Packing::kDocuments : Packing::kStream;
    return concat("data.packing: found ", printable(word_of(found)),
                  now.packing ? "" : " (chosen by what the data has)", ", expected ",
                  printable(word_of(packing)));
  }
  if (!before || !gives(*before, expected)) return std::nullopt;
  if (now.source.size() != before->source.size()) {
    return concat(kSourceKey, ": found ", now.source.size(), " sources, expected ",
                  before->source.size());
  }
  auto source = source_that_changed(now, *before);
  return source.empty() ? std::nullopt : std::optional(std::move(source));
}

void require_same_data(const CheckpointData& found, const CheckpointData& expected,
                       const std::string& checkpoint, std::string_view key) {
  const std::string after = concat(" of the checkpoint ", checkpoint, kSetBack);
  TESSERA_CHECK(found.seq_len == expected.seq_len, ErrorKind::kConfig, "training.seq_len: found ",
                found.seq_len, ", expected ", expected.seq_len, after);
  TESSERA_CHECK(found.global_batch_size == expected.global_batch_size, ErrorKind::kConfig,
                "training.global_batch_size: found ", found.global_batch_size, ", expected ",
                expected.global_batch_size, after);
  constexpr auto kCounts =
      "; masks, the weights and order of sources and, of packed documents, NAME.docs.bin count, "
      "names do not";
  const std::string here = names_of(found.path);
  const std::string then =
      found.path == expected.path ? "" : concat(" (then ", names_of(expected.path), ")");
  TESSERA_CHECK(found.bytes == expected.bytes, ErrorKind::kConfig, key, ": found ", found.bytes,
                " bytes in ", here, ", expected ", expected.bytes, then, after, kCounts);
  TESSERA_CHECK(found.xxh3_128 == expected.xxh3_128, ErrorKind::kConfig, key,
                ": found other content in the ", found.bytes, " bytes of ", here, " (XXH3-128 ",
                to_string(found.xxh3_128), "), expected that with ", to_string(expected.xxh3_128),
                then, after, kCounts);
}

}  // namespace tessera::train
