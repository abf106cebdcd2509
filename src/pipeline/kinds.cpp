#include "pipeline/kinds.h"

#include <algorithm>
#include <cctype>
#include <deque>
#include <string>
#include <utility>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::pipeline {
namespace {

/// The stages of a rank on a V: the left arm goes up the ranks, the right one comes back.
constexpr int kLeft = 0;
constexpr int kRight = 1;

/// A rank's list while it grows. Every action is the next micro-batch of its stage and kind, which
/// is what keeps sums in order. A chunk is the place of a stage among those of its rank.
class RankList {
 public:
  RankList(std::vector<int> stages, int micro_batches)
      : stages_(std::move(stages)), counts_(stages_.size()), micro_batches_(micro_batches) {}

  void forward(int chunk) { add({{ActionKind::kForward, stage(chunk), forwards(chunk)++}, {}}); }
  void backward(int chunk) { add({next_backward(chunk), {}}); }
  void forward_with_backward(int forward_chunk, int backward_chunk) {
    const Action forward{ActionKind::kForward, stage(forward_chunk), forwards(forward_chunk)++};
    add({forward, next_backward(backward_chunk)});
  }
  /// I; its W is deferred.
  void input_gradient(int chunk) {
    add({{ActionKind::kInputGradient, stage(chunk), input_gradients(chunk)++}, {}});
    deferred_.push_back(chunk);
  }
  /// The W that was deferred first, of any stage.
  void oldest_weight_gradient() {
    const int chunk = deferred_.front();
    deferred_.pop_front();
    weight_gradient(chunk);
  }
  /// The W of this stage that was deferred first.
  void weight_gradient_of(int chunk) {
    deferred_.erase(std::ranges::find(deferred_, chunk));
    weight_gradient(chunk);
  }
  /// I, and W at once.
  void halves(int chunk) {
    input_gradient(chunk);
    weight_gradient_of(chunk);
  }
  bool has_deferred(int chunk) const {
    return std::ranges::find(deferred_, chunk) != deferred_.end();
  }
  std::size_t deferred() const { return deferred_.size(); }

  int& forwards(int chunk) { return counts(chunk).forwards; }
  int& input_gradients(int chunk) { return counts(chunk).input_gradients; }

  std::vector<Slot> take() { return std::move(slots_); }

 private:
  struct Counts {
    int forwards = 0;
    int input_gradients = 0;   ///< of I and B
    int weight_gradients = 0;  ///< of W and B
  };

  int stage(int chunk) const { return stages_.at(static_cast<std::size_t>(chunk)); }
  Counts& counts(int chunk) { return counts_.at(static_cast<std::size_t>(chunk)); }

  Action next_backward(int chunk) {
    ++counts(chunk).weight_gradients;
    return {ActionKind::kBackward, stage(chunk), input_gradients(chunk)++};
  }
  void weight_gradient(int chunk) {
    add({{ActionKind::kWeightGradient, stage(chunk), counts(chunk).weight_gradients++}, {}});
  }
  void add(const Slot& slot) {
    // ZBV's pattern runs on for micro-batches that do not exist.
    if (slot.action.micro_batch < micro_batches_) slots_.push_back(slot);
  }

