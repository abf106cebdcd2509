#include "capture/plan_json.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/text/json_reader.h"
#include "base/text/printable.h"
#include "capture/plan_diff.h"
#include "capture/plan_words.h"
#include "fsdp/agreed/step_plan_check.h"
#include "tessera/error.h"
#include "tessera/step_scope.h"

namespace tessera::capture {
namespace {

using fsdp::PassPlan;
using fsdp::PlanAction;
using fsdp::PlanUnit;
using fsdp::StagePlan;
using fsdp::StageRecord;
using fsdp::StepPlan;
using fsdp::Trace;
using fsdp::UnitId;
using Json = nlohmann::ordered_json;

constexpr std::string_view kPlanFormat = "tessera-plan";
constexpr std::int64_t kPlanVersion = 1;

// Far beyond any model; what a plan of that size takes to check stays within seconds, and the bytes
// of all units within 62 bits.
constexpr std::int64_t kMostUnits = 1 << 13;
constexpr std::int64_t kMostPlaces = 1 << 13;  // of all traces
constexpr std::int64_t kMostUses = 1 << 17;    // of units and their lenders, at all places
constexpr std::int64_t kMostActions = 1 << 20;
constexpr std::int64_t kMostUnitBytes = std::int64_t{1} << 48;
constexpr std::size_t kMostNameBytes = 256;
constexpr int kMaxDepth = 16;

// ---------------------------------------------------------------------------------------- writing

Json json_of(const PlanUnit& unit) {
  return {{"name", unit.name},
          {"bytes", unit.bytes},
          {"gathers", unit.gathers},
          {"gathers_in_backward", unit.gathers_in_backward},
          {"gathered", unit.gathered},
          {"reduces", unit.reduces},
          {"lenders", unit.lenders},
          {"forward_prefetch", unit.forward_prefetch},
          {"backward_prefetch", unit.backward_prefetch},
          {"recompute_by", word_of(kRecomputeByWords, unit.recompute_by)}};
}

Json json_of(const fsdp::PlanChoices& choices) {
  Json keep = Json::array();
  for (const auto one : choices.keep) keep.push_back(word_of(kKeepWords, one));
  Json recompute = Json::array();
  for (const auto one : choices.recompute) recompute.push_back(word_of(kRecomputeWords, one));
  return {{"keep", std::move(keep)},
          {"recompute", std::move(recompute)},
          {"reduce", word_of(kReduceWords, choices.reduce)},
          {"ahead_in_forward", choices.ahead_in_forward},
          {"ahead_in_backward", choices.ahead_in_backward},
          {"offload", Json::array()}};
}

Json json_of(const StageRecord& record) {
  Json parts = Json::array();
  for (const auto& part : record.parts) {
    parts.push_back(
        {{"units", part.units}, {"exits", part.exits}, {"checkpoints", part.checkpoints}});
  }
  return {{"parts", std::move(parts)}, {"reached", record.reached}};
}

Json json_of(const std::vector<PlanAction>& list) {
  Json actions = Json::array();
  for (const auto& [kind, unit] : list) actions.push_back(Json::array({to_string(kind), unit}));
  return actions;
}

Json json_of(const PassPlan& pass) {
  Json places = Json::array();
  for (const auto& part : pass.places) {
    Json of = Json::array();
    for (const auto& place : part) {
      of.push_back(Json::array({place.needed, place.ahead, place.after}));
    }
    places.push_back(std::move(of));
  }
  return {{"actions", json_of(pass.actions)}, {"places", std::move(places)}};
}

Json json_of(const StagePlan& stage) {
  Json micro_batches = Json::object();
  for (const auto which : kClasses) {
    const auto& [forward, backward] = stage.of(which);
    micro_batches[std::string(to_string(which))] = {{"forward", json_of(forward)},
                                                    {"backward", json_of(backward)}};
  }
  return {{"micro_batches", std::move(micro_batches)}};
}

bool is_flat(const Json& value) {
  return std::ranges::none_of(value, [](const Json& item) { return item.is_structured(); });
}

/// A line for what holds no lists or objects, else a line an item.
void write(std::string& text, const Json& value, const std::string& indent) {
  const auto dumped = [](const Json& one) {
    return one.dump(-1, ' ', false, Json::error_handler_t::replace);
  };
  if (!value.is_structured() || is_flat(value)) {
    text += dumped(value);
    return;
  }
  const auto inner = indent + "  ";
  text += value.is_object() ? "{" : "[";
  bool first = true;
  for (const auto& [key, item] : value.items()) {
    text += (first ? "\n" : ",\n") + inner;
    first = false;
    if (value.is_object()) text += dumped(Json(key)) + ": ";
    write(text, item, inner);
  }
  text += concat("\n", indent, value.is_object() ? "}" : "]");
}

// ---------------------------------------------------------------------------------------- reading

template <class Words>
auto word_from(const JsonCursor& at, const Words& words) {
  const auto& text = at.text();
  for (const auto& one : words) {
    if (one.word == text) return one.value;
  }
  std::vector<std::string> expected;
  for (const auto& one : words) expected.push_back(concat("\"", one.word, "\""));
  at.refuse(concat("one of ", joined(expected)));
}

/// A unit lends to units inside it: who borrows of itself, by way of others or not, is in no model.
void require_no_circle(const std::vector<PlanUnit>& units, std::string_view where) {
  std::vector<std::vector<UnitId>> borrowers(units.size());
  std::vector<std::size_t> open(units.size());  // lenders that are not known to be in no circle
  std::vector<UnitId> free;
  for (UnitId id = 0; id < units.size(); ++id) {
    open[id] = units[id].lenders.size();
    if (open[id] == 0) free.push_back(id);
    for (const auto lender : units[id].lenders) borrowers[lender].push_back(id);
  }
  while (!free.empty()) {
    const auto lender = free.back();
    free.pop_back();
    for (const auto borrower : borrowers[lender]) {
      if (--open[borrower] == 0) free.push_back(borrower);
    }
  }
  const auto first = std::ranges::find_if(open, [](std::size_t count) { return count > 0; });
  if (first == open.end()) return;
  // Each of these has a lender among them: who comes again on the way is in a circle.
  const auto lender_of = [&](UnitId id) {
    return *std::ranges::find_if(units[id].lenders, [&](UnitId one) { return open[one] > 0; });
  };
  auto unit = static_cast<UnitId>(first - open.begin());
  std::vector<bool> passed(units.size());
  for (; !passed[unit]; unit = lender_of(unit)) passed[unit] = true;
  const auto lender = lender_of(unit);
  throw Error(
      ErrorKind::kFormat,
      concat(where, ": 'units': found unit ", units[unit].name, ", whose lender ",
             lender == unit ? "is itself" : concat(units[lender].name, " borrows of it in turn"),
             ", expected units that lend to others inside them; make the plan anew with "
             "tessera plan"));
}

/// Reads the parts of a plan, and counts what it reads.
class Reader {
 public:
  explicit Reader(std::string_view where) : where_(where) {}
  PlanFile read(const JsonCursor& root) {
    check_head(root);
    require_only(root, {"format", "version", "made_for", "memory_budget", "order", "units",
                        "choices", "record", "stages", "update"});
    PlanFile file;
    file.made_for = made_for(root.member("made_for"));
    const auto budget = root.member("memory_budget");
    if (!budget.value().is_null()) {
      file.memory_budget = budget.integer({0, std::numeric_limits<std::int64_t>::max()});
    }
    auto& plan = file.plan;
    plan.order = word_from(root.member("order"), kOrderWords);
    const auto units = list(root.member("units"), kMostUnits, "units");
    units_ = static_cast<std::int64_t>(units.value().size());
    plan.units = units.list([&](const JsonCursor& at) { return unit(at); });
    require_no_circle(plan.units, where_);
    for (const auto& one : plan.units) {
      lenders_.push_back(static_cast<std::int64_t>(one.lenders.size()));
    }
    plan.choices = choices(root.member("choices"));
    const auto record = root.member("record");
    record.require(record.value().is_array(), "a list of stages");
    plan.record.stages =
        list(record, StepScopeOptions::kMostStages, "stages").list([&](const JsonCursor& at) {
          return stage_record(at);
        });
    plan.stages = list(root.member("stages"), StepScopeOptions::kMostStages, "stages")
                      .list([&](const JsonCursor& at) { return stage(at); });
    require_no_offload(root.member("update"));
    return file;
  }

