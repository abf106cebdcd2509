#include "fsdp/agreed/backward_plan.h"

#include <algorithm>
#include <set>

#include "tessera/error.h"

namespace tessera::fsdp {

std::vector<bool> to_bits(const BackwardView& view, const ViewFrame& frame) {
  TESSERA_INVARIANT(view.steps_done <= frame.steps, view.steps_done, " of ", frame.steps, " steps");
  std::vector<bool> bits(frame.steps, false);  // as many ones as steps: the most of any rank stay
  for (std::size_t i = 0; i < view.steps_done; ++i) bits[i] = true;
  for (const auto& [number, units] : frame.forwards) {
    const auto reached = view.reached.find(number);
    const bool goes_through = reached != view.reached.end();
    bits.push_back(view.alive.contains(number));
    bits.push_back(goes_through);
    for (std::size_t i = 0; i < units; ++i) {
      bits.push_back(goes_through && reached->second.at(i));
    }
  }
  return bits;
}

BackwardView from_bits(const std::vector<bool>& bits, const ViewFrame& frame) {
  BackwardView view;
  auto bit = bits.begin();
  for (std::size_t i = 0; i < frame.steps; ++i) view.steps_done += *bit++ ? 1U : 0U;
  for (const auto& [number, units] : frame.forwards) {
    if (*bit++) view.alive.insert(number);
    const bool goes_through = *bit++;
    const auto end = bit + static_cast<std::ptrdiff_t>(units);
    if (goes_through) view.reached.emplace(number, std::vector<bool>(bit, end));
    bit = end;
  }
  return view;
}

namespace {

/// Backward passes the end of a unit's forward (its backward begins) or its beginning.
struct Event {
  std::size_t forward;  ///< index into the forwards
  std::size_t position;
  bool begins;
};

/// One trace's events in the order of backward, which passes the end of a forward first. Forwards
/// that have not ended come first.
std::vector<Event> reversed(const Trace& trace, std::size_t forward) {
  const auto all = crossings(trace);
  std::vector<Event> events;
  for (auto one = all.rbegin(); one != all.rend(); ++one) {
    events.push_back({forward, one->position, !one->enters});
  }
  return events;
}

/// Of all forwards, with a checkpoint's events where the first of them would be.
std::vector<Event> events_of(const std::vector<ReachedForward>& forwards) {
  std::vector<Event> events;
  std::set<std::uint32_t> done;
  const auto add_checkpoint = [&](std::uint32_t number) {
    std::vector<Event> inside;
    for (std::size_t f = forwards.size(); f-- > 0;) {
      const auto& checkpoints = forwards[f].trace->checkpoints;
      for (std::size_t i = 0; i < checkpoints.size(); ++i) {
        if (checkpoints[i] == number) inside.push_back({f, i, true});
      }
    }
    events.insert(events.end(), inside.begin(), inside.end());
    for (auto one = inside.rbegin(); one != inside.rend(); ++one) {
      events.push_back({one->forward, one->position, false});
    }
  };
  for (std::size_t f = 0; f < forwards.size(); ++f) {
    for (const auto& event : reversed(*forwards[f].trace, f)) {
      const auto checkpoint = forwards[f].trace->checkpoints.at(event.position);
      if (checkpoint == 0) {
        events.push_back(event);
      } else if (done.insert(checkpoint).second) {
        add_checkpoint(checkpoint);
      }
    }
  }
  return events;
}

class Planner {
 public:
  Planner(const std::vector<ReachedForward>& forwards, std::vector<UnitState> units,
          std::size_t ahead)
      : forwards_(forwards), units_(std::move(units)), use_of_(units_.size()), ahead_(ahead) {
    for (const auto& forward : forwards) {
      plan_.places[forward.number].resize(forward.trace->units.size());
    }
  }

  BackwardPlan plan() {
    const auto events = events_of(forwards_);
    for (const auto& event : events) {
      if (event.begins && is_reached(event)) uses_.push_back({event});
    }
    find_last(events);
    for (std::size_t i = 0; i < events.size(); ++i) {
      if (events[i].begins) {
        begin(events[i]);
        places_of(events[i]).begins = i;
      } else {
        end(events[i], i);
        places_of(events[i]).ends = i;
      }
    }
    return std::move(plan_);
  }