  std::vector<int> stages_;
  std::vector<Counts> counts_;
  std::deque<int> deferred_;  ///< chunks, oldest first
  int micro_batches_;
  std::vector<Slot> slots_;
};

template <class Turn>
void repeat(int times, const Turn& turn) {
  for (int i = 0; i < times; ++i) turn();
}

// Huang et al., GPipe, 2019.
void gpipe(RankList& list, int /*rank*/, const Shape& shape) {
  repeat(shape.micro_batches, [&] { list.forward(0); });
  repeat(shape.micro_batches, [&] { list.backward(0); });
}

// Narayanan et al., PipeDream-Flush, 2021: as many forwards ahead as stages follow, this one too.
void one_f_one_b(RankList& list, int rank, const Shape& shape) {
  repeat(std::min(shape.micro_batches, shape.ranks - rank), [&] { list.forward(0); });
  repeat(shape.micro_batches, [&] {
    list.backward(0);
    if (list.forwards(0) < shape.micro_batches) list.forward(0);
  });
}

/// Micro-batches that pass one stage of a rank before the next stage of it has its turn.
int round_of(const Shape& shape) {
  return shape.micro_batches / std::max(1, shape.micro_batches / shape.ranks);
}

/// Narayanan et al., Megatron-LM, 2021: 1F1B over the stages of a rank in rounds. `lead`: forwards
/// that a rank runs ahead for each rank behind it.
template <class Backward>
void interleaved(RankList& list, int rank, const Shape& shape, int lead, const Backward& backward) {
  const int round = round_of(shape);
  const int chunks = shape.stages_per_rank;
  const int total = shape.micro_batches * chunks;
  const int ahead = std::min(total, (chunks - 1) * round + lead * (shape.ranks - 1 - rank));
  const auto chunk_of = [&](int step) { return step / round % chunks; };
  for (int step = 0; step < ahead; ++step) list.forward(chunk_of(step));
  for (int step = 0; step < total; ++step) {
    if (ahead + step < total) list.forward(chunk_of(ahead + step));
    backward(step, chunks - 1 - chunk_of(step));
  }
}

void interleaved_one_f_one_b(RankList& list, int rank, const Shape& shape) {
  interleaved(list, rank, shape, 2, [&](int, int chunk) { list.backward(chunk); });
}

// Qi et al., Zero Bubble, 2024, H1: no W before rank r has done r backwards, so that the last ranks
// have some to fill their bubble at the end with.
void zero_bubble(RankList& list, int rank, const Shape& shape) {
  interleaved(list, rank, shape, 1, [&](int step, int chunk) {
    list.input_gradient(chunk);
    if (step >= rank) list.oldest_weight_gradient();
  });
  while (list.deferred() > 0) list.oldest_weight_gradient();
}

// Qi et al., Pipeline Parallelism with Controllable Memory, 2024: the V with the memory of 1F1B.
void zero_bubble_v(RankList& list, int rank, const Shape& shape) {
  const int behind = shape.ranks - rank;  // ranks from this one to the turn
  // The pattern needs so many; those that do not exist are left out of it.
  const int micro_batches = std::max(2 * shape.ranks - 1, shape.micro_batches);
  repeat(2 * behind - 1, [&] { list.forward(kLeft); });
  repeat(rank, [&] {
    list.forward(kRight);
    list.forward(kLeft);
  });
  repeat(behind, [&] {
    list.forward(kRight);
    list.halves(kRight);
  });
  while (list.forwards(kRight) < micro_batches) {
    if (list.forwards(kLeft) < micro_batches) list.forward(kLeft);
    list.halves(kLeft);
    list.forward(kRight);
    list.halves(kRight);
  }
  repeat(rank, [&] {
    list.input_gradient(kLeft);
    list.input_gradient(kRight);
  });
  repeat(behind, [&] {
    list.input_gradient(kLeft);
    list.weight_gradient_of(kLeft);
  });
  while (list.has_deferred(kRight)) list.weight_gradient_of(kRight);
  while (list.deferred() > 0) list.oldest_weight_gradient();
}

/// The sixth of DualPipeV's eight steps: backwards of both arms, from the middle on in halves.
void dual_pipe_v_turn_to_halves(RankList& list, int rank) {
  bool in_halves = false;
  const auto backward = [&](int chunk) {
    in_halves ? list.input_gradient(chunk) : list.backward(chunk);
  };
  for (int i = 0; i <= rank; ++i) {
    const bool middle = i == (rank + 1) / 2;
    if (middle && rank % 2 == 1) in_halves = true;
    backward(kRight);
    if (middle) in_halves = true;
    backward(kLeft);
  }
}

// DeepSeek-AI, DualPipe, cut in half as Sea AI Lab proposed, 2025.
void dual_pipe_v(RankList& list, int rank, const Shape& shape) {
  const int behind = shape.ranks - 1 - rank;
  repeat(2 * behind, [&] { list.forward(kLeft); });
  repeat(rank + 1, [&] {
    list.forward(kLeft);
    list.forward(kRight);
  });
  repeat(behind, [&] {
    list.halves(kRight);
    list.forward(kRight);
  });
  for (int i = 0; i < shape.micro_batches - 2 * shape.ranks + rank + 1; ++i) {
    if (i == 0 && behind == 0) {
      // The first backward of all: the rank before the turn waits for it, not for a pair.
      list.forward(kLeft);
      list.backward(kRight);
    } else {
      list.forward_with_backward(kLeft, kRight);
    }
    list.forward_with_backward(kRight, kLeft);
  }
  repeat(behind, [&] {
    list.backward(kRight);
    list.forward_with_backward(kRight, kLeft);
  });
  dual_pipe_v_turn_to_halves(list, rank);
  repeat(behind, [&] {
    list.oldest_weight_gradient();
    list.input_gradient(kLeft);
  });
  while (list.deferred() > 0) list.oldest_weight_gradient();
}

/// Runs two forwards more ahead for each rank behind. With one, as in 1F1B, a pair would wait for
/// the pairs of both neighbours, and every second slot would be empty.
void paired_one_f_one_b(RankList& list, int rank, const Shape& shape) {
  const int ahead = 2 * (shape.ranks - rank) - 1;
  repeat(std::min(shape.micro_batches, ahead), [&] { list.forward(0); });
  repeat(std::max(0, shape.micro_batches - ahead), [&] { list.forward_with_backward(0, 0); });
  repeat(std::min(shape.micro_batches, ahead), [&] { list.backward(0); });
}

using Generator = void (*)(RankList&, int rank, const Shape&);

Generator generator_of(Kind kind) {
  switch (kind) {
    case Kind::kGPipe:
      return gpipe;
    case Kind::kOneFOneB:
      return one_f_one_b;
    case Kind::kInterleavedOneFOneB:
      return interleaved_one_f_one_b;
    case Kind::kZeroBubble:
    case Kind::kInterleavedZeroBubble:
      return zero_bubble;
    case Kind::kZeroBubbleV:
      return zero_bubble_v;
    case Kind::kDualPipeV:
      return dual_pipe_v;
    case Kind::kPairedOneFOneB:
      return paired_one_f_one_b;
  }
  TESSERA_INVARIANT(false, "a kind of schedules without a generator");
}

void check_micro_batches(const KindRow& row, const Shape& shape) {
  const int found = shape.micro_batches;
  const auto at_least = [&](int fewest, std::string_view what) {
    TESSERA_CHECK(found >= fewest, ErrorKind::kConfig, row.name, " on ", shape.ranks,
                  " ranks: found ", found, " micro-batches, expected at least ", fewest, ", the ",
                  what, "; make smaller ones, or take GPipe, ZBV or Paired1F1B");
  };
  if (row.kind == Kind::kOneFOneB) at_least(shape.ranks, "number of ranks");
  if (row.kind == Kind::kDualPipeV) at_least(2 * shape.ranks, "number of stages");
  if (row.kind == Kind::kInterleavedOneFOneB || row.kind == Kind::kZeroBubble ||
      row.kind == Kind::kInterleavedZeroBubble) {
    const int rounds = std::max(1, found / shape.ranks);
    TESSERA_CHECK(found % rounds == 0, ErrorKind::kConfig, row.name, " on ", shape.ranks,
                  " ranks: found ", found, " micro-batches, expected a multiple of ", rounds,
                  " (its rounds: micro-batches / ranks), as ", found - found % rounds);
  }
}

std::string in_lower_case(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return lower;
}

}  // namespace

