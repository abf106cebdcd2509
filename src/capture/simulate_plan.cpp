#include "capture/simulate_plan.h"

#include <algorithm>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::capture {
namespace {

using fsdp::MicroBatchClass;
using fsdp::PassedPlace;
using fsdp::PassPlan;
using fsdp::PlanAction;
using fsdp::StepPlan;
using fsdp::UnitId;
using Kind = PlanAction::Kind;

/// Both lanes, and the memory that is gathered.
class Lanes {
 public:
  Lanes(const StepPlan& plan, const PlanProfile& profile)
      : plan_(plan),
        profile_(profile),
        forward_places_(forward_places(plan.record.stages.front())),
        backward_places_(backward_places(plan.record.stages.front())),
        arrives_(plan.units.size(), 0.0) {
    for (const auto& unit : plan.units) bytes_ += unit.gathered ? unit.bytes : 0;
    most_ = step_.peak_bytes = bytes_;
  }

  void run(MicroBatchClass which, std::int64_t micro_batch) {
    const auto& [forward, backward] = plan_.stages.front().of(which);
    point_.micro_batch = micro_batch;
    point_.is_forward = true;
    run(forward, forward_places_);
    point_.is_forward = false;
    run(backward, backward_places_);
  }

  /// Adds what the last micro-batch took beyond `before`, for `times` more of them.
  void repeat(const SimulatedStep& before, double began, std::int64_t times) {
    const auto count = static_cast<double>(times);
    const double took = count * (computes_ - began);
    step_.compute_ms += count * (step_.compute_ms - before.compute_ms);
    step_.again_ms += count * (step_.again_ms - before.again_ms);
    step_.waited_ms += count * (step_.waited_ms - before.waited_ms);
    step_.reduced_ms += count * (step_.reduced_ms - before.reduced_ms);
    step_.gathers += times * (step_.gathers - before.gathers);
    step_.reductions += times * (step_.reductions - before.reductions);
    computes_ += took;
    gathers_ += took;
  }

  const SimulatedStep& so_far() const { return step_; }
  double computes() const { return computes_; }

  SimulatedStep end() {
    step_.rest_ms = profile_.rest_ms;
    step_.step_ms = std::max(computes_, gathers_) + step_.rest_ms;
    return std::move(step_);
  }

 private:
  void run(const PassPlan& pass, const std::vector<PassedPlace>& places) {
    std::size_t done = 0;
    const auto advance = [&](std::size_t count) {
      while (done < count) act(pass.actions[done++]);
    };
    for (const auto& place : places) {
      const auto unit = record().parts[place.part].units[place.position];
      const auto& counts = pass.places[place.part][place.position];
      point_.unit = unit;
      point_.begins = place.begins;
      if (place.begins) {
        advance(counts.needed);
        advance(counts.ahead);
      }
      // The own part of a unit around others mostly follows them, as a root's loss does.
      if (place.begins != point_.is_forward && is_used(place)) compute(unit);
      if (!place.begins) advance(counts.after);
      note();
    }
    advance(pass.actions.size());
    note();
  }

  const fsdp::StageRecord& record() const { return plan_.record.stages.front(); }

  bool is_used(const PassedPlace& place) const {
    if (point_.is_forward) return true;
    return !record().reached.empty() && record().reached[place.part][place.position];
  }

  void compute(UnitId unit) {
    const auto& cost = profile_.units[unit];
    const double ms = point_.is_forward ? cost.forward_ms : cost.backward_ms;
    computes_ += ms;
    step_.compute_ms += ms;
  }

  void reduce(double ms) {
    computes_ += ms;
    step_.reduced_ms += ms;
    ++step_.reductions;
  }

  void act(const PlanAction& action) {
    const auto unit = action.unit;
    switch (action.kind) {
      case Kind::kGather:
      case Kind::kGatherShared:
        // Is issued when the computing lane is here and the gather before it has ended.
        gathers_ = std::max(gathers_, computes_) + profile_.gather_ms(plan_.units, unit);
        arrives_[unit] = gathers_;
        ++step_.gathers;
        take(plan_.units[unit].bytes);
        return;
      case Kind::kWait:
        step_.waited_ms += std::max(0.0, arrives_[unit] - computes_);
        computes_ = std::max(computes_, arrives_[unit]);
        return;
      case Kind::kRelease:
        take(-plan_.units[unit].bytes);
        return;
      case Kind::kReduce:
        reduce(profile_.reduce_ms(plan_.units, unit));
        return;
      case Kind::kRecompute: {
        const double ms = recompute_ms(profile_.units[unit], plan_.choices.recompute[unit]);
        computes_ += ms;
        step_.compute_ms += ms;
        step_.again_ms += ms;
        return;
      }
      case Kind::kKeepToBackward:
      case Kind::kKeepToUpdate:
        return;
    }
  }

  void take(std::int64_t bytes) {
    bytes_ += bytes;
    most_ = std::max(most_, bytes_);
    step_.peak_bytes = std::max(step_.peak_bytes, bytes_);
  }

  void note() {
    point_.bytes = most_;
    step_.curve.push_back(point_);
    most_ = bytes_;
  }