 private:
  /// A place where a unit's parameters are needed.
  struct Use {
    Event event;
    bool secured = false;  ///< gathered for, or known to be there
  };
  struct UseOf {
    int active = 0;        ///< backwards that have begun
    int secured = 0;       ///< for uses that have not begun
    std::size_t last = 0;  ///< event after which no gradient of it can come
    bool any = false;
  };

  UnitId unit_of(const Event& event) const {
    return forwards_[event.forward].trace->units[event.position];
  }
  bool is_reached(const Event& event) const {
    return forwards_[event.forward].reached.at(event.position);
  }
  Places& places_of(const Event& event) {
    return plan_.places[forwards_[event.forward].number][event.position];
  }
  template <class Act>
  void for_lenders_and(UnitId unit, const Act& act) {
    for (const auto lender : units_.at(unit).lenders) act(lender);
    act(unit);
  }

  void find_last(const std::vector<Event>& events) {
    for (std::size_t i = 0; i < events.size(); ++i) {
      if (events[i].begins) continue;
      for_lenders_and(unit_of(events[i]), [&](UnitId unit) {
        use_of_.at(unit).last = i;
        use_of_[unit].any = true;
      });
    }
  }

  void secure(Use& use) {
    if (use.secured) return;
    use.secured = true;
    for_lenders_and(unit_of(use.event), [&](UnitId unit) {
      ++use_of_.at(unit).secured;
      if (!units_[unit].gathers || units_[unit].gathered) return;
      units_[unit].gathered = true;
      plan_.steps.push_back({Step::Kind::kGather, unit, forwards_[use.event.forward].number});
    });
  }

  void begin(const Event& event) {
    auto& places = places_of(event);
    if (is_reached(event)) {
      auto& use = uses_[next_use_++];
      secure(use);
      places.needed = plan_.steps.size();
      const auto unit = unit_of(event);
      for_lenders_and(unit, [&](UnitId one) {
        --use_of_[one].secured;
        ++use_of_[one].active;
      });
      prefetch(unit);
    } else {
      places.needed = plan_.steps.size();
    }
    places.ahead = plan_.steps.size();
  }

  void prefetch(UnitId unit) {
    const auto& wanted = units_[unit].prefetch;
    if (wanted.empty()) {
      const auto end = std::min(next_use_ + ahead_, uses_.size());
      for (auto use = next_use_; use < end; ++use) secure(uses_[use]);
    }
    for (const auto id : wanted) {
      const auto use =
          std::find_if(uses_.begin() + static_cast<std::ptrdiff_t>(next_use_), uses_.end(),
                       [&](const Use& one) { return !one.secured && unit_of(one.event) == id; });
      if (use != uses_.end()) secure(*use);
    }
  }

  void end(const Event& event, std::size_t index) {
    const auto unit = unit_of(event);
    if (is_reached(event)) {
      for_lenders_and(unit, [&](UnitId one) { --use_of_[one].active; });
      if (units_[unit].releases && use_of_[unit].active == 0 && use_of_[unit].secured == 0) {
        units_[unit].gathered = false;
        plan_.steps.push_back({Step::Kind::kRelease, unit, forwards_[event.forward].number});
      }
    }
    reduce_after(index, unit);
    for (const auto lender : units_[unit].lenders) reduce_after(index, lender);
    places_of(event).after = plan_.steps.size();
  }

  void reduce_after(std::size_t index, UnitId unit) {
    if (!units_[unit].reduces || !use_of_[unit].any || use_of_[unit].last != index) return;
    plan_.steps.push_back({Step::Kind::kReduce, unit, 0});
  }

  const std::vector<ReachedForward>& forwards_;
  std::vector<UnitState> units_;
  std::vector<UseOf> use_of_;  // by unit
  std::vector<Use> uses_;
  std::size_t next_use_ = 0;
  const std::size_t ahead_;
  BackwardPlan plan_;
};

}  // namespace

BackwardPlan plan_backward(const std::vector<ReachedForward>& forwards,
                           std::vector<UnitState> units, std::size_t ahead) {
  return Planner(forwards, std::move(units), ahead).plan();
}

}  // namespace tessera::fsdp
