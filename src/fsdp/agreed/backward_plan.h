// What one backward issues, as a value, and what ranks tell each other first. [Note: collective
// order]
//
// Ranks may use results differently: one drops a branch, another keeps a graph for later. Autograd
// knows when a backward begins which nodes it will run, so each rank says through which units'
// forwards its backward goes; all of them do what any of them needs. Pure: no torch header. Next:
// order.h (traces), runtime.h (which walks through the steps).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "fsdp/agreed/order.h"

namespace tessera::fsdp {

struct BackwardView {
  /// Steps done of the backward around this one; 0 for an outermost one.
  std::uint64_t steps_done = 0;
  /// Numbers of the forwards of which some graph lives.
  std::set<std::uint32_t> alive;
  /// By number of the forward, for those that backward goes through: by position of its trace,
  /// whether the unit's parameters are needed there.
  std::map<std::uint32_t, std::vector<bool>> reached;
  bool operator==(const BackwardView&) const = default;
};

/// What all ranks know alike, and a view speaks of.
struct ViewFrame {
  std::size_t steps = 0;  ///< of the backward around this one
  /// By number of each forward that is kept: units in its trace.
  std::map<std::uint32_t, std::size_t> forwards;
};

/// One bit for each thing that a view may say: the bits of which any rank's count are what any of
/// them says, with the most steps. As many for every view of a frame.
std::vector<bool> to_bits(const BackwardView& view, const ViewFrame& frame);
BackwardView from_bits(const std::vector<bool>& bits, const ViewFrame& frame);

/// What the plan has to know of a unit; the same on every rank.
struct UnitState {
  bool gathers = false;          ///< its backward needs parameters that have to be gathered
  bool gathered = false;         ///< unsharded, or about to be
  bool releases = false;         ///< its memory goes back after each of its backwards
  bool reduces = false;          ///< its gradients are summed while this backward runs
  std::vector<UnitId> lenders;   ///< units that hold some of its parameters
  std::vector<UnitId> prefetch;  ///< what is gathered while it computes; empty: what comes next
  bool operator==(const UnitState&) const = default;
};

/// A forward that backward goes through on some rank.
struct ReachedForward {
  std::uint32_t number = 0;
  const Trace* trace = nullptr;
  /// By position of the trace: backward needs the unit's parameters there, on some rank.
  std::vector<bool> reached;
};

struct Step {
  enum class Kind : std::uint8_t { kGather, kRelease, kReduce };
  Kind kind = Kind::kGather;
  UnitId unit = 0;
  std::uint32_t forward = 0;  ///< number of the forward for which it gathers
  bool operator==(const Step&) const = default;
};

/// How many of the steps are done before, while and after one unit's backward computes; and when
/// that is.
struct Places {
  std::size_t needed = 0;
  std::size_t ahead = 0;
  std::size_t after = 0;
  std::size_t begins = 0;  ///< among all beginnings and ends of units' backwards
  std::size_t ends = 0;
  bool operator==(const Places&) const = default;
};

struct BackwardPlan {
  std::vector<Step> steps;
  std::map<std::uint32_t, std::vector<Places>> places;  ///< by forward and position of its trace
};

/// Autograd runs nodes in reverse of the order in which forwards made them: backward passes ends of
/// units' forwards in reverse of Trace::exits, so an outer unit comes before what is inside it, and
/// beginnings in reverse of Trace::units; a checkpoint passes the ends of all that is inside it
/// first, in the order of forward. A unit is gathered where it is needed and not there yet, its
/// prefetch while another one computes; it is released after each of its backwards unless it is
/// wanted again, and reduced after the last one. A rank that does not come by at a place, since it
/// did not use a result, does the steps of that place when it comes to a later one: so a rank that
/// waits has done all steps before the one that it waits for, and of all that wait the first one's
/// step is done by all. `forwards`: newest first; `ahead`: how many of the next units are gathered
/// while one that names none computes.
BackwardPlan plan_backward(const std::vector<ReachedForward>& forwards,
                           std::vector<UnitState> units, std::size_t ahead = 1);

}  // namespace tessera::fsdp
