#include "capture/plan_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/text/json_fields.h"
#include "base/text/json_reader.h"
#include "base/text/printable.h"
#include "capture/plan_diff.h"
#include "fsdp/agreed/step_plan_check.h"
#include "tessera/error.h"

namespace tessera::capture {
namespace {

using fsdp::PlanAction;
using fsdp::PlanChoices;
using fsdp::PlanUnit;
using fsdp::StepPlan;
using fsdp::StepRecord;
using fsdp::UnitId;

constexpr std::string_view kPlanFormat = "tessera-plan";
constexpr std::int64_t kPlanVersion = 1;
constexpr std::int64_t kMostUses =
    1 << 17;  // of units and of owners of shared parameters, at all places
constexpr int kMaxDepth = 16;

/// A unit shares parameters with units inside it, so no model has a circle of owners.
void require_no_circle(const std::vector<PlanUnit>& units, std::string_view where) {
  std::vector<std::vector<UnitId>> users(units.size());
  std::vector<std::size_t> open(units.size());  // owners that may be in a circle
  std::vector<UnitId> free;
  for (UnitId id = 0; id < units.size(); ++id) {
    open[id] = units[id].owners.size();
    if (open[id] == 0) free.push_back(id);
    for (const auto owner : units[id].owners) users[owner].push_back(id);
  }
  while (!free.empty()) {
    const auto owner = free.back();
    free.pop_back();
    for (const auto user : users[owner]) {
      if (--open[user] == 0) free.push_back(user);
    }
  }
  const auto first = std::ranges::find_if(open, [](std::size_t count) { return count > 0; });
  if (first == open.end()) return;
  // Each of these has such an owner: a unit that comes again on the way is in a circle.
  const auto owner_of = [&](UnitId id) {
    return *std::ranges::find_if(units[id].owners, [&](UnitId one) { return open[one] > 0; });
  };
  auto unit = static_cast<UnitId>(first - open.begin());
  std::vector<bool> passed(units.size());
  for (; !passed[unit]; unit = owner_of(unit)) passed[unit] = true;
  const auto owner = owner_of(unit);
  throw Error(
      ErrorKind::kFormat,
      concat(
          where, ": 'units': found unit ", units[unit].name, ", whose owner ",
          owner == unit ? "is itself" : concat(units[owner].name, " uses its parameters in turn"),
          ", expected 'lenders' around the units that share their parameters; make the plan again "
          "with tessera plan"));
}

/// Earlier plans could keep optimizer state outside of memory. The keys stay, so that old and new
/// files have one version.
constexpr auto kOffload = "offload";
constexpr auto kUpdate = "update";
void require_no_offload(const JsonCursor& at) {
  at.require(at.value().is_array() && at.value().empty(),
             "an empty list, since optimizer state is in memory; make the plan again with tessera "
             "plan");
}

/// Reads and writes what a field alone does not define: units by their numbers, and totals.
class PlanRules {
 public:
  explicit PlanRules(std::string_view where) : where_(where) {}

  /// A complete record is written as its stages.
  template <class Write>
  auto json(const Write& write, const StepRecord& record, AnyValue) const {
    return write(record.stages);
  }
  template <class Read>
  void read(Read& reader, StepRecord& record, const JsonCursor& at, AnyValue) {
    at.require(at.value().is_array(), "a list of stages");
    reader(record.stages, at, fsdp::kStages);
  }

  template <class Write>
  auto json(const Write& write, const PlanChoices& choices, AnyValue) const {
    auto json = nlohmann::ordered_json::object();
    write.add(json, choices);
    json[kOffload] = nlohmann::ordered_json::array();
    return json;
  }
  template <class Read>
  void read(Read& reader, PlanChoices& choices, const JsonCursor& at, AnyValue) {
    reader.object(choices, at, {kOffload});
    require_no_offload(at.member(kOffload));
  }

  template <class Read>
  void read(Read& reader, std::vector<PlanUnit>& units, const JsonCursor& at,
            fsdp::AllUnits range) {
    units_ = static_cast<std::int64_t>(at.value().size());
    reader.list(units, at, range);
    require_no_circle(units, where_);
    for (const auto& one : units) owners_.push_back(std::ssize(one.owners));
  }
  template <class Read>
  void read(Read&, UnitId& unit, const JsonCursor& at, fsdp::UnitNumber) {
    at.require(units_ > 0, "no unit, as the plan has none");
    unit = static_cast<UnitId>(at.integer({0, units_ - 1}));
  }
  template <class Read>
  void read(Read& reader, std::vector<UnitId>& units, const JsonCursor& at, fsdp::UnitNumbers) {
    reader.list(units, at, List{fsdp::kMostPlanActions, "units", fsdp::UnitNumber{}});
  }