 private:
  static void check_head(const JsonCursor& root) {
    const auto format = root.member("format");
    format.require(format.value() == kPlanFormat, concat("\"", kPlanFormat, "\""));
    const auto version = root.member("version");
    version.require(version.value() == kPlanVersion,
                    concat("version ", kPlanVersion, ", which this program reads"));
  }

  /// What nobody reads is a slip of whoever wrote it.
  static void require_only(const JsonCursor& at, std::initializer_list<std::string_view> keys) {
    at.require(at.value().is_object(), "an object");
    for (const auto& [key, item] : at.value().items()) {
      if (std::ranges::find(keys, key) != keys.end()) continue;
      std::vector<std::string> expected;
      for (const auto one : keys) expected.push_back(concat("\"", one, "\""));
      throw Error(ErrorKind::kFormat, concat(at.where(), ": found ", printable(key),
                                             ", expected none but ", joined(expected)));
    }
  }
  static JsonCursor list(const JsonCursor& at, std::int64_t most, std::string_view of) {
    at.require(at.value().is_array() && std::cmp_less_equal(at.value().size(), most),
               concat("a list of at most ", most, " ", of));
    return at;
  }
  static void count(const JsonCursor& at, std::int64_t& counted, std::int64_t more,
                    std::int64_t most, std::string_view of) {
    counted += more;
    at.require(counted <= most, concat("at most ", most, " ", of, " in all of a plan"));
  }

