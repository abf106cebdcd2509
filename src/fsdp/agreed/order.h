// The order of collectives as values. [Note: collective order]
//
// Two equal-size Gloo collectives that are issued in different orders on two ranks exchange each
// other's data without an error. So the order is not what happens to be ready first, nor what this
// rank still has in memory, but one list, a pure function of what all ranks agreed on when the
// backward began: the Trace of each forward that it goes through on some rank, that is the sequence
// in which units were entered and the one in which they were left; the places that it passes
// (BackwardView); units' options and what is unsharded. pass_planner.h makes the list from them,
// and every rank runs all of it, also where it did not use a result. In forward each rank gathers
// what is not unsharded yet: that is the same everywhere, since backward's list says what is
// released, too. Pure: no torch header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/text/fields.h"
#include "tessera/step_scope.h"

namespace tessera::fsdp {

using UnitId = std::uint32_t;

/// The units in the order in which one forward of the root entered them, and in which it left them.
struct Trace {
  std::vector<UnitId> units;
  std::vector<std::size_t> exits;  ///< positions in `units`, as their forwards ended
  /// By position: the outermost checkpoint that it ran in, counted from 1; 0 for none.
  std::vector<std::uint32_t> checkpoints;
  bool operator==(const Trace&) const = default;
  std::uint64_t hash() const;
};

// The limits of files are far beyond any model; a plan of that size is checked within seconds.
inline constexpr std::int64_t kMostPlaces = 1 << 13;  // of all traces

/// Ranges that only a whole plan defines: the units that a trace enters; numbers of its places; a
/// number for each of its places.
struct EnteredUnits {};
struct PlaceNumbers {};
struct ByPlace : IntRange {};

template <class V>
constexpr void fields(V& visit, Of<Trace>) {
  visit({"units", "entry"}, &Trace::units, EnteredUnits{});
  visit({"exits", "exit"}, &Trace::exits, PlaceNumbers{});
  visit({"checkpoints", "checkpoint of entry"}, &Trace::checkpoints, ByPlace{{0, kMostPlaces}});
}

/// A forward comes to a unit, or leaves it.
struct TraceEvent {
  std::size_t position = 0;  ///< in Trace::units
  bool enters = true;
  bool operator==(const TraceEvent&) const = default;
};
/// All of a trace's, in the order of the forward: calls are nested, so the order of beginnings and
/// that of ends say how the two follow each other. What has not ended ends last.
std::vector<TraceEvent> crossings(const Trace& trace);

/// The first place where rank 0's list and that of `rank` differ, in words: "entry 3: rank 0
/// entered layers.3, rank 1 entered layers.4", or "... entered nothing more" for the shorter one.
/// Empty when they agree.
std::string first_difference(const std::vector<std::string>& names_of_first, int rank,
                             const std::vector<std::string>& names);

/// One rank's part of the agreement when a backward begins. Ranks may use results differently: one
/// drops a branch, another keeps a graph for later. Autograd knows then which nodes it will run, so
/// each rank says through which units' forwards its backward goes; all of them do what any needs.
struct BackwardView {
  /// Actions done of the backward around this one; 0 for an outermost one.
  std::uint64_t actions_done = 0;
  /// Numbers of the forwards of which some graph lives.
  std::set<std::uint32_t> alive;
  /// By number of the forward, for those that backward goes through: by position of its trace,
  /// whether the unit's parameters are needed there.
  std::map<std::uint32_t, std::vector<bool>> reached;
  bool operator==(const BackwardView&) const = default;
};

/// The forwards and actions that a view is about, the same on all ranks.
struct ViewFrame {
  std::size_t actions = 0;  ///< of the backward around this one
  /// By number of each forward that is kept: units in its trace.
  std::map<std::uint32_t, std::size_t> forwards;
};

/// One bit for each thing that a view may say: the bits of which any rank's count are what any of
/// them says, with the most actions. As many for every view of a frame.
std::vector<bool> to_bits(const BackwardView& view, const ViewFrame& frame);
BackwardView from_bits(const std::vector<bool>& bits, const ViewFrame& frame);

// What one step of a sharded tree runs, as a value: each stage's forward and what its backward goes
// through. Recorded in the first step of a schedule, agreed on at the beginning of the others
// (../runtime/open_step.h records and follows).

/// By position of a trace.
using Reach = std::vector<bool>;

/// One stage of a rank: the same for each of its micro-batches.
struct StageRecord {
  /// The outermost forwards of one micro-batch; checkpoints are counted from 1 over all of them.
  std::vector<Trace> parts;
  /// As `parts`: some backward needs the unit's parameters there, on some rank.
  std::vector<Reach> reached;
  bool operator==(const StageRecord&) const = default;
};

template <class V>
constexpr void fields(V& visit, Of<StageRecord>) {
  visit({"parts", "forwards"}, &StageRecord::parts, List{kMostPlaces, "forwards"});
  visit({"reached", "forwards that a backward goes through"}, &StageRecord::reached,
        List{kMostPlaces, "forwards", List{kMostPlaces, "places"}});
}

struct StepRecord {
  std::vector<StageRecord> stages;
  /// Micro-batches of one stage did not enter the same: there is nothing to follow.
  bool varies = false;
  bool operator==(const StepRecord&) const = default;
  /// Every stage has run, and all of its micro-batches alike.
  bool is_complete() const;
  std::uint64_t hash() const;
};

/// Stages of a rank.
struct ByStage : List<> {};
inline constexpr ByStage kStages{{StepScopeOptions::kMostStages, "stages"}};

template <class V>
constexpr void fields(V& visit, Of<StepRecord>) {
  visit({"stages", "recorded stages"}, &StepRecord::stages, kStages);
  visit({"varies", "micro-batches differ", Missing::kNotInFile}, &StepRecord::varies);
}

/// Counts checkpoints as if `before` had been the last one of what came earlier.
Trace counted_after(Trace trace, std::uint32_t before);

/// The units that the parts enter, those that lend them parameters before them, each at its first
/// place. `lenders`: by unit.
std::vector<UnitId> first_entries(const std::vector<Trace>& parts,
                                  const std::vector<std::vector<UnitId>>& owners);

/// Adds what `reached` has to what is known of a backward through the same parts.
void add_reach(std::vector<Reach>& known, const std::vector<Reach>& reached);

}  // namespace tessera::fsdp
