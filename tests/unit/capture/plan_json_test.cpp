// Plans as files: what is written is read, and what is no plan is refused with its place.
#include "capture/plan_json.h"

#include <nlohmann/json.hpp>

#include "capture/plan_diff.h"
#include "fsdp/agreed/step_plan_check.h"
#include "support/temporary_folder.h"
#include "unit/fsdp/drawn_plan.h"
#include "unit/fsdp/flat_trace.h"

namespace tessera::capture::plan_json_test {
namespace {

using fsdp::Draw;
using fsdp::flat;
using fsdp::Keep;
using fsdp::PlanOrder;
using fsdp::record_of;
using fsdp::ReduceAt;
using fsdp::StepPlan;
using fsdp::units_of;
using nlohmann::json;

PlanFile drawn(unsigned seed) {
  PlanFile file;
  file.made_for = {"123", 2, "2.13.0", 4, 512};
  if (seed % 2 == 0) file.memory_budget = 1000 + seed;
  file.plan = Draw(seed).plan();
  return file;
}

PlanFile three_units() {
  const auto record = record_of({flat({0, 1, 2})});
  const fsdp::PlanChoices choices{
      {Keep::kUpdate, Keep::kNot, Keep::kBackward}, ReduceAt::kLastBackward, 1, 1};
  return {{"77", 2, "2.13.0", 1, 0},
          std::nullopt,
          make_plan(record, units_of(3), choices, PlanOrder::kOneAfterTheOther)};
}

std::string refusal(std::string_view text) {
  return refusal_of(ErrorKind::kFormat, [&] { parse_plan(text, "p.json"); });
}

TEST(PlanJson, WhatIsWrittenIsRead) {
  for (unsigned seed = 0; seed < 500; ++seed) {
    const auto file = drawn(seed);
    const auto text = to_json(file);
    ASSERT_EQ(parse_plan(text, "p.json"), file) << text;
    ASSERT_EQ(to_json(drawn(seed)), text) << "equal plans give equal bytes";
  }
}

TEST(PlanJson, ActionsAreReadableAndNumbersAreNumbers) {
  const auto value = json::parse(to_json(three_units()));
  EXPECT_EQ(value["version"], 1);
  EXPECT_EQ(value["units"][1]["bytes"], 11);
  EXPECT_EQ(value["choices"]["keep"], json({"update", "not", "backward"}));
  EXPECT_EQ(value["choices"]["recompute"], json({"none", "none", "none"}));
  EXPECT_EQ(value["units"][1]["recompute_by"], "nobody");
  const auto& actions = value["stages"][0]["micro_batches"]["only"]["forward"]["actions"];
  EXPECT_EQ(actions[0], json({"gather", 0}));
  EXPECT_EQ(actions[1], json({"wait", 0}));
}

// Cut anywhere, it is refused with its name.
TEST(PlanJson, EveryTruncationIsRefused) {
  auto text = to_json(three_units());
  text.pop_back();  // the last line feed may be missing
  for (std::size_t size = 0; size < text.size(); ++size) {
    ASSERT_THAT(refusal(text.substr(0, size)), Says("p.json")) << size;
  }
}

// One value at a time becomes another: the file is refused where it stands, or faults are found, or
// it is a plan.
TEST(PlanJson, EditedValuesAreRefusedFoundOrHarmless) {
  const auto whole = json::parse(to_json(three_units()));
  const auto values = whole.flatten();
  std::size_t tried = 0;
  for (const auto& [pointer, value] : values.items()) {
    for (const json& other : {json(-1), json(1e300), json("x"), json(nullptr), json(true),
                              json::array(), json(99999999999LL), json::object({{"a", 1}})}) {
      auto edited = whole;
      edited[json::json_pointer(pointer)] = other;
      ++tried;
      PlanFile file;
      try {
        file = parse_plan(edited.dump(), "p.json");
      } catch (const Error& error) {
        ASSERT_EQ(error.kind(), ErrorKind::kFormat) << pointer << error.what();
        continue;
      }
      fsdp::faults_of(file.plan);
    }
  }
  EXPECT_GT(tried, 1000U);
}

TEST(PlanJson, RefusalsNameThePlace) {
  const auto with = [](const char* pointer, const json& value) {
    auto whole = json::parse(to_json(three_units()));
    whole[json::json_pointer(pointer)] = value;
    return refusal(whole.dump());
  };
  EXPECT_THAT(with("/format", "tessera-profile"), Says("expected \"tessera-plan\""));
  EXPECT_THAT(with("/version", 2), Says("expected version 1"));
  EXPECT_THAT(with("/units/1/bytes", -4), Says("p.json: 'units': 'an item': 'bytes': found '-4'"));
  EXPECT_THAT(with("/units/1/bytes", std::int64_t{1} << 60), Says("expected an integer"));
  EXPECT_THAT(with("/units/1/lenders", {3}), Says("an integer from 0 to 2"));
  EXPECT_THAT(with("/units/1/name", "a\x1b[31m"), Says("printable bytes"));
  EXPECT_THAT(with("/choices/keep/0", "for ever"), Says("\"not\", \"backward\", \"update\""));
  EXPECT_THAT(with("/choices/recompute/0", "half"), Says("\"none\", \"selective\", \"full\""));
  EXPECT_THAT(with("/units/1/recompute_by", "me"), Says("\"nobody\", \"user\", \"plan\""));
  EXPECT_THAT(with("/stages/0/micro_batches/only/forward/actions/0", {"gather"}),
              Says("expected [action, unit]"));
  EXPECT_THAT(with("/stages/0/micro_batches/only/forward/actions/0", {"fetch", 0}),
              Says("expected one of \"gather\""));
  EXPECT_THAT(with("/stages/0/micro_batches/only", nullptr), Says("expected an object"));
  EXPECT_THAT(refusal("[]"), Says("expected an object"));
  EXPECT_THAT(refusal(R"({"format": 1, "format": 2})"), Says("twice in one object"));
  EXPECT_THAT(refusal(std::string(100, '[')), Says("nested deeper"));
}

// Naive: an unread key is skipped, and a user who misspelt it is not told.
TEST(PlanJson, UnreadKeysAreRefusedAtEveryPlace) {
  const auto whole = json::parse(to_json(three_units()));
  std::size_t objects = 0;
  const auto try_with = [&](const std::string& pointer) {
    auto edited = whole;
    edited[json::json_pointer(pointer)]["aheda"] = 4;
    ++objects;
    EXPECT_THAT(refusal(edited.dump()), Says("found 'aheda', expected none but \"")) << pointer;
  };
  const auto walk = [&](const auto& self, const json& value, const std::string& pointer) -> void {
    if (value.is_object()) try_with(pointer);
    if (!value.is_structured()) return;
    for (const auto& [key, item] : value.items()) self(self, item, pointer + "/" + key);
  };
  walk(walk, whole, "");
  // The file, what it was made for, units, choices, a stage and its trace, its plan and passes.
  EXPECT_EQ(objects, 1U + 1 + 3 + 1 + 2 + 2 + 4 + 8);
}

// The owner of a shared parameter is a unit around the one that shares it, so there is no circle.
TEST(PlanJson, CirclesOfOwnersAreRefused) {
  using Owners = std::vector<std::vector<int>>;
  const auto with = [](const Owners& owners) {
    auto whole = json::parse(to_json(three_units()));
    for (std::size_t i = 0; i < owners.size(); ++i) whole["units"][i]["lenders"] = owners[i];
    return refusal(whole.dump());
  };
  EXPECT_EQ(with({{}, {0}, {1, 0}}), "") << "owners may share parameters of others themselves";
  EXPECT_THAT(with({{}, {1}, {}}),
              Says("p.json: 'units': found unit layer 1, whose owner is itself, expected"));
  EXPECT_THAT(with({{}, {0, 2}, {0, 1}}),
              Says("unit layer 1, whose owner layer 2 uses its parameters in turn, expected"));
  EXPECT_THAT(with({{2}, {0}, {1}}), Says("unit the root, whose owner layer 2 uses"));
  // A unit that shares parameters of these is in no circle itself.
  EXPECT_THAT(with({{1}, {2}, {2}}), Says("unit layer 2, whose owner is itself"));
}

// A fuzzer that begins with files of yesterday's format never comes past the first field.
TEST(PlanJson, TheFuzzersBeginWithPlansThatHold) {
  const auto text_of = [](const char* name) {
    return read_file(concat(TESSERA_CORPUS "/step_plan/", name));
  };
  for (const auto* name : {"form_1", "form_2", "form_3", "one_unit", "recomputed", "two_units"}) {
    const auto text = text_of(name);
    ASSERT_EQ(refusal(text), "") << name;
    EXPECT_THAT(fsdp::faults_of(parse_plan(text, name).plan), IsEmpty()) << name;
  }
  // Written as when plans could say more. The hash is the same on every machine.
  const auto text = text_of("form_1");
  const auto file = parse_plan(text, "form_1");
  EXPECT_EQ(json::parse(to_json(file)), json::parse(text));
  EXPECT_EQ(file.plan.hash(), 1436217120652454520U);
  for (const auto* name : {"lend_in_a_circle", "lend_to_each_other", "lends_to_itself"}) {
    EXPECT_THAT(refusal(text_of(name)), Says("expected 'lenders' around the units")) << name;
  }
  EXPECT_THAT(refusal(text_of("offloaded_and_recomputed")),
              Says("'offload': found a list, expected an empty list, since optimizer "
                   "state is in memory; make the plan again with tessera plan"));
}

// Files of before are read, and written as they were: keys and values in their order, and lines.
TEST(PlanJson, FilesAreWrittenAsTheyWere) {
  for (const auto* name : {"form_1", "form_2", "form_3", "one_unit", "recomputed", "two_units"}) {
    const auto text = read_file(concat(TESSERA_CORPUS "/step_plan/", name));
    EXPECT_EQ(nlohmann::ordered_json::parse(to_json(parse_plan(text, name))).dump(),
              nlohmann::ordered_json::parse(text).dump());
  }
  auto three = three_units();
  three.plan.units[1].owners = {0};
  EXPECT_THAT(to_json(three), StartsWith(R"({
  "format": "tessera-plan",
  "version": 1,
  "made_for": {"model":"77","world":2,"torch":"2.13.0","micro_batches":1,"tokens":0},
  "memory_budget": null,
  "order": "one after the other",
  "units": [
    {
      "name": "the root",
      "bytes": 10,
      "gathers": true,
      "gathers_in_backward": true,
      "gathered": false,
      "reduces": true,
      "lenders": [],
      "forward_prefetch": [],
      "backward_prefetch": [],
      "recompute_by": "nobody"
    },
    {
      "name": "layer 1",
      "bytes": 11,
      "gathers": true,
      "gathers_in_backward": true,
      "gathered": false,
      "reduces": true,
      "lenders": [0],
)"));
  EXPECT_THAT(to_json(three), AllOf(Says(R"(
  "choices": {
    "keep": ["update","not","backward"],
    "recompute": ["none","none","none"],
    "reduce": "last backward",
    "ahead_in_forward": 1,
    "ahead_in_backward": 1,
    "offload": []
  },
  "record": [
    {
      "parts": [
        {
          "units": [0,1,2],
)"),
                                    Says(R"(
      "micro_batches": {
        "only": {
          "forward": {
            "actions": [
              ["gather",0],
              ["wait",0],
)"),
                                    EndsWith("\n  \"update\": []\n}\n")));
}

// As many places, or uses of units with many owners, as would take hours to check.
TEST(PlanJson, HugePlansAreRefused) {
  auto whole = json::parse(to_json(three_units()));
  auto many = whole;
  many["record"][0]["parts"][0]["units"] = std::vector<int>(10000, 0);
  EXPECT_THAT(refusal(many.dump()), Says("at most 8192 places"));
  whole["units"][1]["lenders"] = std::vector<int>(100000, 0);
  whole["record"][0]["parts"][0]["units"] = std::vector<int>(10, 1);
  EXPECT_THAT(refusal(whole.dump()), Says("uses of units"));
  EXPECT_THAT(refusal(std::string(static_cast<std::size_t>(kMostPlanBytes) + 1, ' ')),
              Says("expected a plan, of at most"));
}

// ------------------------------------------------------------------------------ another run's plan

std::string refused(const auto& require) {
  return refusal_of(ErrorKind::kConfig, [&] { require(); });
}

TEST(PlanJson, AnotherRunIsRefusedByWhatDiffers) {
  const auto file = three_units();
  const auto with = [&](const auto& change) {
    auto run = file.made_for;
    change(run);
    return refused([&] { require_made_for(file, run, "p.json"); });
  };
  EXPECT_EQ(with([](MadeFor&) {}), "");
  EXPECT_THAT(with([](MadeFor& run) { run.model = "78"; }), Says("hash 77, expected 78"));
  EXPECT_THAT(with([](MadeFor& run) { run.world = 3; }), Says("world of 2, expected 3"));
  EXPECT_THAT(with([](MadeFor& run) { run.torch = "2.11.0"; }), Says("torch 2.13.0, expected"));
  EXPECT_THAT(with([](MadeFor& run) { run.micro_batches = 8; }), Says("1, expected 8"));
  EXPECT_THAT(with([](MadeFor& run) { run.context = "gather over 2 ranks, 4 parts"; }),
              Says("context parallelism: none, expected gather over 2 ranks, 4 parts"));
  EXPECT_EQ(with([](MadeFor& run) { run.tokens = 512; }), "") << "the plan says nothing of tokens";
}

TEST(PlanJson, AnotherTraceIsRefusedByItsFirstEntry) {
  const auto file = three_units();
  EXPECT_EQ(
      refused([&] { require_plan_of(file.plan, file.plan.record, file.plan.units, "p.json"); }),
      "");
  EXPECT_THAT(refused([&] {
                require_plan_of(file.plan, record_of({flat({0, 2, 1})}), file.plan.units, "p.json");
              }),
              Says("p.json: found a plan of another step: forward 1, entry 2 of 3, 3: layer 2, "
                   "layer 1"));
  auto units = file.plan.units;
  units[2].bytes = 5;
  EXPECT_THAT(refused([&] { require_plan_of(file.plan, file.plan.record, units, "p.json"); }),
              Says("unit layer 2, bytes: 5, 12"));
}

TEST(PlanJson, AFaultIsNamed) {
  auto plan = three_units().plan;
  EXPECT_EQ(refused([&] { require_sound(plan, std::nullopt, "p.json"); }), "");
  EXPECT_THAT(refused([&] { require_sound(plan, 20, "p.json"); }), Says("over the budget of 20"));
  plan.stages[0].micro_batches[0].forward.actions[1].unit = 2;
  EXPECT_THAT(refused([&] { require_sound(plan, std::nullopt, "p.json"); }),
              Says("expected none; the first: micro-batch only, forward"));
}

// ------------------------------------------------------------------------------------- differences

TEST(PlanDiff, EqualPlansHaveNoneAndOthersSome) {
  std::vector<StepPlan> plans;
  for (unsigned seed = 0; seed < 60; ++seed) plans.push_back(Draw(seed).plan());
  for (const auto& one : plans) {
    for (const auto& other : plans) {
      if (one == other) {
        ASSERT_THAT(diff(one, other), IsEmpty());
      } else {
        ASSERT_THAT(diff(one, other), Not(IsEmpty()));
      }
    }
  }
}

TEST(PlanDiff, SaysWhatAChoiceChanges) {
  auto made = three_units().plan;
  made.units[1].recompute_by = fsdp::RecomputeBy::kPlan;
  const auto before = make_plan(made.record, made.units, made.choices, made.order);
  auto recomputed = before.choices;
  recomputed.recompute[1] = RecomputeMode::kFull;
  EXPECT_THAT(
      diff(before, make_plan(made.record, made.units, recomputed, made.order)),
      AllOf(
          Contains("unit layer 1, recomputed: none, full"),
          Contains(Says("only, backward, action 5 of 7, 8: release layer 1, recompute layer 1"))));
  auto choices = before.choices;
  choices.keep[1] = Keep::kBackward;
  const auto after = make_plan(before.record, before.units, choices, before.order);
  const auto lines = diff(before, after);
  ASSERT_THAT(lines, Not(IsEmpty()));
  EXPECT_EQ(lines[0], "unit layer 1, kept until: not, backward");
  EXPECT_THAT(lines,
              Contains(Says("micro-batch only, forward, action 6 of 9, 9: release layer 1, keep to "
                            "backward layer 1")));
}

}  // namespace
}  // namespace tessera::capture::plan_json_test
