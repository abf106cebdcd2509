// A program: a schedule lowered to all that a rank does, messages and parameters included. Pure.
//
// The lists of a schedule leave open when messages and a stage's parameters move; a program says
// it. A receive is posted before it is needed and waited for by the slot that needs it; a send ends
// at the latest with the step. The turn of a V sends nothing. Next: validate.h, which says whether
// such lists end.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "pipeline/schedule.h"

namespace tessera::pipeline {

/// This rank's end of a message.
struct Transfer {
  enum class End : std::uint8_t { kSend, kReceive };

  End end = End::kSend;
  HandOver what;
  bool operator==(const Transfer&) const = default;

  /// The stage of this end: the one of the rank that sends or receives.
  int stage() const { return end == End::kSend ? what.from : what.to(); }
};

/// A change of a stage's parameters.
struct Residency {
  enum class Move : std::uint8_t {
    kUnshard,  ///< before its first F
    kReshard,  ///< after its last B or I: W needs no weight
    kReduce,   ///< after its last B or W
  };

  Move move = Move::kUnshard;
  int stage = 0;
  bool operator==(const Residency&) const = default;
};

using Step = std::variant<Slot, Transfer, Residency>;

/// In PyTorch's words: "3F0", "(0F3;3B1)OVERLAP_F_B", "1RECV_F0", "0SEND_B2", "2UNSHARD".
std::string to_string(const Step& step);
/// The reverse for one end of a message; none for any other text, and where there is no such stage.
std::optional<Transfer> parse_transfer(std::string_view text);

struct Program {
  int micro_batches = 0;
  std::vector<int> rank_of;              ///< as in Schedule
  std::vector<std::vector<Step>> steps;  ///< of each rank, in its order
  bool operator==(const Program&) const = default;
};

/// Lowers a schedule, which need not be valid. Receives are posted before the slot that lies
/// `receives_ahead` before the one that needs them; sends and moves follow the slot that makes them
/// possible. Stages must be those of rank_of.
Program lower(const Schedule& schedule, int receives_ahead = 1);

/// Returns the program with parameters moved where its slots need that. A file may have no moves,
/// or wrong ones.
Program with_moves(const Program& program);

/// Returns the slots alone.
Schedule schedule_of(const Program& program);

}  // namespace tessera::pipeline
