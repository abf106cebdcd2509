// LabelIndex: the number of unmasked targets in each block of a mask: NAME.labels.bin next to
// NAME.mask.bin.
//
// It tells whether a row has a target without a read of the mask, except for the two blocks that
// the row shares with its neighbours; so a run begins without reading a mask as long as its data.
// tools/tokenize.py writes it, and a run that finds it missing makes it once. Next: token_source.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "base/mapped_file.h"

namespace tessera {

/// The file: little-endian uint64, first the number of tokens, then for each block of kBlockTokens
/// the number of bytes of the mask that are not 0 before the block's end.
class LabelIndex {
 public:
  static constexpr std::int64_t kBlockTokens = 4096;

  /// Reads it. Errors: kIo; kFormat where it does not belong to `mask`: another length or number of
  /// tokens, impossible counts, or counts other than those of the first, the middle and the last
  /// block.
  LabelIndex(const std::filesystem::path& path, const MappedFile& mask);
  /// Counts all of `mask`.
  explicit LabelIndex(const MappedFile& mask);

  /// Errors: kIo.
  void write(const std::filesystem::path& path) const;

  std::int64_t kept() const { return ends_.empty() ? 0 : ends_.back(); }
  /// Whether one of the tokens [begin, end) is an unmasked target. Errors: kFormat where the mask
  /// has other labels than the index.
  bool any(const MappedFile& mask, std::int64_t begin, std::int64_t end) const;

 private:
  std::int64_t kept_in(std::int64_t block) const;
  void check_block(const MappedFile& mask, std::int64_t block) const;

  std::filesystem::path path_;  // empty where it was counted
  std::int64_t tokens_;
  std::vector<std::int64_t> ends_;  // unmasked targets before the end of each block
};

}  // namespace tessera