const std::vector<KindRow>& kinds() {
  static const std::vector<KindRow> rows{
      {.kind = Kind::kGPipe, .name = "GPipe"},
      {.kind = Kind::kOneFOneB, .name = "1F1B"},
      {.kind = Kind::kInterleavedOneFOneB,
       .name = "Interleaved1F1B",
       .stages_per_rank = 2,
       .any_stages = true},
      {.kind = Kind::kZeroBubble, .name = "ZB1P"},
      {.kind = Kind::kInterleavedZeroBubble,
       .name = "InterleavedZeroBubble",
       .stages_per_rank = 2,
       .any_stages = true},
      {.kind = Kind::kZeroBubbleV,
       .name = "ZBV",
       .also = "ZBVZeroBubble",
       .placement = Placement::kV,
       .stages_per_rank = 2},
      {.kind = Kind::kDualPipeV,
       .name = "DualPipeV",
       .placement = Placement::kV,
       .stages_per_rank = 2},
      {.kind = Kind::kPairedOneFOneB, .name = "Paired1F1B"},
  };
  return rows;
}

const KindRow& row_of(Kind kind) {
  return *std::ranges::find(kinds(), kind, [](const KindRow& row) { return row.kind; });
}

std::optional<Kind> find_kind(std::string_view name) {
  std::string wanted = in_lower_case(name);
  if (wanted.starts_with("schedule")) wanted.erase(0, 8);
  for (const KindRow& row : kinds()) {
    if (wanted == in_lower_case(row.name)) return row.kind;
    if (!row.also.empty() && wanted == in_lower_case(row.also)) return row.kind;
  }
  return std::nullopt;
}