  template <class Read>
  void read(Read& reader, std::vector<UnitId>& units, const JsonCursor& at, fsdp::EnteredUnits) {
    read(reader, units, at, fsdp::UnitNumbers{});
    trace_ = std::ssize(units);
    count(at, places_, trace_, fsdp::kMostPlaces, "places");
    for (const auto id : units) count(at, uses_, 1 + owners_[id], kMostUses, "uses of units");
  }
  template <class Read>
  void read(Read& reader, std::vector<std::size_t>& places, const JsonCursor& at,
            fsdp::PlaceNumbers) {
    reader.list(places, at, List{trace_, "places", IntRange{0, trace_}});
  }
  template <class Read>
  void read(Read& reader, std::vector<std::uint32_t>& numbers, const JsonCursor& at,
            fsdp::ByPlace range) {
    reader.list(numbers, at, List{trace_, "places", IntRange(range)});
  }

  template <class Read>
  void read(Read& reader, std::vector<PlanAction>& actions, const JsonCursor& at,
            fsdp::Actions range) {
    if (at.value().is_array() && std::cmp_less_equal(at.value().size(), range.most)) {
      count(at, actions_, std::ssize(at.value()), range.most, range.of);
    }
    reader.list(actions, at, range);
  }

 private:
  static void count(const JsonCursor& at, std::int64_t& counted, std::int64_t more,
                    std::int64_t most, std::string_view of) {
    counted += more;
    at.require(counted <= most, concat("at most ", most, " ", of, " in all of a plan"));
  }

  std::string_view where_;
  std::int64_t units_ = 0;
  std::vector<std::int64_t> owners_;  // by unit
  std::int64_t trace_ = 0;            // places of the trace that is being read
  std::int64_t places_ = 0, uses_ = 0, actions_ = 0;
};

}  // namespace

std::string to_json(const PlanFile& file) {
  nlohmann::ordered_json whole = {{"format", kPlanFormat}, {"version", kPlanVersion}};
  JsonWriter(PlanRules("")).add(whole, file);
  whole[kUpdate] = nlohmann::ordered_json::array();
  return json_lines(whole) + "\n";
}

PlanFile parse_plan(std::string_view text, std::string_view where) {
  TESSERA_CHECK(std::cmp_less_equal(text.size(), kMostPlanBytes), ErrorKind::kFormat, where,
                ": found ", text.size(), " bytes, expected a plan, of at most ", kMostPlanBytes);
  const auto value = parse_json_object(text, where, kMaxDepth);
  const JsonCursor root(value, where, JsonStyle::kData);
  const auto format = root.member("format");
  format.require(format.value() == kPlanFormat, concat("\"", kPlanFormat, "\""));
  const auto version = root.member("version");
  version.require(version.value() == kPlanVersion,
                  concat("version ", kPlanVersion, ", which this program reads"));
  PlanFile file;
  PlanRules rules(where);
  JsonFieldsReader(rules, OtherKeys::kRefused).object(file, root, {"format", "version", kUpdate});
  require_no_offload(root.member(kUpdate));
  return file;
}

void require_made_for(const PlanFile& file, const MadeFor& run, std::string_view where) {
  const auto require = [&](std::string_view what, const auto& found, const auto& expected) {
    TESSERA_CHECK(found == expected, ErrorKind::kConfig, where, ": found a plan for ", what, " ",
                  found, ", expected ", expected,
                  ", as this run has; make it again with tessera plan");
  };
  const auto& of = file.made_for;
  require("a world of", of.world, run.world);
  require("torch", of.torch, run.torch);
  require("the model whose bucket plan has the hash", of.model, run.model);
  require("micro-batches a step:", of.micro_batches, run.micro_batches);
  if (of.tokens != 0 && run.tokens != 0) {
    require("tokens of a micro-batch on a rank:", of.tokens, run.tokens);
  }
  const auto context = [](const MadeFor& made_for) {
    return made_for.context.empty() ? std::string("none") : made_for.context;
  };
  require("context parallelism:", context(of), context(run));
}

void require_plan_of(const StepPlan& plan, const fsdp::StepRecord& record,
                     const std::vector<PlanUnit>& units, std::string_view where) {
  StepPlan run;
  run.units = units;
  run.record = record;
  StepPlan found;
  found.units = plan.units;
  found.record = plan.record;
  const auto different = diff(run, found);
  TESSERA_CHECK(different.empty(), ErrorKind::kConfig, where,
                ": found a plan of another step: ", different.front(), " (", different.size(),
                " differences, the run's first); make it again with tessera plan");
}

void require_sound(const StepPlan& plan, std::optional<std::int64_t> budget,
                   std::string_view where) {
  const auto faults = fsdp::faults_of(plan, budget);
  TESSERA_CHECK(faults.empty(), ErrorKind::kConfig, where, ": found a plan with ", faults.size(),
                " faults, expected none; the first: ", faults.front(),
                "; tessera plan --check names all of them");
}

}  // namespace tessera::capture