  static MadeFor made_for(const JsonCursor& at) {
    constexpr IntRange kCount{1, std::int64_t{1} << 31};
    MadeFor found;
    require_only(at, {"model", "world", "torch", "micro_batches", "tokens"});
    found.model = name(at.member("model"));
    found.world = at.member("world").integer(kCount);
    found.torch = name(at.member("torch"));
    found.micro_batches = at.member("micro_batches").integer(kCount);
    found.tokens = at.member("tokens").integer({0, std::int64_t{1} << 46});
    return found;
  }

  /// Goes into messages and tables.
  static std::string name(const JsonCursor& at) {
    const auto& text = at.text();
    const bool shows = std::ranges::all_of(
        text, [](char c) { return static_cast<unsigned char>(c) >= 0x20 && c != '\x7f'; });
    at.require(text.size() <= kMostNameBytes && shows,
               concat("at most ", kMostNameBytes, " printable bytes"));
    return text;
  }

  UnitId unit_id(const JsonCursor& at) const {
    at.require(units_ > 0, "no unit, as the plan has none");
    return static_cast<UnitId>(at.integer({0, units_ - 1}));
  }
  std::vector<UnitId> unit_ids(const JsonCursor& at) const {
    return list(at, kMostActions, "units").list([&](const JsonCursor& one) {
      return unit_id(one);
    });
  }
  /// Plans of before could have optimizer state outside of memory. The members stay, so that they
  /// and those of now are one version.
  static void require_no_offload(const JsonCursor& at) {
    at.require(at.value().is_array() && at.value().empty(),
               "an empty list, since optimizer state is in memory; make the plan anew with tessera "
               "plan");
  }
  static std::size_t size(const JsonCursor& at, std::int64_t most) {
    return static_cast<std::size_t>(at.integer({0, most}));
  }

