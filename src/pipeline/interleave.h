// The order in which a forward and a backward that run under each other take turns. Pure.
//
// A pair of a slot (schedule.h) runs on one thread. Each side is cut into pieces by its exchanges
// over the ranks of its stage; a piece ends by beginning its exchange and passing the turn, so that
// the other side computes meanwhile. The order follows from the counts of pieces alone, never from
// which exchange has arrived: all ranks begin their exchanges in the same order. Next: simulate.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/text/words.h"

namespace tessera::pipeline {

/// Which exchanges within a stage pass the turn.
enum class Overlap : std::uint8_t {
  kExperts,  ///< those of experts: dispatch, combine and their counts
  kAll,      ///< these, and tensor parallel sums
  kOff,      ///< none: B, then F
};
constexpr auto words_of(Overlap) {
  return std::to_array<Word<Overlap>>(
      {{"experts", Overlap::kExperts}, {"all", Overlap::kAll}, {"off", Overlap::kOff}});
}

/// The computation of a forward or backward between two turns, in any unit of time.
struct Piece {
  double compute = 0.0;
  /// From its issue at the end of the piece to its arrival, before which the side's next piece does
  /// not start. A piece that passes the turn without an exchange has 0; so has the last one, which
  /// ends its side.
  double exchange = 0.0;

  bool operator==(const Piece&) const = default;
};
/// The pieces of a side, in order.
using Pieces = std::vector<Piece>;

/// Cuts `compute` into equal parts, with these exchanges after all but the last one.
Pieces equal_pieces(double compute, const std::vector<double>& exchanges);

/// Adds up what the pieces take one after the other.
double time_alone(const Pieces& pieces);

enum class Side : std::uint8_t { kForward, kBackward };

/// One piece that runs.
struct Turn {
  Side side = Side::kForward;
  std::size_t piece = 0;  ///< from 0; in text from 1

  bool operator==(const Turn&) const = default;
};

/// Orders so many pieces: in strict alternation from the backward's first one on, and when a side
/// has ended the other continues alone.
std::vector<Turn> turns_of(std::size_t forward, std::size_t backward);

/// "B1 F1 B2 F2 ... B9 F9 | F10-13": both in alternation, then one alone.
std::string to_string(const std::vector<Turn>& turns);

/// A pair, or a side alone.
struct Interleaved {
  std::vector<Turn> turns;
  double time = 0.0;
  double exposed = 0.0;  ///< of the exchanges: how long the thread waits
  double hidden = 0.0;   ///< of the exchanges: what is not exposed
};

/// Simulates pieces in the order of turns_of(): one thread computes, each exchange takes its time
/// from its issue, independent of the others. Either side may be empty. Errors: kUsage where a time
/// is negative or not finite, or a last piece has an exchange.
Interleaved interleave(const Pieces& forward, const Pieces& backward);

}  // namespace tessera::pipeline
