#include "io/label_index.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <span>

#include "base/text/printable.h"
#include "io/atomic_file.h"
#include "tessera/error.h"

namespace tessera {
namespace {

static_assert(std::endian::native == std::endian::little, "indices are read as they lie");

constexpr std::int64_t kEntryBytes = sizeof(std::int64_t);

std::int64_t blocks_of(std::int64_t tokens) {
  return (tokens + LabelIndex::kBlockTokens - 1) / LabelIndex::kBlockTokens;
}

std::int64_t count_kept_tokens(const MappedFile& mask, std::int64_t begin, std::int64_t end) {
  const auto bytes = mask.range(begin, end - begin);
  const auto kept = std::ranges::count_if(bytes, [](std::byte b) { return b != std::byte{0}; });
  mask.release(bytes);
  return kept;
}

/// The tokens [begin, end) of a block.
struct BlockTokens {
  BlockTokens(std::int64_t block, std::int64_t tokens)
      : begin(block * LabelIndex::kBlockTokens),
        end(std::min(begin + LabelIndex::kBlockTokens, tokens)) {}
  std::int64_t begin;
  std::int64_t end;
};

[[noreturn]] void refuse_index(const std::filesystem::path& path, const std::string& found,
                               const MappedFile& mask) {
  throw Error(ErrorKind::kFormat,
              concat(path.native(), ": found ", found, ", expected the index of ",
                     shown(mask.path()), "; remove it, and it is made again"));
}

}  // namespace

LabelIndex::LabelIndex(const std::filesystem::path& path, const MappedFile& mask)
    : path_(path), tokens_(mask.size_bytes()) {
  const InputFile file(path);
  const std::int64_t tokens = tokens_;
  const std::int64_t expected = (1 + blocks_of(tokens)) * kEntryBytes;
  if (file.size_bytes() != expected) {
    refuse_index(path, concat(file.size_bytes(), " bytes instead of ", expected), mask);
  }
  std::vector<std::int64_t> numbers(static_cast<std::size_t>(1 + blocks_of(tokens)));
  file.read_range(0, std::as_writable_bytes(std::span(numbers)));
  if (numbers[0] != tokens) refuse_index(path, concat("that of ", numbers[0], " tokens"), mask);
  ends_.assign(numbers.begin() + 1, numbers.end());
  for (std::int64_t block = 0; block < std::ssize(ends_); ++block) {
    const BlockTokens of(block, tokens);
    const std::int64_t before = block == 0 ? 0 : ends_[static_cast<std::size_t>(block - 1)];
    const std::int64_t until = ends_[static_cast<std::size_t>(block)];
    if (until < before || until - before > of.end - of.begin) {
      refuse_index(path, concat("counts from ", before, " to ", until, " in block ", block), mask);
    }
  }
  const std::int64_t last = std::ssize(ends_) - 1;
  for (const std::int64_t block : {std::int64_t{0}, last / 2, last}) check_block(mask, block);
}

LabelIndex::LabelIndex(const MappedFile& mask) : tokens_(mask.size_bytes()) {
  const std::int64_t tokens = tokens_;
  ends_.reserve(static_cast<std::size_t>(blocks_of(tokens)));
  mask.advise(Access::kSequential);
  for (std::int64_t block = 0; block < blocks_of(tokens); ++block) {
    const BlockTokens of(block, tokens);
    ends_.push_back(kept() + count_kept_tokens(mask, of.begin, of.end));
  }
  mask.advise(Access::kRandom);
}

void LabelIndex::write(const std::filesystem::path& path) const {
  std::vector<std::int64_t> numbers{tokens_};
  numbers.insert(numbers.end(), ends_.begin(), ends_.end());
  write_atomically(path, std::as_bytes(std::span(numbers)));
}

std::int64_t LabelIndex::kept_in(std::int64_t block) const {
  const auto at = static_cast<std::size_t>(block);
  return ends_[at] - (block == 0 ? 0 : ends_[at - 1]);
}

void LabelIndex::check_block(const MappedFile& mask, std::int64_t block) const {
  const BlockTokens of(block, mask.size_bytes());
  const std::int64_t there = count_kept_tokens(mask, of.begin, of.end);
  if (there == kept_in(block)) return;
  refuse_index(
      path_,
      concat(kept_in(block), " unmasked targets in block ", block, " where the mask has ", there),
      mask);
}

bool LabelIndex::any(const MappedFile& mask, std::int64_t begin, std::int64_t end) const {
  if (begin >= end) return false;
  for (std::int64_t block = begin / kBlockTokens; block * kBlockTokens < end; ++block) {
    if (kept_in(block) == 0) continue;
    const BlockTokens of(block, mask.size_bytes());
    if (begin <= of.begin && of.end <= end) return true;
    if (!path_.empty()) check_block(mask, block);
    if (count_kept_tokens(mask, std::max(begin, of.begin), std::min(end, of.end)) > 0) return true;
  }
  return false;
}

}  // namespace tessera
