#include "train/data/source_draw.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/random.h"
#include "tessera/error.h"

namespace tessera::train {
namespace {

// A point for each position of kBlocks blocks, none twice: position j of block b is at
// j x kBlocks + offset_of(b) units.
constexpr std::int64_t kBlocks = SourceDraw::kUnits / SourceDraw::kBlock;
constexpr int kBlockBits = 12;
static_assert(std::int64_t{1} << kBlockBits == kBlocks);

/// Bits in reverse order: any run of blocks has offsets that lie evenly.
std::int64_t offset_of(std::int64_t block) {
  std::int64_t offset = 0;
  for (int bit = 0; bit < kBlockBits; ++bit) offset = offset * 2 + ((block >> bit) & 1);
  return offset;
}

/// How many points of a block lie before `unit`.
std::int64_t points_before(std::int64_t offset, std::int64_t unit) {
  return unit > offset ? (unit - offset - 1) / kBlocks + 1 : 0;
}

}  // namespace

SourceDraw::SourceDraw(std::uint64_t seed, const std::vector<double>& weights)
    : seed_(stream_of(seed, "sources")) {
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  double until = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    until += weights[i];
    const bool is_last = i + 1 == weights.size();
    ends_.push_back(is_last ? kUnits : std::llround(until / sum * static_cast<double>(kUnits)));
    TESSERA_INVARIANT(ends_[i] > units_before(i) && ends_[i] <= kUnits,
                      "a source without a share of rows");
  }
  TESSERA_INVARIANT(!ends_.empty(), "no source to draw from");
}

std::int64_t SourceDraw::units_before(std::size_t source) const {
  return source == 0 ? 0 : ends_[source - 1];
}

double SourceDraw::share(std::size_t source) const {
  return static_cast<double>(ends_.at(source) - units_before(source)) / static_cast<double>(kUnits);
}

std::vector<std::int64_t> SourceDraw::counts_of_blocks(std::int64_t blocks) const {
  const std::int64_t rounds = blocks / kBlocks;
  std::vector<std::int64_t> counts(size());
  for (std::size_t k = 0; k < size(); ++k) counts[k] = rounds * (ends_[k] - units_before(k));
  for (std::int64_t block = rounds * kBlocks; block < blocks; ++block) {
    const std::int64_t offset = offset_of(block % kBlocks);
    for (std::size_t k = 0; k < size(); ++k) {
      counts[k] += points_before(offset, ends_[k]) - points_before(offset, units_before(k));
    }
  }
  return counts;
}

std::vector<std::size_t> SourceDraw::sources_in(std::int64_t block) const {
  const std::int64_t offset = offset_of(block % kBlocks);
  const Permutation order(seed_, static_cast<std::uint64_t>(block), kBlock);
  std::vector<std::size_t> sources;
  for (std::int64_t i = 0; i < kBlock; ++i) {
    const std::int64_t point = order(i) * kBlocks + offset;
    sources.push_back(
        static_cast<std::size_t>(std::ranges::upper_bound(ends_, point) - ends_.begin()));
  }
  return sources;
}

std::vector<SourceDraw::Row> SourceDraw::rows(std::int64_t begin, std::int64_t end) const {
  TESSERA_INVARIANT(begin >= 0 && begin <= end, "rows of no positions");
  std::vector<Row> rows;
  if (begin == end) return rows;
  std::int64_t block = begin / kBlock;
  auto counts = counts_of_blocks(block);
  for (; block * kBlock < end; ++block) {
    const auto sources = sources_in(block);
    for (std::int64_t i = 0; i < kBlock; ++i) {
      const std::size_t source = sources[static_cast<std::size_t>(i)];
      const std::int64_t number = counts[source]++;
      const std::int64_t position = block * kBlock + i;
      if (position >= begin && position < end) rows.push_back({source, number});
    }
  }
  return rows;
}

std::vector<std::int64_t> SourceDraw::counts(std::int64_t end) const {
  const std::int64_t block = end / kBlock;
  auto counts = counts_of_blocks(block);
  const auto sources = sources_in(block);
  for (std::int64_t i = 0; i < end % kBlock; ++i) ++counts[sources[static_cast<std::size_t>(i)]];
  return counts;
}

}  // namespace tessera::train
