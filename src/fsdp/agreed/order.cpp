#include "fsdp/agreed/order.h"

#include <algorithm>

#include "base/fields_hash.h"
#include "tessera/error.h"

namespace tessera::fsdp {

std::uint64_t Trace::hash() const {
  return std::max<std::uint64_t>(hash_of(*this), 1);  // 0 can stand for "no trace"
}

std::vector<TraceEvent> trace_events(const Trace& trace) {
  const auto count = trace.units.size();
  std::vector<std::size_t> exit(count, count);
  for (std::size_t i = 0; i < trace.exits.size(); ++i) exit.at(trace.exits[i]) = i;
  std::vector<TraceEvent> all;
  std::vector<std::size_t> open;
  const auto close_until = [&](std::size_t last) {
    while (!open.empty() && exit[open.back()] < last) {
      all.push_back({open.back(), false});
      open.pop_back();
    }
  };
  for (std::size_t i = 0; i < count; ++i) {
    close_until(exit[i]);
    all.push_back({i, true});
    open.push_back(i);
  }
  close_until(count);
  for (auto i = open.rbegin(); i != open.rend(); ++i) all.push_back({*i, false});
  return all;
}

std::string first_difference(const std::vector<std::string>& names_of_first, int rank,
                             const std::vector<std::string>& names) {
  const auto entry = [](const std::vector<std::string>& list, std::size_t i) {
    return i < list.size() ? list[i] : std::string("nothing more");
  };
  for (std::size_t i = 0; i < std::max(names_of_first.size(), names.size()); ++i) {
    if (entry(names, i) == entry(names_of_first, i)) continue;
    return concat("entry ", i + 1, ": rank 0 entered ", entry(names_of_first, i), ", rank ", rank,
                  " entered ", entry(names, i));
  }
  return "";
}

std::vector<bool> to_bits(const BackwardView& view, const ViewFrame& frame) {
  TESSERA_INVARIANT(view.actions_done <= frame.actions, view.actions_done, " of ", frame.actions,
                    " actions");
  // Sets one bit for each action done, so that "any rank" keeps the highest number.
  std::vector<bool> bits(frame.actions, false);
  for (std::size_t i = 0; i < view.actions_done; ++i) bits[i] = true;
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
  for (std::size_t i = 0; i < frame.actions; ++i) view.actions_done += *bit++ ? 1U : 0U;
  for (const auto& [number, units] : frame.forwards) {
    if (*bit++) view.alive.insert(number);
    const bool goes_through = *bit++;
    const auto end = bit + static_cast<std::ptrdiff_t>(units);
    if (goes_through) view.reached.emplace(number, std::vector<bool>(bit, end));
    bit = end;
  }
  return view;
}

bool StepRecord::is_complete() const {
  return !varies &&
         std::ranges::none_of(stages, [](const StageRecord& stage) { return stage.parts.empty(); });
}

std::uint64_t StepRecord::hash() const { return hash_of(*this); }

Trace counted_after(Trace trace, std::uint32_t before) {
  for (auto& checkpoint : trace.checkpoints) {
    if (checkpoint == 0) continue;
    TESSERA_INVARIANT(checkpoint > before, "checkpoint ", checkpoint, " came after ", before);
    checkpoint -= before;
  }
  return trace;
}

std::vector<UnitId> first_entries(const std::vector<Trace>& parts,
                                  const std::vector<std::vector<UnitId>>& owners) {
  std::vector<UnitId> units;
  const auto add = [&](UnitId unit) {
    if (std::ranges::find(units, unit) == units.end()) units.push_back(unit);
  };
  for (const auto& part : parts) {
    for (const auto unit : part.units) {
      for (const auto owner : owners.at(unit)) add(owner);
      add(unit);
    }
  }
  return units;
}

void add_reach(std::vector<Reach>& known, const std::vector<Reach>& reached) {
  if (known.empty()) {
    known = reached;
    return;
  }
  TESSERA_INVARIANT(known.size() == reached.size(), "a backward through other forwards");
  for (std::size_t part = 0; part < known.size(); ++part) {
    for (std::size_t i = 0; i < known[part].size(); ++i) {
      known[part][i] = known[part][i] || reached[part].at(i);
    }
  }
}

}  // namespace tessera::fsdp