std::string kind_names() {
  std::vector<std::string_view> names;
  for (const KindRow& row : kinds()) names.push_back(row.name);
  return joined(names);
}

Kind kind_named(std::string_view name) {
  const auto kind = find_kind(name);
  TESSERA_CHECK(kind, ErrorKind::kConfig, "schedule: found ", printable(name), ", expected one of ",
                kind_names(), ", or a file that ends in .csv");
  return *kind;
}

std::vector<int> place_stages(Placement placement, int ranks, int stages_per_rank) {
  TESSERA_CHECK(ranks >= 1 && stages_per_rank >= 1, ErrorKind::kConfig, "schedule: found ", ranks,
                " ranks and ", stages_per_rank, " stages a rank, expected at least 1 of each");
  TESSERA_CHECK(stages_per_rank <= kMostStages / ranks, ErrorKind::kConfig, "schedule: found ",
                ranks, " ranks and ", stages_per_rank, " stages a rank, expected at most ",
                kMostStages, " stages");
  TESSERA_CHECK(placement != Placement::kV || stages_per_rank == 2, ErrorKind::kConfig,
                "schedule: found ", stages_per_rank, " stages a rank on a V, expected 2");
  const int stages = ranks * stages_per_rank;
  std::vector<int> rank_of;
  for (int stage = 0; stage < stages; ++stage) {
    const bool right_arm = placement == Placement::kV && stage >= ranks;
    rank_of.push_back(right_arm ? stages - 1 - stage : stage % ranks);
  }
  return rank_of;
}

Schedule make_schedule(Kind kind, const Shape& shape) {
  const KindRow& row = row_of(kind);
  TESSERA_CHECK(shape.micro_batches >= 1 && shape.micro_batches <= kMostMicroBatches,
                ErrorKind::kConfig, row.name, ": found ", shape.micro_batches,
                " micro-batches, expected 1 to ", kMostMicroBatches);
  TESSERA_CHECK(
      row.any_stages || shape.stages_per_rank == row.stages_per_rank, ErrorKind::kConfig, row.name,
      ": found ", shape.stages_per_rank, " stages a rank, expected ", row.stages_per_rank,
      row.stages_per_rank == 1 ? "; Interleaved1F1B and InterleavedZeroBubble take several" : "");
  Schedule schedule;
  schedule.micro_batches = shape.micro_batches;
  schedule.rank_of = place_stages(row.placement, shape.ranks, shape.stages_per_rank);
  require_few_cells(schedule.stages(), shape.micro_batches, ErrorKind::kConfig, row.name);
  check_micro_batches(row, shape);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    RankList list(schedule.stages_of(rank), shape.micro_batches);
    generator_of(kind)(list, rank, shape);
    schedule.slots.push_back(list.take());
  }
  return schedule;
}

}  // namespace tessera::pipeline
