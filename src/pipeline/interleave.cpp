#include "pipeline/interleave.h"

#include <algorithm>
#include <cmath>

#include "tessera/error.h"

namespace tessera::pipeline {
namespace {

/// More of them than these are shortened in text.
constexpr std::size_t kRoundsInFull = 3;

std::string_view op_of(Side side) { return side == Side::kForward ? "F" : "B"; }

std::string to_string(const Turn& turn) { return concat(op_of(turn.side), turn.piece + 1); }

void check_pieces(const Pieces& pieces, std::string_view side) {
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    for (const double time : {pieces[i].compute, pieces[i].exchange}) {
      TESSERA_CHECK(std::isfinite(time) && time >= 0.0, ErrorKind::kUsage, "interleave: found ",
                    time, " in piece ", i + 1, " of the ", side,
                    ", expected a finite time of at least 0");
    }
  }
  TESSERA_CHECK(pieces.empty() || pieces.back().exchange == 0.0, ErrorKind::kUsage,
                "interleave: found an exchange of ", pieces.empty() ? 0.0 : pieces.back().exchange,
                " in the last piece of the ", side, ", expected a piece behind it, which takes it");
}

/// Counts the turns from `begin` on in which both sides alternate, in whole rounds: B and F of the
/// same number, then of the next one.
std::size_t alternating(const std::vector<Turn>& turns, std::size_t begin) {
  std::size_t end = begin;
  while (end < turns.size()) {
    const std::size_t before = end - begin;
    const Turn expected{before % 2 == 0 ? Side::kBackward : Side::kForward,
                        turns[begin].piece + before / 2};
    if (turns[end] != expected) break;
    ++end;
  }
  return (end - begin) / 2 * 2;
}

/// Counts the turns from `begin` on that are one side's, one piece after the other.
std::size_t alone(const std::vector<Turn>& turns, std::size_t begin) {
  std::size_t end = begin + 1;
  while (end < turns.size() &&
         turns[end] == Turn{turns[begin].side, turns[begin].piece + (end - begin)}) {
    ++end;
  }
  return end - begin;
}

/// "B1 F1 B2 F2 B3 F3", or with "..." in its middle.
std::string in_rounds(const std::vector<Turn>& turns, std::size_t begin, std::size_t count) {
  std::string text;
  for (std::size_t i = 0; i < count; ++i) {
    if (count > 2 * kRoundsInFull && i == 4) {
      text += " ...";
      i = count - 2;
    }
    text += concat(i == 0 ? "" : " ", to_string(turns[begin + i]));
  }
  return text;
}

}  // namespace

Pieces equal_pieces(double compute, const std::vector<double>& exchanges) {
  const double each = compute / static_cast<double>(exchanges.size() + 1);
  Pieces pieces;
  for (const double exchange : exchanges) pieces.push_back({each, exchange});
  pieces.push_back({each, 0.0});
  return pieces;
}

double time_alone(const Pieces& pieces) {
  double time = 0.0;
  for (const Piece& piece : pieces) time += piece.compute + piece.exchange;
  return time;
}

std::vector<Turn> turns_of(std::size_t forward, std::size_t backward) {
  std::vector<Turn> turns;
  turns.reserve(forward + backward);
  for (std::size_t piece = 0; piece < std::max(forward, backward); ++piece) {
    if (piece < backward) turns.push_back({Side::kBackward, piece});
    if (piece < forward) turns.push_back({Side::kForward, piece});
  }
  return turns;
}

std::string to_string(const std::vector<Turn>& turns) {
  std::string text;
  for (std::size_t at = 0; at < turns.size();) {
    if (at > 0) text += " | ";
    std::size_t count = alternating(turns, at);
    if (count > 0) {
      text += in_rounds(turns, at, count);
    } else {
      count = alone(turns, at);
      text += to_string(turns[at]);
      if (count > 1) text += concat('-', turns[at + count - 1].piece + 1);
    }
    at += count;
  }
  return text;
}

Interleaved interleave(const Pieces& forward, const Pieces& backward) {
  check_pieces(forward, "forward");
  check_pieces(backward, "backward");
  Interleaved pair;
  pair.turns = turns_of(forward.size(), backward.size());
  double exchanges = 0.0;
  double arrived[] = {0.0, 0.0};  // what the next piece of a side needs
  for (const Turn& turn : pair.turns) {
    const Piece& piece = (turn.side == Side::kForward ? forward : backward)[turn.piece];
    double& needed = arrived[static_cast<std::size_t>(turn.side)];
    pair.exposed += std::max(0.0, needed - pair.time);
    pair.time = std::max(pair.time, needed) + piece.compute;
    needed = pair.time + piece.exchange;
    exchanges += piece.exchange;
  }
  pair.hidden = std::max(0.0, exchanges - pair.exposed);  // the difference may round below 0
  return pair;
}

}  // namespace tessera::pipeline
