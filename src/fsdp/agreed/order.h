// The order of collectives as values. [Note: collective order]
//
// Two Gloo collectives of equal size that are issued in different orders on two ranks exchange each
// other's data without an error. So their order depends neither on what is ready first nor on what
// this rank has in memory. It is one list, a pure function of what all ranks agreed on when the
// backward began: the Trace of each forward that it goes through on some rank (the order in which
// units were entered and left), the places that it passes (BackwardView), the units' options and
// which units are unsharded. pass_planner.h makes the list, and every rank runs all of it, also
// where it did not use a result. In a forward each rank gathers the units that are not unsharded
// yet: these are the same everywhere, since the list of a backward also says what is released.
// Pure: no torch header.
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
  std::vector<std::size_t> exits;  ///< positions in `units`, in the order of their ends
  /// By position: the number, from 1, of the outermost checkpoint that it ran in; 0 for none.
  std::vector<std::uint32_t> checkpoints;
  bool operator==(const Trace&) const = default;
  std::uint64_t hash() const;
};

// The limits of files are far beyond any model; a plan of that size is checked within seconds.
inline constexpr std::int64_t kMostPlaces = 1 << 13;  // in all traces

/// Ranges that only a whole plan defines: the units that a trace enters, the numbers of its places,
/// and one number for each place.
struct EnteredUnits {};
struct PlaceNumbers {};
struct ByPlace : IntRange {};

template <class V>
constexpr void fields(V& visit, Of<Trace>) {
  visit({"units", "entry"}, &Trace::units, EnteredUnits{});
  visit({"exits", "exit"}, &Trace::exits, PlaceNumbers{});
  visit({"checkpoints", "checkpoint of entry"}, &Trace::checkpoints, ByPlace{{0, kMostPlaces}});
}

/// A forward enters a unit or leaves it.
struct TraceEvent {
  std::size_t position = 0;  ///< in Trace::units
  bool enters = true;
  bool operator==(const TraceEvent&) const = default;
};
/// Returns the events of a trace in the order of the forward. Calls are nested, so the order of
/// entries and the order of exits define it. Calls that have not ended end last.
std::vector<TraceEvent> trace_events(const Trace& trace);

/// Returns the first difference between rank 0's list and that of `rank`, as text: "entry 3: rank 0
/// entered layers.3, rank 1 entered layers.4", or "... entered nothing more" for the shorter one.
/// Empty where they are equal.
std::string first_difference(const std::vector<std::string>& names_of_first, int rank,
                             const std::vector<std::string>& names);

/// One rank's part of the agreement when a backward begins. Ranks may use results differently: one
/// drops a branch, another keeps a graph for later. Autograd knows at that time which nodes it will
/// run, so each rank says which units' forwards its backward goes through; all ranks do what any of
/// them needs.
struct BackwardView {
  /// The number of actions done in the backward around this one; 0 for an outermost one.
  std::uint64_t actions_done = 0;
  /// Numbers of the forwards of which a graph exists.
  std::set<std::uint32_t> alive;
  /// By number of each forward that the backward goes through, and by position of its trace:
  /// whether the unit's parameters are needed there.
  std::map<std::uint32_t, std::vector<bool>> reached;
  bool operator==(const BackwardView&) const = default;
};

/// The range of what a view may say, the same on all ranks.
struct ViewFrame {
  std::size_t actions = 0;  ///< number of actions of the backward around this one
  /// By number of each forward that is kept: the number of units in its trace.
  std::map<std::uint32_t, std::size_t> forwards;
};

/// Converts a view to bits, as many for every view of a frame: the OR of all ranks' bits is a view
/// that says what any rank says, with the highest actions_done.
std::vector<bool> to_bits(const BackwardView& view, const ViewFrame& frame);
BackwardView from_bits(const std::vector<bool>& bits, const ViewFrame& frame);

// The next values are the record of one step of a sharded tree: each stage's forward and what its
// backward goes through. The first step of a schedule records it, later steps agree on it when they
// begin (../runtime/open_step.h).

/// Whether a backward needs the parameters, by position of a trace.
using Reach = std::vector<bool>;

/// The record of one stage of a rank, the same for each of its micro-batches.
struct StageRecord {
  /// The outermost forwards of one micro-batch; checkpoints are counted from 1 over all of them.
  std::vector<Trace> parts;
  /// By part: the positions where some rank's backward needs the unit's parameters.
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
  /// Whether micro-batches of one stage entered different units, so that there is nothing to
  /// follow.
  bool varies = false;
  bool operator==(const StepRecord&) const = default;
  /// Whether every stage has run, and all of its micro-batches alike.
  bool is_complete() const;
  std::uint64_t hash() const;
};

/// A list with one element for each stage of a rank.
struct ByStage : List<> {};
inline constexpr ByStage kStages{{StepScopeOptions::kMostStages, "stages"}};

template <class V>
constexpr void fields(V& visit, Of<StepRecord>) {
  visit({"stages", "recorded stages"}, &StepRecord::stages, kStages);
  visit({"varies", "micro-batches differ", Missing::kNotInFile}, &StepRecord::varies);
}

/// Returns the trace with checkpoints counted from 1, where `before` of them ran earlier.
Trace counted_after(Trace trace, std::uint32_t before);

/// Returns the units that the parts enter, in the order of their first places, each after the units
/// that own parameters of it. `owners`: by unit.
std::vector<UnitId> first_entries(const std::vector<Trace>& parts,
                                  const std::vector<std::vector<UnitId>>& owners);

/// Adds `reached` to what is known of a backward through the same parts.
void add_reach(std::vector<Reach>& known, const std::vector<Reach>& reached);

}  // namespace tessera::fsdp
