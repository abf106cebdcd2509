// The known kinds of schedules as functions: ranks, stages a rank, micro-batches -> the list of
// each rank. Pure.
//
// In every kind F, I and W (or B) of a stage come in the order of the micro-batches, so sums of
// gradients have the bits of a run without a pipeline. Orders equal those of PyTorch 2.13 (1F1B:
// what its step runs; it has no Paired1F1B), which docs/pipeline.md says more of. Next: schedule.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/schedule.h"

namespace tessera::pipeline {

enum class Kind : std::uint8_t {
  kGPipe,                  ///< all forwards, then all backwards
  kOneFOneB,               ///< one forward, one backward
  kInterleavedOneFOneB,    ///< the same over several stages a rank
  kZeroBubble,             ///< ZB1P: 1F1B whose W fill the bubble
  kInterleavedZeroBubble,  ///< the same over several stages a rank
  kZeroBubbleV,            ///< ZBV: two stages a rank, the way back passes the ranks in reverse
  kDualPipeV,              ///< the same placement, F and B of two stages in one slot
  kPairedOneFOneB,  ///< Paired1F1B: 1F1B with each F paired with the B of an earlier micro-batch
};

/// How stages are placed on ranks.
enum class Placement : std::uint8_t {
  kLoop,  ///< stage s on rank s mod ranks
  kV,     ///< two stages a rank: r and 2 x ranks - 1 - r
};

struct KindRow {
  Kind kind;
  std::string_view name;
  std::string_view also = {};  ///< PyTorch's name, where it differs
  Placement placement = Placement::kLoop;
  int stages_per_rank = 1;  ///< by default
  bool any_stages = false;  ///< whether another number has a meaning
};
const std::vector<KindRow>& kinds();
const KindRow& row_of(Kind kind);

/// Finds a kind by name. Case does not matter; PyTorch's class names ("ScheduleZBVZeroBubble") are
/// names, too. Errors: kConfig for another name; lists the known ones.
Kind kind_named(std::string_view name);
/// The same; none for another name.
std::optional<Kind> find_kind(std::string_view name);
/// Lists all names, for messages.
std::string kind_names();

struct Shape {
  int ranks = 1;
  int stages_per_rank = 1;
  int micro_batches = 1;
};

/// Returns the rank of each stage. Errors: kConfig for less than one rank or stage, for more than
/// kMostStages in all, for a V of other than two stages a rank.
std::vector<int> place_stages(Placement placement, int ranks, int stages_per_rank);

/// Makes a schedule: the same value on every rank for the same shape. Errors: kConfig with the
/// numbers: less than one of something; stages a rank that the kind has no meaning for; fewer
/// micro-batches than it needs (1F1B: ranks; DualPipeV: stages) or, for the interleaved kinds, no
/// multiple of the rounds (micro-batches / ranks, at least 1); more than can be of use.
Schedule make_schedule(Kind kind, const Shape& shape);

}  // namespace tessera::pipeline
