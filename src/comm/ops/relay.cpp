#include "comm/ops/relay.h"

#include <algorithm>
#include <bit>

namespace tessera::comm::relay {

int rounds(int ranks) { return static_cast<int>(std::bit_width(static_cast<unsigned>(ranks - 1))); }

Round round_of(int round, int rank, int ranks) {
  const int step = 1 << round;
  return {(rank + step) % ranks, (rank + ranks - step) % ranks};
}

std::vector<int> partners(int rank, int ranks) {
  std::vector<int> all;
  for (int round = 0; round < rounds(ranks); ++round) {
    const auto [to, from] = round_of(round, rank, ranks);
    all.insert(all.end(), {to, from});
  }
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

std::vector<std::vector<int>> waves(int rank, int ranks, int most) {
  std::vector<std::vector<int>> all;
  // The two ranks at one distance, one after and one before this rank, are in the same wave.
  for (int distance = 1; 2 * distance <= ranks; ++distance) {
    if ((distance - 1) % (most / 2) == 0) all.emplace_back();
    const int after = (rank + distance) % ranks;
    const int before = (rank + ranks - distance) % ranks;
    all.back().push_back(after);
    if (before != after) all.back().push_back(before);
  }
  return all;
}

void add_round(int round, int ranks, std::int64_t n, const std::int64_t* values,
               std::int64_t* received) {
  const bool counts = (ranks >> round & 1) != 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t rest = counts ? values[i] + received[n + i] : values[n + i];
    received[i] += values[i];
    received[n + i] = rest;
  }
}

int row_of_sum(int ranks) { return (ranks & (ranks - 1)) == 0 ? 0 : 1; }

int rank_at(int place, int rank, int ranks) { return (rank + ranks - place) % ranks; }
int place_of(int part, int rank, int ranks) { return (rank + ranks - part) % ranks; }

int parts_sent(int round, int ranks) { return std::min(1 << round, ranks - (1 << round)); }

std::vector<std::int64_t> begins(const std::vector<std::int64_t>& lengths, int rank) {
  const int ranks = static_cast<int>(lengths.size());
  std::vector<std::int64_t> begins{0};
  for (int place = 0; place < ranks; ++place) {
    begins.push_back(begins.back() +
                     lengths[static_cast<std::size_t>(rank_at(place, rank, ranks))]);
  }
  return begins;
}

std::int64_t gathered_bytes_sent(const std::vector<std::int64_t>& lengths, int rank) {
  const int ranks = static_cast<int>(lengths.size());
  const auto places = begins(lengths, rank);
  std::int64_t bytes = 0;
  for (int round = 0; round < rounds(ranks); ++round) {
    bytes += places[static_cast<std::size_t>(parts_sent(round, ranks))];
  }
  return bytes;
}

}  // namespace tessera::comm::relay