  PlanUnit unit(const JsonCursor& at) const {
    PlanUnit unit;
    require_only(at, {"name", "bytes", "gathers", "gathers_in_backward", "gathered", "reduces",
                      "lenders", "forward_prefetch", "backward_prefetch", "recompute_by"});
    unit.name = name(at.member("name"));
    unit.bytes = at.member("bytes").integer({0, kMostUnitBytes});
    unit.gathers = at.member("gathers").boolean();
    unit.gathers_in_backward = at.member("gathers_in_backward").boolean();
    unit.gathered = at.member("gathered").boolean();
    unit.reduces = at.member("reduces").boolean();
    unit.lenders = unit_ids(at.member("lenders"));
    unit.forward_prefetch = unit_ids(at.member("forward_prefetch"));
    unit.backward_prefetch = unit_ids(at.member("backward_prefetch"));
    unit.recompute_by = word_from(at.member("recompute_by"), kRecomputeByWords);
    return unit;
  }

  fsdp::PlanChoices choices(const JsonCursor& at) const {
    fsdp::PlanChoices choices;
    require_only(
        at, {"keep", "recompute", "reduce", "ahead_in_forward", "ahead_in_backward", "offload"});
    const auto keep = list(at.member("keep"), kMostUnits, "choices");
    choices.keep = keep.list([](const JsonCursor& one) { return word_from(one, kKeepWords); });
    const auto recompute = list(at.member("recompute"), kMostUnits, "choices");
    choices.recompute =
        recompute.list([](const JsonCursor& one) { return word_from(one, kRecomputeWords); });
    choices.reduce = word_from(at.member("reduce"), kReduceWords);
    choices.ahead_in_forward = size(at.member("ahead_in_forward"), kMostUnits);
    choices.ahead_in_backward = size(at.member("ahead_in_backward"), kMostUnits);
    require_no_offload(at.member("offload"));
    return choices;
  }

  Trace trace(const JsonCursor& at) {
    Trace trace;
    require_only(at, {"units", "exits", "checkpoints"});
    const auto units = at.member("units");
    trace.units = unit_ids(units);
    const auto places = static_cast<std::int64_t>(trace.units.size());
    count(units, places_, places, kMostPlaces, "places");
    for (const auto id : trace.units)
      count(units, uses_, 1 + lenders_[id], kMostUses, "uses of units");
    trace.exits = list(at.member("exits"), places, "places").list([&](const JsonCursor& one) {
      return size(one, places);
    });
    trace.checkpoints =
        list(at.member("checkpoints"), places, "places").list([&](const JsonCursor& one) {
          return static_cast<std::uint32_t>(one.integer({0, kMostPlaces}));
        });
    return trace;
  }

  StageRecord stage_record(const JsonCursor& at) {
    StageRecord stage;
    require_only(at, {"parts", "reached"});
    stage.parts =
        list(at.member("parts"), kMostPlaces, "forwards").list([&](const JsonCursor& one) {
          return trace(one);
        });
    stage.reached =
        list(at.member("reached"), kMostPlaces, "forwards").list([](const JsonCursor& part) {
          return list(part, kMostPlaces, "places").list([](const JsonCursor& one) {
            return one.boolean();
          });
        });
    return stage;
  }

  PlanAction action(const JsonCursor& at) const {
    at.require(at.value().is_array() && at.value().size() == 2, "[action, unit]");
    const auto& word = at.at(0).text();
    const auto kind = std::ranges::find(
        kActionKinds, word, [](PlanAction::Kind one) { return std::string(to_string(one)); });
    if (kind == kActionKinds.end()) {
      std::vector<std::string> expected;
      for (const auto one : kActionKinds) expected.push_back(concat("\"", to_string(one), "\""));
      at.at(0).refuse(concat("one of ", joined(expected)));
    }
    return {*kind, unit_id(at.at(1))};
  }

  std::vector<PlanAction> actions(const JsonCursor& at) {
    const auto found = list(at, kMostActions, "actions");
    count(found, actions_, static_cast<std::int64_t>(found.value().size()), kMostActions,
          "actions");
    return found.list([&](const JsonCursor& one) { return action(one); });
  }

