// `tessera plan`: what it prints, what it writes and reads again, and how it ends.

#include <nlohmann/json.hpp>
#include <random>
#include <regex>
#include <sstream>

#include "cli/program.h"
#include "proof.h"
#include "support/test.h"

namespace tessera::cli::plan_test {
namespace {

using nlohmann::json;
using ::testing::ContainsRegex;
using Words = std::vector<std::string>;

/// Its layers are no small buckets; under bfloat16 their norms are.
struct WideRun : SmallRun {
  WideRun() {
    auto model = json::parse(read_file(*this / "model.json"));
    model["hidden_size"] = 128;
    model["intermediate_size"] = 192;
    model["num_hidden_layers"] = 3;
    write("model.json", model.dump());
    write("run.toml", read_file(*this / "run.toml") +
                          "[[precision.rule]]\nmatch = [\"*norm\"]\n"
                          "param_dtype = \"float32\"\n");
  }
};

Outcome plan(const TemporaryFolder& folder, const Words& more, const std::string& world = "2") {
  return run_program(folder, joined({"plan", "run.toml", "--world", world}, more));
}

/// The plan of a WideRun, made once.
const std::string& eager_plan() {
  static const std::string made = succeeded(plan(WideRun(), {"--json"})).out;
  return made;
}

/// How many draws a case has of those that scripts/full has.
int some_of(int draws) { return test::full_proof() ? draws : draws / 2; }

/// The number behind `what` in a text.
std::int64_t number_after(const std::string& text, const std::string& what) {
  const auto at = text.find(what);
  return at == std::string::npos ? -1 : std::stoll(text.substr(at + what.size()));
}

/// The same with a point.
double decimal_after(const std::string& text, const std::string& what) {
  const auto at = text.find(what);
  return at == std::string::npos ? -1.0 : std::stod(text.substr(at + what.size()));
}

TEST(PlanVerb, PrintsActionsWithReasonsDtypesAndMemory) {
  const WideRun folder;
  const Outcome outcome =
      succeeded(plan(folder, {"--precision.param_dtype", "bfloat16", "--actions"}));
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(outcome.out,
              AllOf(Says("plan of a step of 2 micro-batches on 2 ranks, form 3, hash "),
                    Says("kept to the update: its reshard_after_forward is off\n"),
                    Says("note: pass keep is left out, since compile.memory_budget is not set\n"),
                    Says("note: nothing was measured: choices go by bytes alone\n"),
                    Says("micro-batch first, forward:\n"),
                    Says("gather model.layers.0 (needed by model.layers.0)\n"),
                    Says("reduce model.layers.2 (nothing more brings it a gradient)\n"),
                    Says("micro-batch last, backward:\n"), Not(Says("micro-batch middle"))));
  EXPECT_THAT(outcome.out, Says("raw       grad      slot      wire      final\n",
                                "model.layers.{0-2}.mlp.up_proj.weight x 3",
                                "bfloat16  raw       float32   float32   float32\n",
                                "gathered memory of a rank, place by place: at most "));
  EXPECT_THAT(outcome.out, Not(Says("by the profile"))) << "nothing was measured";
}

TEST(PlanVerb, SaysWhatAttentionOverRanksSendsAndThatAnotherCutIsAnotherPlan) {
  const WideRun folder;
  const Words shared{"--training.seq_len", "64", "--parallelism.context_parallel_degree", "2"};
  EXPECT_THAT(succeeded(plan(folder, shared)).out,
              Says("  context: cp 2, form gather, 4 parts\n", "    a layer's attention sends ",
                   "    slowest over mean: 1.000 by pairs", "    gather is the form to take: "));
  folder.write("plan.json", succeeded(plan(folder, joined(shared, {"--json"}))).out);
  succeeded(plan(folder, joined(shared, {"--check", "plan.json"})));
  EXPECT_THAT(plan(folder, joined(shared, {"--check", "plan.json",
                                           "--parallelism.context_parallel_parts", "8"})),
              Exits(2,
                    "found a plan for context parallelism: gather over 2 ranks, 4 parts, expected "
                    "gather over 2 ranks, 8 parts"));
}

/// The sentence about all that is sent in a table of inspect or a line of plan.
std::string sent_in(const std::string& text, const std::string& before) {
  const auto at = text.rfind(before);
  if (at == std::string::npos) return "nothing";
  std::smatch size;
  const std::string rest = text.substr(at + before.size());
  std::regex_search(rest, size, std::regex(R"([0-9.]+ [KMGT]?i?B)"));
  return size.str();
}

// Naive: the bytes of a step that the run does not make, with a reference to those of the run.
TEST(PlanVerb, SaysWhoseStepItShowsAndInspectAgreesWhereItIsSent) {
  const WideRun folder;
  std::mt19937 random(7);
  const std::vector<Words> some{{},
                                {"--training.global_batch_size", "16"},
                                {"--compile.form", "1"},
                                {"--compile.form", "2"},
                                {"--compile.memory_budget", "100MB"},
                                {"--parallelism.tensor_parallel_degree", "2"},
                                {"--parallelism.reshard_after_forward", "true"},
                                {"--activation_checkpoint.mode", "full"},
                                {"--optimizer.name", "Muon"}};
  int differ = 0;
  for (int round = 0; round < some_of(8); ++round) {
    const std::string mode = round % 2 == 0 ? "off" : "plan";
    Words words{"--compile.mode", mode};
    for (int draw = 0; draw < 2; ++draw) {
      const Words& one = some[random() % some.size()];
      words.insert(words.end(), one.begin(), one.end());
    }
    SCOPED_TRACE(::testing::PrintToString(words));
    const Outcome outcome = succeeded(plan(folder, words));
    EXPECT_EQ(outcome.out.find("\n  the run follows no plan (compile.mode = \"off\"): ") !=
                  std::string::npos,
              mode == "off");
    const std::string sent = sent_in(outcome.out, "\n  sent by a rank: ");
    const auto inspected = [&](Words more) {
      more.insert(more.begin(), {"inspect", "--contract", "run.toml", "--world", "2"});
      return sent_in(run_program(folder, more).out, "\n  total");
    };
    const std::string own = inspected(words);
    differ += sent != own;
    const std::string advice = mode == "off" ? " --compile.mode plan" : "";
    EXPECT_THAT(outcome.out, Says("(tessera inspect --contract" + advice + " says of what)\n"));
    EXPECT_EQ(sent, mode == "off" ? inspected(joined(words, {"--compile.mode", "plan"})) : own);
  }
  EXPECT_GT(differ, 0) << "able to fail: no drawn run sends more without its plan";
}

/// "3.2 ms", "1.5 s".
bool speaks_of_seconds(const std::string& text) {
  return std::regex_search(text, std::regex(R"([0-9] m?s\b)"));
}

// Naive: hundreds of lines before the question of a user, whether it fits; and seconds out of
// bytes.
TEST(PlanVerb, BeginsWithTotalsAndHasNoSecondsThatNoOneMeasured) {
  const WideRun folder;
  for (const Words& more : std::vector<Words>{{},
                                              {"--compile.memory_budget", "1GB"},
                                              {"--compile.form", "1"},
                                              {"--activation_checkpoint.mode", "full"},
                                              {"--device-memory", "80GiB"}}) {
    const Outcome outcome = succeeded(plan(folder, more));
    const std::string head = outcome.out.substr(0, outcome.out.find("\nchosen:\n"));
    EXPECT_LE(std::ranges::count(head, '\n'), 8) << head;
    EXPECT_THAT(head, Says("\n  memory of a rank: at most ", "\n  forecast for CPU kernels\n",
                           "\n  computed by a rank: ", "MFLOP a step", "\n  sent by a rank: "));
    EXPECT_FALSE(speaks_of_seconds(outcome.out)) << outcome.out;
    EXPECT_THAT(outcome.out, Not(Says("micro-batch first, forward")));
    EXPECT_THAT(outcome.out, Says("\n  model.layers.{"));
  }
}

// Drawn options: the words of a plan are those of a person. Naive: "1 micro-batch(es) on 64
// rank(s)", "of it again", "2989.96 ms", "as its user has set it".
TEST(PlanVerb, SaysItInPlainWordsForAnyRequest) {
  const WideRun folder;
  const std::vector<Words> some{{"--training.global_batch_size", "64"},
                                {"--activation_checkpoint.mode", "full"},
                                {"--activation_checkpoint.mode", "selective"},
                                {"--compile.form", "1"},
                                {"--compile.memory_budget", "2MB"},
                                {"--compile.memory_budget", "90%"},
                                {"--flops", "1e6", "--bandwidth", "1MB/s"},
                                {"--flops", "1e10", "--bandwidth", "50GB/s"}};
  std::mt19937 random(3);
  for (int round = 0; round < some_of(14); ++round) {
    Words words;
    for (int draw = 0; draw < 3; ++draw) {
      const Words& one = some[random() % some.size()];
      if (std::ranges::count(words, one[0]) == 0) words.insert(words.end(), one.begin(), one.end());
    }
    const std::string world = round % 3 == 0 ? "1" : "2";
    SCOPED_TRACE(::testing::PrintToString(words));
    const Outcome outcome = plan(folder, words, world);
    const std::string all = outcome.out + outcome.err;
    for (const char* word : {"(s)", "(es)", "it again", "forwards again", "its user",
                             "by bytes alone at", "as before:", "inf ", "nan "}) {
      EXPECT_THAT(all, Not(Says(word)));
    }
    EXPECT_FALSE(std::regex_search(all, std::regex(R"(\b1 (ranks|micro-batches|units)\b)"))) << all;
    EXPECT_FALSE(std::regex_search(all, std::regex(R"([0-9]{4}\.[0-9]+ ms)"))) << all;
    if (outcome.code == 0) {
      EXPECT_THAT(all, Says(world == "1" ? " on 1 rank, " : " on 2 ranks, "));
      EXPECT_THAT(all, ContainsRegex("gathered ahead: [0-9]+ units? in forward, [0-9]+ units? in "
                                     "backward"));
    } else {
      EXPECT_THAT(all, ContainsRegex("expected at least [0-9]+ bytes \\([0-9.]+ [KMG]iB\\)"));
    }
  }
  EXPECT_THAT(plan(folder, {"--activation_checkpoint.mode", "full"}).out,
              AllOf(Says("recomputed, full: as activation_checkpoint.mode or set_recompute"),
                    ContainsRegex("a step, of which [0-9.]+ MFLOP recomputes activations\n")));
  EXPECT_THAT(plan(folder, {"--flops", "1e7", "--bandwidth", "50GB/s"}).out,
              ContainsRegex("a step by --flops and --bandwidth: [0-9]+\\.[0-9][0-9] s, of which "
                            "computing [0-9]+\\.[0-9][0-9] s \\(of that 0\\.00 ms recomputing\\)"));
}

TEST(PlanVerb, SaysWhetherARankFitsAndHowAShareWasCounted) {
  const WideRun folder;
  EXPECT_THAT(plan(folder, {}).out, Says("set compile.memory_budget, or give --device-memory"));
  EXPECT_THAT(plan(folder, {"--device-memory", "80GiB"}).out,
              Says("\n  --device-memory 80.0 GiB: fits, "));
  EXPECT_THAT(plan(folder, {"--device-memory", "64KiB"}).out,
              Says("\n  --device-memory 64.0 KiB: does not fit, "));
  EXPECT_THAT(plan(folder, {"--compile.memory_budget", "80GB"}).out,
              Says("\n  compile.memory_budget 74.5 GiB: fits, "));
  const Outcome share =
      plan(folder, {"--compile.memory_budget", "50%", "--device-memory", "80GiB"}, "64");
  EXPECT_THAT(share.out, Says("compile.memory_budget 40.0 GiB: fits, ",
                              " (50% of the 80.0 GiB of a device)\n"));
  const Outcome host =
      plan(folder, {"--compile.memory_budget", "50%", "--ranks-per-host", "2"}, "64");
  EXPECT_THAT(host.out, Says(" of this machine, shared by 2 ranks)\n"));
  EXPECT_THAT(plan(folder, {"--compile.memory_budget", "50%", "--device-memory", "64KiB"}),
              Exits(2,
                    "found 32768 bytes a rank (32.0 KiB, 50% of the 64.0 KiB of a "
                    "device), expected at least "));
  EXPECT_EQ(plan(folder, {"--device-memory", "80 gigs"}).code, 2);
}

// The model's weights by hand, attention of two heads to 8.5 of 16 positions besides.
TEST(PlanVerb, RatesGiveTimesAndWhatIsComputedIsSixOperationsAWeight) {
  const WideRun folder;
  constexpr double kOfLayer = 2 * 16 * 128 + 2 * 8 * 128 + 3 * 192 * 128 + 2 * 128 + 2 * 8;
  constexpr double kWeights = 3 * kOfLayer + 260 * 128 + 128;
  constexpr double kAttention = 3 * 2 * 2 * (8 + 8) * 8.5;
  constexpr double kTokens = 2 * 16;  // of a rank
  const auto computed = [&](const Words& more) {
    return decimal_after(plan(folder, more).out, "\n  computed by a rank: ");
  };
  const double expected = 1e-6 * kTokens * (6 * kWeights + 3 * kAttention);
  EXPECT_NEAR(computed({}), expected, 0.005 * expected) << "three digits of MFLOP";
  EXPECT_GT(computed({"--activation_checkpoint.mode", "full"}), 1.1 * expected);
  const Words rates{"--flops", "1e9", "--bandwidth", "1MB"};
  const Outcome outcome = succeeded(plan(folder, rates));
  EXPECT_THAT(outcome.out, Says("\n  a step by --flops and --bandwidth: "));
  const auto slower = plan(folder, {"--flops", "1e8", "--bandwidth", "1MB"});
  EXPECT_GT(number_after(slower.out, "of which computing "),
            9 * number_after(outcome.out, "of which computing "));
  for (const Words& alone : {Words{"--flops", "1e9"}, Words{"--bandwidth", "1MB"}}) {
    EXPECT_EQ(plan(folder, alone).code, 2);
  }
  EXPECT_EQ(plan(folder, {"--flops", "nan", "--bandwidth", "1MB"}).code, 2);
}

// A budget between the least and all: more is kept than without, and never more than fits.
TEST(PlanVerb, ABudgetKeepsWhatSavesMost) {
  const WideRun folder;
  const Outcome below = plan(folder, {"--compile.memory_budget", "1000"});
  EXPECT_THAT(below, Exits(2, "compile.memory_budget: found 1000 bytes a rank, expected at "));
  const auto least = number_after(below.err, "expected at least ");
  const auto fixed = number_after(below.err, ", of which ");
  ASSERT_GT(least, fixed);
  std::int64_t before = 0;
  for (const std::int64_t more : {0L, 300'000L, 10'000'000L}) {
    const Outcome outcome =
        succeeded(plan(folder, {"--compile.memory_budget", std::to_string(least + more)}));
    const auto peak = number_after(outcome.out, "place by place: at most ");
    EXPECT_LE(peak, least - fixed + more);
    EXPECT_GE(peak, before);
    before = peak;
    if (more == 10'000'000L) {
      EXPECT_THAT(outcome.out, Says("kept to the update: saves "));
      EXPECT_THAT(outcome.out, ContainsRegex("saves [0-9.]+ gathers? a micro-batch for "));
    }
  }
  EXPECT_EQ(plan(folder, {"--compile.memory_budget", "90%"}).code, 0);
}

TEST(PlanVerb, WritesAPlanThatItChecks) {
  const WideRun folder;
  const Outcome made = succeeded(plan(folder, {"--json", "--compile.form", "2"}));
  folder.write("plan.json", made.out);
  const Outcome checked = succeeded(plan(folder, {"--check", "plan.json", "--compile.form", "2"}));
  EXPECT_THAT(checked.out, Says("'plan.json': 0 findings, at most "));
  EXPECT_EQ(plan(folder, {"--compile.form", "2", "--json"}).out, made.out) << "the same bytes";
  const Outcome shown =
      succeeded(plan(folder, {"--compile.plan", "plan.json", "--compile.form", "2"}));
  EXPECT_THAT(shown.out, Says("reduced: every backward"));
  // A run that reduces once a step does not follow it: its sums would be others.
  EXPECT_THAT(plan(folder, {"--compile.plan", "plan.json"}),
              Exits(2, "found a plan that reduces with every micro-batch, expected"));
}

// Exit code 3 and every finding.
TEST(PlanVerb, NamesEveryFindingOfAPlan) {
  const WideRun folder;
  auto whole = json::parse(eager_plan());
  auto& forward = whole["stages"][0]["micro_batches"]["first"]["forward"]["actions"];
  ASSERT_EQ(forward[1][0], "wait");
  forward[1][0] = "gather";
  folder.write("plan.json", whole.dump());
  const Outcome outcome = plan(folder, {"--check", "plan.json"});
  EXPECT_EQ(outcome.code, 3) << outcome.err;
  EXPECT_THAT(outcome.out, Says("micro-batch first, forward: unit model.embed_tokens is gathered "
                                "while it is gathered\n",
                                "is used before the wait for its gather\n", " findings\n"));
  EXPECT_THAT(plan(folder, {"--compile.plan", "plan.json"}),
              Exits(2, "faults, expected none; the first: micro-batch first, forward"));
}

TEST(PlanVerb, RefusesPlansOfOthersAndFilesThatAreNone) {
  const WideRun folder;
  const auto& text = eager_plan();
  const auto whole = json::parse(text);
  const auto refused = [&](const std::string& file, const Words& more = {}) {
    folder.write("plan.json", file);
    const auto words = joined({"--check", "plan.json"}, more);
    const Outcome outcome = plan(folder, words);
    EXPECT_EQ(outcome.code, 2) << outcome.out;
    EXPECT_EQ(outcome.out, "");
    return outcome.err;
  };
  std::vector<std::string> units;
  for (const auto& unit : whole["units"]) units.push_back(unit["name"]);
  const auto with = [&](const char* pointer, const json& value) {
    auto other = whole;
    other[json::json_pointer(pointer)] = value;
    return refused(other.dump());
  };
  EXPECT_THAT(with("/made_for/torch", "1.0"), Says("a plan for torch 1.0, expected "));
  EXPECT_THAT(with("/made_for/model", "7"), Says("hash 7, expected "));
  EXPECT_THAT(with("/made_for/tokens", 8), Says("tokens of a micro-batch on a rank: 8"));
  folder.write("plan.json", text);
  EXPECT_THAT(plan(folder, {"--check", "plan.json"}, "4"), Exits(2, "a world of 2, expected 4"));
  EXPECT_THAT(refused(text, {"--training.global_batch_size", "8"}),
              Says("micro-batches a step: 2, expected 4"));
  EXPECT_THAT(with("/record/0/parts/0/units/1", 2),
              Says("a plan of another step: forward 1, entry 2 of "));
  EXPECT_THAT(with("/choices/offload", {1}),
              Says("'offload': found a list, expected an empty list, since optimizer state is"));
  EXPECT_THAT(refused(text.substr(0, text.size() / 2)), Says("malformed JSON at byte"));
  EXPECT_THAT(with("/units/1/bytes", -1), Says("'bytes': found '-1'"));
  EXPECT_THAT(with("/units/1/lenders", {1}),
              Says("'plan.json': 'units': found unit " + units[1] + ", whose owner is itself"));
  auto mutual = whole;
  mutual["units"][1]["lenders"] = {2};
  mutual["units"][2]["lenders"] = {1};
  EXPECT_THAT(refused(mutual.dump()), Says("found unit " + units[1] + ", whose owner " + units[2] +
                                           " uses its parameters in turn"));
  EXPECT_THAT(plan(folder, {"--compile.plan", "plan.json"}),
              Exits(2, "uses its parameters in turn"));
  EXPECT_THAT(plan(folder, {"--check", "absent.json"}).err,
              Says("--check: cannot open 'absent.json'"));
  EXPECT_THAT(plan(folder, {"--profile", "absent.json"}).err,
              Says("--profile: cannot open 'absent.json'"));
}

// Naive: a check that looks at the file alone, and says 0 findings of what the run then refuses.
TEST(PlanVerb, TheCheckFindsAllThatTheRunRefuses) {
  const WideRun folder;
  const auto make = [&](const char* file, const Words& more) {
    Words words = more;
    words.emplace_back("--json");
    const Outcome made = succeeded(plan(folder, words));
    folder.write(file, made.out);
  };
  const auto below = plan(folder, {"--compile.memory_budget", "1000"});
  const auto least = number_after(below.err, "expected at least ");
  ASSERT_GT(least, 0) << below.err;
  const Words tight{"--compile.memory_budget", std::to_string(least)};
  folder.write("eager.json", eager_plan());
  make("form2.json", {"--compile.form", "2"});
  make("tight.json", tight);
  make("recomputes.json", {"--activation_checkpoint.mode", "full"});
  const struct {
    const char* file;
    Words words;
    std::string says;
    bool twice = false;  ///< what another one shows as well
  } cases[]{
      {"eager.json", tight, "bytes gathered and of activations, over the budget of "},
      {"eager.json",
       {"--training.sync_every_micro_batch", "true"},
       "a plan that reduces with the last micro-batch, expected every micro-batch",
       /*twice=*/true},
      {"eager.json",
       {"--compile.form", "2"},
       "a plan that reduces with the last micro-batch",
       true},
      {"form2.json", {}, "a plan that reduces with every micro-batch, expected the last"},
      {"recomputes.json",
       {"--activation_checkpoint.mode", "selective"},
       "unit model.layers.0 recomputed in mode full, expected selective"},
      {"eager.json",
       {"--parallelism.reshard_after_forward", "false"},
       " kept until: not, expected update, as its reshard_after_forward says, which is off"},
  };
  for (const auto& [file, words, says, twice] : cases) {
    if (twice && !test::full_proof()) continue;
    const auto check = joined({"--check", file}, words);
    const Outcome checked = plan(folder, check);
    EXPECT_EQ(checked.code, 3) << says << checked.out << checked.err;
    EXPECT_THAT(checked.out, Says("found a plan ", says));
    Words train{"train", "run.toml", "--nproc", "2", "--compile.mode", "plan", "--compile.plan"};
    train.emplace_back(file);
    train.insert(train.end(), words.begin(), words.end());
    EXPECT_THAT(run_program(folder, train), Exits(2, says)) << says;
  }
  // Each of them is a plan that holds, of the run that it was made for.
  const std::pair<const char*, Words> right[]{
      {"eager.json", {}},
      {"form2.json", {"--compile.form", "2"}},
      {"tight.json", tight},
      {"recomputes.json", {"--activation_checkpoint.mode", "full"}}};
  for (const auto& [file, words] : right) {
    const auto check = joined({"--check", file}, words);
    EXPECT_EQ(plan(folder, check).code, 0) << file;
  }
}

// Naive: the actions alone are looked at, and unknown keys are passed over.
TEST(PlanVerb, FindsChoicesThatActionsDoNotFollowAndUnknownKeys) {
  const WideRun folder;
  const auto whole = json::parse(eager_plan());
  const auto checked = [&](const json& edited) {
    folder.write("plan.json", edited.dump());
    return plan(folder, {"--check", "plan.json"});
  };
  auto ahead = whole;
  ahead["choices"]["ahead_in_forward"] = 4000;
  auto outcome = checked(ahead);
  EXPECT_EQ(outcome.code, 3) << outcome.err;
  EXPECT_THAT(outcome.out, Says("computes, where 4000 units ahead were chosen\n"));
  auto never = whole;
  for (auto& [name, passes] : never["stages"][0]["micro_batches"].items()) {
    for (auto& action : passes["backward"]["actions"]) {
      if (action[0] == "reduce") action[0] = "gather";
    }
  }
  outcome = checked(never);
  EXPECT_EQ(outcome.code, 3) << outcome.err;
  EXPECT_THAT(outcome.out, Says("micro-batch last, backward: unit model.layers.0 is never "
                                "reduced\n"));
  auto key = whole;
  key["choices"]["ahead_in_foward"] = 2;
  outcome = checked(key);
  EXPECT_EQ(outcome.code, 2) << outcome.out;
  EXPECT_THAT(outcome.err, Says("'choices': found 'ahead_in_foward', expected none but "));
}

TEST(PlanVerb, AProfileGivesTimes) {
  const WideRun folder;
  json units = json::array();
  const json whole = json::parse(eager_plan());
  for (const auto& unit : whole["units"]) {
    units.push_back({{"name", unit["name"]},
                     {"forward_ms", 1.0},
                     {"backward_ms", 2.0},
                     {"gather_ms", 0.25},
                     {"reduce_ms", nullptr}});
  }
  json profile = {{"format", "tessera-profile"},
                  {"version", 1},
                  {"collective", {{"latency_ms", 0.125}, {"ms_per_byte", 0.0}}},
                  {"units", units}};
  folder.write("profile.json", profile.dump());
  const Outcome outcome = succeeded(plan(folder, {"--profile", "profile.json"}));
  EXPECT_THAT(outcome.out,
              Says("a step by the profile: ",
                   "of which computing " + std::to_string(2 * 3 * units.size()) + ".00"));
  EXPECT_THAT(outcome.out, Not(Says("nothing was measured")));
  profile["units"].erase(1);
  folder.write("profile.json", profile.dump());
  EXPECT_THAT(plan(folder, {"--profile", "profile.json"}), Exits(2, "found no costs of unit '"));
}

std::vector<double> losses(const std::filesystem::path& metrics) {
  std::vector<double> found;
  std::istringstream lines(read_file(metrics));
  for (std::string line; std::getline(lines, line);) found.push_back(json::parse(line)["loss"]);
  return found;
}

/// Trains run.toml on two ranks.
Words planned_training(const std::string& run, int steps) {
  return joined({"train", "run.toml", "--nproc", "2", "--job.dump_folder", run},
                {"--training.steps", std::to_string(steps), "--checkpoint.enable", "false"});
}

// A run follows a plan that was made before it, to the same losses, measures itself where it is to
// choose, and is refused before a step where the plan is another's.
TEST(PlannedRun, FollowsAPlanOutOfAFileAndMeasuresItself) {
  const WideRun folder;
  const auto train = [&](const std::string& run, const Words& more) {
    return run_program(folder, joined(planned_training(run, 5), more));
  };
  ASSERT_EQ(train("off", {}).code, 0);
  const auto expected = losses(folder / "off/metrics/metrics.jsonl");
  ASSERT_EQ(expected.size(), 5U);
  const auto made = succeeded(plan(folder, {"--json", "--compile.memory_budget", "100000000"}));
  folder.write("plan.json", made.out);
  const Outcome given =
      succeeded(train("given", {"--compile.mode", "plan", "--compile.plan", "plan.json"}));
  EXPECT_EQ(losses(folder / "given/metrics/metrics.jsonl"), expected);

  const Outcome chosen = succeeded(
      train("chosen", {"--compile.mode", "plan", "--compile.memory_budget", "100000000"}));
  EXPECT_EQ(losses(folder / "chosen/metrics/metrics.jsonl"), expected);
  const Outcome timed = succeeded(plan(folder, {"--profile", "chosen/metrics/profile.json"}));
  EXPECT_THAT(timed.out, Says("a step by the profile: "));

  EXPECT_THAT(train("other", {"--compile.mode", "plan", "--compile.plan", "plan.json",
                              "--training.global_batch_size", "8"}),
              Exits(2, "micro-batches a step: 2, expected 4"));
  EXPECT_THAT(train("below", {"--compile.mode", "plan", "--compile.memory_budget", "1000"}),
              Exits(2, "compile.memory_budget: found 1000 bytes a rank, expected at"));
}

// Naive: blocks that a plan without replays would not have.
TEST(PlannedRun, ReplayedTellsWhatItsBlocksTake) {
  const WideRun folder;
  const auto trained = [&](const std::string& run, const Words& more) {
    succeeded(run_program(folder, joined(planned_training(run, 7), more)));
    return losses(folder / (run + "/metrics/metrics.jsonl"));
  };
  const Words replay{"--compile.mode", "replay"};
  EXPECT_EQ(trained("replayed", replay), trained("eager", {}));
  const auto profile = json::parse(read_file(folder / "replayed/metrics/profile.json"));
  std::int64_t entries = 0;
  for (const auto& unit : profile["units"]) {
    if (!unit.contains("blocks")) continue;
    EXPECT_EQ(unit["blocks"]["recompute"], "none");
    EXPECT_GT(unit["blocks"]["running"], unit["blocks"]["entries"]);
    entries += unit["blocks"]["entries"].get<std::int64_t>();
  }
  const Words with{"--profile", "replayed/metrics/profile.json"};
  Words both = with;
  both.insert(both.end(), replay.begin(), replay.end());
  const auto counted = plan(folder, both), not_counted = plan(folder, with);
  ASSERT_EQ(counted.code, 0) << counted.err;
  EXPECT_GT(number_after(counted.out, "blocks of replayed regions, of these: at most "), entries);
  EXPECT_GT(entries, 0);
  EXPECT_THAT(not_counted.out, Not(Says("blocks of replayed regions")));
  const auto all = [](const Outcome& of) { return number_after(of.out, "\nin all: at most "); };
  EXPECT_GT(all(counted), all(not_counted));
}

// Naive: steps in which regions are recorded and compared, three times as long, are what is
// measured.
TEST(PlannedRun, MeasuresNoStepThatRecords) {
  const WideRun folder;
  const auto chosen_at = [&](const std::string& mode) {
    const auto run = succeeded(run_program(
        folder, {"train", "run.toml", "--nproc", "2", "--job.dump_folder", mode, "--training.steps",
                 "8", "--training.local_batch_size", "2", "--training.global_batch_size", "4",
                 "--checkpoint.enable", "false", "--compile.mode", mode}));
    return number_after(run.err, "plan: step ");
  };
  EXPECT_EQ(chosen_at("plan"), 6);
  // The second step records, the third and the fourth one compare.
  EXPECT_EQ(chosen_at("replay"), 8);
}

// The least of any plan has every layer recomputed, and says so; a run within it has the losses of
// one that recomputes nothing.
TEST(PlannedRun, RecomputesWhatDoesNotFit) {
  const WideRun folder;
  const auto below = plan(folder, {"--compile.memory_budget", "1000"});
  const auto least = number_after(below.err, "expected at least ");
  const auto fixed = number_after(below.err, ", of which ");
  const auto budget = std::to_string(least);
  const Outcome shown = succeeded(plan(folder, {"--compile.memory_budget", budget, "--actions"}));
  EXPECT_THAT(shown.out,
              AllOf(Says("    recomputed, full: leaves "), Says(" of activations to others"),
                    Says("while model.layers.0 computes: recompute model.layers.0 (full: "),
                    ContainsRegex(" units? recomputed\nin all: at most ")));
  EXPECT_LE(number_after(shown.out, "place by place: at most ") +
                number_after(shown.out, "activations of a micro-batch: at most ") + fixed,
            least);
  const auto made = plan(folder, {"--compile.memory_budget", budget, "--json"});
  folder.write("plan.json", made.out);
  EXPECT_THAT(plan(folder, {"--check", "plan.json"}).out, Says("'plan.json': 0 findings"));
  // For a run whose key binds every layer it is another run's plan.
  EXPECT_THAT(plan(folder, {"--check", "plan.json", "--activation_checkpoint.mode", "none"}),
              Exits(2, "recomputed by: user, plan"));

  const auto train = [&](const std::string& run, const Words& more) {
    succeeded(run_program(folder, joined(planned_training(run, 5), more)));
    return losses(folder / (run + "/metrics/metrics.jsonl"));
  };
  const auto expected = train("off", {});
  ASSERT_EQ(expected.size(), 5U);
  EXPECT_EQ(train("chosen", {"--compile.mode", "plan", "--compile.memory_budget", budget}),
            expected);
  EXPECT_EQ(train("given", {"--compile.mode", "plan", "--compile.plan", "plan.json"}), expected);
}

TEST(PlanVerb, RefusesWhatIsNotThereYetByItsKey) {
  const WideRun folder;
  const std::vector<std::pair<Words, std::string>> cases{
      {{"--compile.passes", "recompute"}, "found recompute without compile.memory_budget"},
      {{"--compile.passes", "recompute", "--compile.memory_budget", "90%",
        "--activation_checkpoint.mode", "none"},
       "found recompute without layers that keep less when they are recomputed"},
      {{"--compile.passes", "kep"},
       "compile.passes: found 'kep', expected recompute, keep or prefetch"},
      {{"--compile.passes", "offload"},
       "compile.passes: found 'offload', expected recompute, keep or prefetch; optimizer state is"},
      {{"--compile.offload_folder", "x"},
       "unknown key '--compile.offload_folder'; it is no key here: what a rank trains is in the "
       "memory that trains it; parallelism.data_parallel_shard_degree shares it"},
      {{"--compile.passes", "keep"}, "found keep without compile.memory_budget"},
      {{"--compile.form", "4"}, "compile.form: found 4 (integer), expected a value from 1 to 3"},
      {{"--compile.memory_budget", "0"},
       "compile.memory_budget: found 0 (integer), expected bytes"},
      {{"--compile.memory_budget", "120%"}, "expected bytes, at least 1, or a share"},
      {{"--compile.form", "1", "--training.sync_every_micro_batch", "true"},
       "compile.form: found 1 with training.sync_every_micro_batch"},
      {{"--parallelism.pipeline_parallel_degree", "2"},
       "parallelism.pipeline_parallel_degree: found 2, expected 1: the steps of a pipeline"},
  };
  for (const auto& [words, says] : cases) {
    const Outcome outcome = plan(folder, words);
    EXPECT_EQ(outcome.code, 2) << says << outcome.out;
    EXPECT_EQ(outcome.out, "") << says;
    EXPECT_THAT(outcome.err, Says(says));
  }
  EXPECT_THAT(run_program(folder, {"train", "run.toml", "--compile.mode", "plan",
                                   "--parallelism.pipeline_parallel_degree", "2", "--nproc", "2"}),
              Exits(2, "compile.mode: found plan with pipeline_parallel_degree 2"));
}

}  // namespace
}  // namespace tessera::cli::plan_test
