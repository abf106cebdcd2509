// A pipeline schedule as a value: for every rank the list of its actions, in order. Pure.
//
// The layers of a model are cut into stages, the batch into micro-batches; a stage lies on one
// rank, a rank may hold several. Nothing here says when a slot runs, only after which other slots
// A schedule does not say when a slot runs, only after which other slots of its rank. The messages
// between ranks follow from the lists (program.h); validate.h says whether the lists can run,
// simulate.h how long they take, kinds.h makes them.
//
// F forward, B backward, which may be cut in two: I gradient of the stage's input, W gradients of
// its weights. Text of an action, as PyTorch writes it: <stage><op><micro-batch>, "3F0".
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/error.h"

namespace tessera::pipeline {

enum class ActionKind : std::uint8_t {
  kForward,         ///< F
  kInputGradient,   ///< I: needs what the next stage's I or B sends
  kWeightGradient,  ///< W: after the I of its micro-batch, needs no other stage
  kBackward,        ///< B: I and W at once
};
inline constexpr std::size_t kActionKinds = 4;

char op_of(ActionKind kind);

/// One computation of a stage for a micro-batch.
struct Action {
  ActionKind kind = ActionKind::kForward;
  int stage = 0;
  int micro_batch = 0;

  /// Whether it makes the gradient that the stage before waits for.
  bool gives_input_gradient() const {
    return kind == ActionKind::kInputGradient || kind == ActionKind::kBackward;
  }
  auto operator<=>(const Action&) const = default;
};
std::string to_string(const Action& action);

/// One action, or a pair of an F and a B, which may run interleaved.
struct Slot {
  Action action;
  std::optional<Action> paired;  ///< a B, where `action` is an F

  bool operator==(const Slot&) const = default;

  /// Calls `visit` with the one action or both, F first.
  template <class Visit>
  void each(const Visit& visit) const {
    visit(action);
    if (paired) visit(*paired);
  }
};
/// "3F0"; two as "(0F3;3B1)".
std::string to_string(const Slot& slot);

/// Far above any pipeline, so that no file and no command line asks for memory without use.
inline constexpr int kMostStages = 4096;
inline constexpr int kMostMicroBatches = 65536;
/// The most stages x micro-batches: these are validated and simulated in some seconds.
inline constexpr std::int64_t kMostCells = std::int64_t{1} << 18;
/// Errors: `kind`, for the list of this name.
void require_few_cells(std::int64_t stages, std::int64_t micro_batches, ErrorKind kind,
                       std::string_view name);

/// The reverse of to_string; none for anything else, also for numbers out of the bounds above.
std::optional<Action> parse_action(std::string_view text);
std::optional<Slot> parse_slot(std::string_view text);

struct Schedule {
  int micro_batches = 0;
  /// The rank of each stage; -1 where a file has none of its actions, which validate() reports.
  std::vector<int> rank_of;
  std::vector<std::vector<Slot>> slots;  ///< of each rank, in its order

  int ranks() const { return static_cast<int>(slots.size()); }
  int stages() const { return static_cast<int>(rank_of.size()); }
  /// Ascending.
  std::vector<int> stages_of(int rank) const;
  bool operator==(const Schedule&) const = default;
};

/// Returns its F alone, in their order: what computes losses and logits without gradients.
Schedule forward_only(const Schedule& schedule);

/// Returns F alone, of any number of micro-batches, on stages placed so: what computes losses of
/// other batches than those of a step.
Schedule forward_schedule(const std::vector<int>& rank_of, int ranks, int micro_batches);

/// A line a rank: "rank 0: 0F0 0F1 (0F2;3B0)".
std::string to_string(const Schedule& schedule);

enum class Direction : std::uint8_t {
  kForward,   ///< activations, to the stage after
  kBackward,  ///< gradients, to the stage before
};

/// The tensors that one stage passes to its neighbour for one micro-batch: made by `from`, needed
/// by `to`.
struct HandOver {
  Direction direction = Direction::kForward;
  int from = 0;  ///< stage
  int micro_batch = 0;

  int to() const { return direction == Direction::kForward ? from + 1 : from - 1; }
  auto operator<=>(const HandOver&) const = default;
};
/// "activations of stage 1, micro-batch 0", "gradients of ...".
std::string to_string(const HandOver& hand_over);

/// Returns what the action gives to another stage; none if there is no such stage.
std::optional<HandOver> given_by(const Action& action, int stages);
/// Returns what the action waits for from another stage. W waits for its own stage only.
std::optional<HandOver> needed_by(const Action& action, int stages);

/// Whether it is a message: the turn of a V is handed over within a rank.
bool is_message(const HandOver& hand_over, const Schedule& schedule);

}  // namespace tessera::pipeline