  PassPlan pass(const JsonCursor& at) {
    PassPlan pass;
    require_only(at, {"actions", "places"});
    pass.actions = actions(at.member("actions"));
    pass.places =
        list(at.member("places"), kMostPlaces, "forwards").list([](const JsonCursor& part) {
          return list(part, kMostPlaces, "places").list([](const JsonCursor& one) {
            one.require(one.value().is_array() && one.value().size() == 3,
                        "[needed, ahead, after]");
            return fsdp::PlanPlace{size(one.at(0), kMostActions), size(one.at(1), kMostActions),
                                   size(one.at(2), kMostActions)};
          });
        });
    return pass;
  }

  StagePlan stage(const JsonCursor& at) {
    StagePlan stage;
    require_only(at, {"micro_batches"});
    const auto micro_batches = at.member("micro_batches");
    require_only(micro_batches, {"only", "first", "middle", "last"});
    for (const auto which : kClasses) {
      const std::string name(to_string(which));
      const auto one = micro_batches.member(name.c_str());
      require_only(one, {"forward", "backward"});
      stage.micro_batches.at(static_cast<std::size_t>(which)) = {pass(one.member("forward")),
                                                                 pass(one.member("backward"))};
    }
    return stage;
  }

  std::string_view where_;
  std::int64_t units_ = 0;
  std::vector<std::int64_t> lenders_;  // by unit
  std::int64_t places_ = 0, uses_ = 0, actions_ = 0;
};

}  // namespace

std::string to_json(const PlanFile& file) {
  const auto& [made_for, budget, plan] = file;
  Json stages = Json::array();
  for (const auto& stage : plan.stages) stages.push_back(json_of(stage));
  Json record = Json::array();
  for (const auto& stage : plan.record.stages) record.push_back(json_of(stage));
  Json units = Json::array();
  for (const auto& unit : plan.units) units.push_back(json_of(unit));
  const Json whole = {{"format", kPlanFormat},
                      {"version", kPlanVersion},
                      {"made_for",
                       {{"model", made_for.model},
                        {"world", made_for.world},
                        {"torch", made_for.torch},
                        {"micro_batches", made_for.micro_batches},
                        {"tokens", made_for.tokens}}},
                      {"memory_budget", budget ? Json(*budget) : Json()},
                      {"order", word_of(kOrderWords, plan.order)},
                      {"units", std::move(units)},
                      {"choices", json_of(plan.choices)},
                      {"record", std::move(record)},
                      {"stages", std::move(stages)},
                      {"update", Json::array()}};
  std::string text;
  write(text, whole, "");
  return text + "\n";
}

PlanFile parse_plan(std::string_view text, std::string_view where) {
  TESSERA_CHECK(std::cmp_less_equal(text.size(), kMostPlanBytes), ErrorKind::kFormat, where,
                ": found ", text.size(), " bytes, expected a plan, of at most ", kMostPlanBytes);
  const auto value = parse_json_object(text, where, kMaxDepth);
  return Reader(where).read({value, where, JsonStyle::kData});
}

void require_made_for(const PlanFile& file, const MadeFor& run, std::string_view where) {
  const auto require = [&](std::string_view what, const auto& found, const auto& expected) {
    TESSERA_CHECK(found == expected, ErrorKind::kConfig, where, ": found a plan for ", what, " ",
                  found, ", expected ", expected,
                  ", as this run has; make it anew with tessera plan");
  };
  const auto& of = file.made_for;
  require("a world of", of.world, run.world);
  require("torch", of.torch, run.torch);
  require("the model whose bucket plan has the hash", of.model, run.model);
  require("micro-batches a step:", of.micro_batches, run.micro_batches);
  if (of.tokens != 0 && run.tokens != 0) {
    require("tokens of a micro-batch on a rank:", of.tokens, run.tokens);
  }
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
                " differences, the run's first); make it anew with tessera plan");
}

void require_sound(const StepPlan& plan, std::optional<std::int64_t> budget,
                   std::string_view where) {
  const auto faults = fsdp::faults_of(plan, budget);
  TESSERA_CHECK(faults.empty(), ErrorKind::kConfig, where, ": found a plan with ", faults.size(),
                " faults, expected none; the first: ", faults.front(),
                "; tessera plan --check names all of them");
}

}  // namespace tessera::capture