  const StepPlan& plan_;
  const PlanProfile& profile_;
  const std::vector<PassedPlace> forward_places_, backward_places_;
  std::vector<double> arrives_;  // by unit
  double computes_ = 0.0, gathers_ = 0.0;
  std::int64_t bytes_ = 0;
  std::int64_t most_ = 0;  // since the last point
  MemoryPoint point_;
  SimulatedStep step_;
};

}  // namespace

std::vector<UnitCounts> counts_of(const StepPlan& plan, std::int64_t micro_batches) {
  std::vector<UnitCounts> counts(plan.units.size());
  const auto add = [&](MicroBatchClass which, std::int64_t times) {
    for (const auto& stage : plan.stages) {
      for (const auto* pass : {&stage.of(which).forward, &stage.of(which).backward}) {
        for (const auto& [kind, unit] : pass->actions) {
          if (kind == Kind::kGather || kind == Kind::kGatherShared) counts[unit].gathers += times;
          if (kind == Kind::kReduce) counts[unit].reductions += times;
        }
      }
    }
  };
  if (micro_batches == 1) {
    add(MicroBatchClass::kOnly, 1);
  } else {
    add(MicroBatchClass::kFirst, 1);
    add(MicroBatchClass::kMiddle, micro_batches - 2);
    add(MicroBatchClass::kLast, 1);
  }
  return counts;
}

SimulatedStep simulate(const StepPlan& plan, const PlanProfile& profile,
                       std::int64_t micro_batches) {
  TESSERA_CHECK(plan.stages.size() == 1, ErrorKind::kUsage, "plan of a step: found ",
                plan.stages.size(),
                " stages, expected one: the order of several is a pipeline's schedule");
  TESSERA_INVARIANT(profile.units.size() == plan.units.size() && micro_batches >= 1,
                    "a profile of other units, or a step of nothing");
  Lanes lanes(plan, profile);
  if (micro_batches == 1) {
    lanes.run(MicroBatchClass::kOnly, 0);
    return lanes.end();
  }
  lanes.run(MicroBatchClass::kFirst, 0);
  const auto middle = micro_batches - 2;
  const auto shown = std::min(middle, kMostSimulated - 2);
  for (std::int64_t i = 0; i < shown; ++i) {
    const SimulatedStep before = lanes.so_far();
    const double began = lanes.computes();
    lanes.run(MicroBatchClass::kMiddle, 1 + i);
    if (i + 1 == shown) lanes.repeat(before, began, middle - shown);
  }
  lanes.run(MicroBatchClass::kLast, micro_batches - 1);
  return lanes.end();
}

PlanProfile as_waited(PlanProfile profile, const StepPlan& plan, std::int64_t micro_batches) {
  if (!profile.gathers_waited_ms) return profile;
  const auto with = [&profile](double factor) {
    auto scaled = profile;
    for (auto& unit : scaled.units) {
      if (unit.gather_ms) *unit.gather_ms *= factor;
    }
    scaled.collective.latency_ms *= factor;
    scaled.collective.ms_per_byte = std::min(scaled.collective.ms_per_byte * factor, 1.0);
    return scaled;
  };
  const auto waits_less = [&](double factor) {
    return simulate(plan, with(factor), micro_batches).waited_ms <= *profile.gathers_waited_ms;
  };
  // Longer gathers are never waited for less.
  constexpr double kMost = 64.0;
  constexpr int kHalvings = 40;
  if (waits_less(kMost)) return profile;  // no factor explains the waits
  double less = 0.0, more = kMost;
  for (int i = 0; i < kHalvings; ++i) {
    const double middle = (less + more) / 2.0;
    (waits_less(middle) ? less : more) = middle;
  }
  return with(less);
}

std::string picture(const SimulatedStep& step, std::size_t columns, std::size_t rows) {
  // The most of as many neighbours as make a column; micro-batches are divided by a column of their
  // own.
  const auto per_column = (step.curve.size() + columns - 1) / std::max<std::size_t>(columns, 1);
  std::vector<std::int64_t> heights;  // -1 between micro-batches
  std::size_t in_column = 0;
  for (std::size_t i = 0; i < step.curve.size(); ++i) {
    const auto& point = step.curve[i];
    const bool begins = i > 0 && step.curve[i - 1].micro_batch != point.micro_batch;
    if (begins) heights.push_back(-1);
    if (begins || i == 0 || in_column == per_column) {
      heights.push_back(0);
      in_column = 0;
    }
    heights.back() = std::max(heights.back(), point.bytes);
    ++in_column;
  }
  std::string text;
  for (std::size_t row = rows; row > 0; --row) {
    // A column reaches a row from its middle on; a value above 0 shows.
    const double level = (static_cast<double>(row) - 0.5) / static_cast<double>(rows) *
                         static_cast<double>(step.peak_bytes);
    std::string line;
    for (const auto height : heights) {
      const bool reaches = static_cast<double>(height) >= level || (row == 1 && height > 0);
      line += height < 0 ? '|' : reaches ? '#' : ' ';
    }
    const auto label = row == rows ? size_text(step.peak_bytes)
                       : row == 1  ? std::string("0 B")
                                   : "";
    text +=
        concat(std::string(label.size() < 10 ? 10 - label.size() : 0, ' '), label, " ", line, "\n");
  }
  return text;
}

}  // namespace tessera::capture
