// From which of several weighted sources each row of a run comes. Pure.
//
// Positions count the rows of a run from 0 through all its steps; what stands at a position depends
// on (seed, weights, position) only. Each kBlock positions have of every source its share of them,
// rounded down or up, in an order of their own, and each kUnits positions exactly its units. The
// rows of a source come one after the other (0, 1, 2, ...): its own order and epochs are
// RowOrder's. Short symbols: K sources. Next: data.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::train {

class SourceDraw {
 public:
  static constexpr std::int64_t kBlock = 256;
  static constexpr std::int64_t kUnits = std::int64_t{1} << 20;

  /// weights: [K], each above 0 and more than a unit of their sum.
  SourceDraw(std::uint64_t seed, const std::vector<double>& weights);

  struct Row {
    std::size_t source = 0;
    std::int64_t number = 0;  ///< among all rows of the source, from 0
    bool operator==(const Row&) const = default;
  };
  /// Those at positions [begin, end).
  std::vector<Row> rows(std::int64_t begin, std::int64_t end) const;

  /// How many rows of each source lie at positions [0, end). [K]
  std::vector<std::int64_t> counts(std::int64_t end) const;

  std::size_t size() const { return ends_.size(); }
  /// The share of a source: its units over kUnits.
  double share(std::size_t source) const;

 private:
  std::int64_t units_before(std::size_t source) const;
  std::vector<std::int64_t> counts_of_blocks(std::int64_t blocks) const;
  /// The sources of a block's positions. [kBlock]
  std::vector<std::size_t> sources_in(std::int64_t block) const;

  std::uint64_t seed_;
  std::vector<std::int64_t>
      ends_;  // in units, of the sources one after the other; the last is kUnits
};

}  // namespace tessera::train
