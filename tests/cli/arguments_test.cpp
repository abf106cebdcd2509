#include "cli/arguments.h"

#include <random>
#include <sstream>

#include "support/temporary_folder.h"
#include "train/config/config_keys.h"

namespace tessera::cli::arguments_test {
namespace {

using ::testing::ContainsRegex;
using Words = std::vector<std::string>;

Arguments parse(const Words& words) {
  return parse_arguments(words, [] { return std::string("tessera 1 (git abc)"); });
}

std::string refusal(const Words& words) {
  return error_of(ErrorKind::kUsage, [&] { parse(words); });
}

TEST(Arguments, TrainTakesFileRanksAndOverridesInAnyOrder) {
  const Overrides expected{{"training.steps", "5"}, {"optimizer.betas", "[0.9, 0.95]"}};
  for (const Words& words : {
           Words{"train", "a.toml", "--nproc", "2", "--training.steps", "5",
                 "--optimizer.betas=[0.9, 0.95]"},
           Words{"train", "--training.steps", "5", "--optimizer.betas", "[0.9, 0.95]", "--nproc=2",
                 "a.toml"},
       }) {
    const auto train = std::get<TrainArguments>(parse(words));
    EXPECT_EQ(train.config_file, "a.toml");
    EXPECT_EQ(train.nproc, 2);
    EXPECT_FALSE(train.print_config);
    EXPECT_EQ(train.overrides, expected);
  }
}

TEST(Arguments, NegativeValuesAndEqualSignsBelongToTheKey) {
  const auto train =
      std::get<TrainArguments>(parse({"train", "a.toml", "--parallelism.data_parallel_shard_degree",
                                      "-1", "--data.path=a=b", "--device", "cpu"}));
  EXPECT_EQ(train.overrides, (Overrides{{"parallelism.data_parallel_shard_degree", "-1"},
                                        {"data.path", "a=b"},
                                        {"device", "cpu"}}));
}

TEST(Arguments, GradientsTakesItsFilesAndFlags) {
  const auto gradients = std::get<GradientsArguments>(
      parse({"gradients", "--model", "m", "--batch", "b.safetensors", "--out", "o.safetensors",
             "--no-logits", "--precision.param_dtype", "float32"}));
  EXPECT_EQ(gradients.model, "m");
  EXPECT_EQ(gradients.batch, "b.safetensors");
  EXPECT_EQ(gradients.out, "o.safetensors");
  EXPECT_TRUE(gradients.no_logits);
  EXPECT_FALSE(gradients.impose_routing);
  EXPECT_EQ(gradients.nproc, std::nullopt);
  EXPECT_EQ(gradients.overrides, (Overrides{{"precision.param_dtype", "float32"}}));
  EXPECT_FALSE(gradients.precision_what_if);
  const auto what_if =
      std::get<GradientsArguments>(parse({"gradients", "--model", "m", "--batch", "b",
                                          "--precision-what-if", "--bound", "0.02", "--json"}));
  EXPECT_TRUE(what_if.precision_what_if && what_if.json);
  EXPECT_EQ(what_if.bound, 0.02);
  EXPECT_EQ(what_if.out, "");
  EXPECT_THAT(refusal({"gradients", "--model", "m", "--batch", "b", "--out", "o", "--json"}),
              Says("--precision-what-if"));
}

TEST(Arguments, ScheduleTakesAKindOrAFile) {
  const auto kind = std::get<ScheduleArguments>(
      parse({"schedule", "DualPipeV", "--ranks", "4", "--micro-batches=8", "--stages-per-rank", "2",
             "--costs", "1,0.5,1e2,2.5", "--csv", "a.csv", "--csv-form", "compute_comms", "--svg",
             "a.svg", "--trace", "a.json"}));
  EXPECT_EQ(kind.schedule, "DualPipeV");
  EXPECT_EQ(kind.ranks, 4);
  EXPECT_EQ(kind.micro_batches, 8);
  EXPECT_EQ(kind.stages_per_rank, 2);
  EXPECT_EQ(kind.costs, (std::vector<double>{1.0, 0.5, 100.0, 2.5}));
  EXPECT_EQ(kind.csv, "a.csv");
  EXPECT_EQ(kind.csv_form, "compute_comms");
  EXPECT_EQ(kind.svg, "a.svg");
  EXPECT_EQ(kind.trace, "a.json");
  EXPECT_THAT(kind.exchanges, IsEmpty());
  // A word behind three costs is none of them.
  const auto turns = std::get<ScheduleArguments>(
      parse({"schedule", "--costs", "1,2,3", "Paired1F1B", "--exchanges", "3,2", "--layers", "4",
             "--exchange-cost", "0.5"}));
  EXPECT_EQ(turns.schedule, "Paired1F1B");
  EXPECT_EQ(turns.costs, (std::vector<double>{1.0, 2.0, 3.0}));
  EXPECT_EQ(turns.exchanges, (std::vector<int>{3, 2}));
  EXPECT_EQ(turns.layers, 4);
  EXPECT_EQ(turns.exchange_cost, 0.5);
  const auto file = std::get<ScheduleArguments>(parse({"schedule", "b.csv", "--costs-from", "t"}));
  EXPECT_EQ(file.schedule, "b.csv");
  EXPECT_EQ(file.ranks, std::nullopt);
  EXPECT_EQ(file.costs_from, "t");
  EXPECT_EQ(file.csv_form, "compute_only");
}

TEST(Arguments, ScheduleRefusesWhatItDoesNotTake) {
  EXPECT_THAT(refusal({"schedule"}), Says("schedule"));
  // Option by option what is too few, too many, negative, huge or no number.
  const std::vector<std::pair<std::string, std::vector<std::string>>> hostile{
      {"--costs",
       {"", "1", "1,1", "1,1,1,1,1", "1,1,x,1", "1,1,-1,1", "1,1,nan,1", "1,1,inf,1", "1,,1",
        "1,1,1,", "1e10,1,1", "1;1;1", "-1,1,1", "1,1,1 "}},
      {"--exchanges",
       {"", "3", "3,2,1", "-3,2", "3,-2", "3,x", "3,2.5", "65,2", "3,99999999999999999999", ",",
        "3,", "0x3,2", "3 2"}},
      {"--layers", {"", "0", "-1", "4097", "99999999999999999999", "four", "4.0", "4,4"}},
      {"--exchange-cost", {"", "-1", "1e10", "nan", "inf", "five", "5ms", "5,5", "1e999"}},
      {"--ranks", {"0", "-4", "4294967296", "1e3"}},
      {"--micro-batches", {"0", "-8", "eight", "99999999999"}},
      {"--stages-per-rank", {"0", "-2", "V"}}};
  const std::map<std::string, std::string> right{
      {"--exchanges", "3,2"}, {"--layers", "4"}, {"--exchange-cost", "5"}};
  for (const auto& [option, values] : hostile) {
    for (const std::string& value : values) {
      std::vector<std::string> words{"schedule", "GPipe", option, value};
      for (const auto& [other, given] : right) {
        if (other != option) words.insert(words.end(), {other, given});
      }
      EXPECT_THAT(refusal(words), Says(option)) << option << ' ' << value;
    }
  }
  EXPECT_THAT(refusal({"schedule", "GPipe", "--exchanges", "3,2"}), Says("--exchange-cost"));
  EXPECT_THAT(refusal({"schedule", "GPipe", "--exchange-cost", "5"}), Says("--exchanges"));
  EXPECT_THAT(refusal({"schedule", "GPipe", "--layers", "5"}), Says("--exchanges"));
  EXPECT_THAT(refusal({"schedule", "GPipe", "--costs", "1,1,1,1", "--costs-from", "t"}),
              Says("excludes"));
  EXPECT_THAT(refusal({"schedule", "GPipe", "--csv-form", "all"}), Says("--csv-form"));
  EXPECT_THAT(refusal({"schedule", "GPipe", "--ranks", "two"}),
              Says("--ranks: found 'two', expected a whole number"));
  EXPECT_THAT(refusal({"schedule", "GPipe", "--training.steps", "3"}),
              Says("schedule: found --training.steps"));
}

TEST(Arguments, InspectTakesAFolderOrAContract) {
  EXPECT_EQ(std::get<InspectArguments>(parse({"inspect", "m", "--json"})).folder, "m");
  const auto contract =
      std::get<InspectArguments>(parse({"inspect", "--contract", "a.toml", "--world", "4"}));
  EXPECT_EQ(contract.contract_file, "a.toml");
  EXPECT_EQ(contract.world, 4);
}

TEST(Arguments, GenerateTakesAPromptAndHowToChoose) {
  const auto greedy = std::get<GenerateArguments>(
      parse({"generate", "--model", "m", "--prompt", "a -b, [c] --d", "--max-new-tokens", "5"}));
  EXPECT_EQ(greedy.model, "m");
  EXPECT_EQ(greedy.prompt, "a -b, [c] --d");
  EXPECT_EQ(greedy.prompt_tokens, std::nullopt);
  EXPECT_EQ(greedy.max_new_tokens, 5);
  EXPECT_EQ(greedy.temperature, 0.0);
  EXPECT_EQ(greedy.top_k, 0);
  EXPECT_EQ(greedy.top_p, 1.0);
  EXPECT_EQ(greedy.seed, 42U);
  const auto drawn = std::get<GenerateArguments>(
      parse({"generate", "--model", "m", "--prompt-tokens", "1,2,3", "--max-new-tokens", "5",
             "--temperature", "0.8", "--top-k", "40", "--top-p", "0.95", "--seed",
             "18446744073709551615", "--precision.param_dtype", "bfloat16"}));
  EXPECT_EQ(drawn.prompt_tokens, "1,2,3");
  EXPECT_EQ(drawn.temperature, 0.8);
  EXPECT_EQ(drawn.top_k, 40);
  EXPECT_EQ(drawn.top_p, 0.95);
  EXPECT_EQ(drawn.seed, 18446744073709551615U);
  EXPECT_EQ(drawn.overrides, (Overrides{{"precision.param_dtype", "bfloat16"}}));
  const Words empty{"generate", "--model", "m", "--prompt", "", "--max-new-tokens", "5"};
  EXPECT_EQ(std::get<GenerateArguments>(parse(empty)).prompt, "");
}

TEST(Arguments, ConvertTakesTwoFoldersAndOptions) {
  const auto plain = std::get<ConvertArguments>(parse({"convert", "a", "b"}));
  EXPECT_EQ(plain.source, "a");
  EXPECT_EQ(plain.out, "b");
  EXPECT_EQ(plain.dtype, "auto");
  EXPECT_EQ(plain.max_shard_size, std::nullopt);
  EXPECT_FALSE(plain.verify);
  const auto chosen = std::get<ConvertArguments>(
      parse({"convert", "a", "--dtype", "bfloat16", "b", "--max-shard-size=10KB", "--verify"}));
  EXPECT_TRUE(chosen.verify);
  EXPECT_EQ(chosen.out, "b");
  EXPECT_EQ(chosen.dtype, "bfloat16");
  EXPECT_EQ(chosen.max_shard_size, "10KB");
}

std::string shown(const Words& words) { return std::get<ShowText>(parse(words)).text; }

const std::vector<std::string>& all_verbs() {
  static const std::vector<std::string> names{"train",    "gradients", "inspect",
                                              "generate", "convert",   "schedule",
                                              "plan",     "check",     "measure"};
  return names;
}

// Naive: four options, and 350 lines of keys behind them.
TEST(Arguments, HelpOfAVerbIsItsOwnOptionsOnAScreen) {
  std::vector<Words> all{{"--help"}, {"-h"}};
  for (const std::string& verb : all_verbs()) all.push_back({verb, "--help"});
  for (const Words& words : all) {
    std::istringstream text(shown(words));
    int lines = 0;
    for (std::string line; std::getline(text, line); ++lines) EXPECT_LE(line.size(), 80U) << line;
    EXPECT_LE(lines, 40) << words[0];
    EXPECT_GE(lines, 8) << words[0];
  }
  for (const std::string& verb : all_verbs()) EXPECT_THAT(shown({"--help"}), Says(verb));
  EXPECT_THAT(shown({"train", "-h"}),
              Says("Usage: tessera train CONFIG.toml [options]", "--nproc N", "--help-keys"));
  EXPECT_THAT(shown({"generate", "-h"}),
              Says("--top-p X", "--model VALUE", "(required)", "(not with --prompt-tokens)"));
}

TEST(Arguments, HelpKeysHasEveryKeyOrThoseOfASection) {
  const std::string all = shown({"--help-keys"});
  std::size_t keys = 0;
  for (const train::ConfigKey& key : train::config_keys()) {
    const std::string line = "\n  " + key.full_name() + "  " + key.type;
    EXPECT_THAT(all, Says(line));
    const std::string of = key.section.empty() ? key.name : key.section;
    const std::string section = shown({"train", "--help-keys", of});
    EXPECT_THAT(section, Says(line));
    EXPECT_LE(std::ranges::count(section, '\n'), 45) << of;
    for (const train::ConfigKey& other : train::config_keys()) {
      if (other.section == key.section) continue;
      EXPECT_THAT(section, Not(Says("\n  " + other.full_name() + "  "))) << of;
    }
    ++keys;
  }
  EXPECT_GT(keys, 80U);
  EXPECT_EQ(shown({"plan", "a.toml", "--help-keys=lora"}), shown({"--help-keys", "lora"}));
  EXPECT_EQ(shown({"--help-keys", "--nproc"}), all);
  EXPECT_THAT(shown({"--help-keys", "optimizer.lr"}),
              AllOf(Says("optimizer.lr"), Not(Says("optimizer.name"))));
  EXPECT_THAT(shown({"generate", "--help-keys"}),
              AllOf(Says("precision.param_dtype"), Not(Says("training.steps"))));
  EXPECT_EQ(refusal({"--help-keys", "optimiser"}),
            "--help-keys: unknown section 'optimiser'; the nearest is [optimizer]");
  EXPECT_THAT(refusal({"schedule", "--help-keys"}), Says("expected no key"));
}

TEST(Arguments, HelpOfAVerbThatTakesAModelNamesTheFolderOfARun) {
  for (const std::string verb : {"inspect", "generate", "convert", "gradients"}) {
    const std::string text = std::get<ShowText>(parse({verb, "--help"})).text;
    EXPECT_THAT(text, ContainsRegex("[Aa] run's folder \\(its latest checkpoint\\)")) << verb;
  }
  EXPECT_THAT(std::get<ShowText>(parse({"convert", "--help"})).text, Not(Says("training.steps")))
      << "it takes one key only";
}

// Naive: "The following arguments were not expected: 5 --steps", to somebody who has just read
// `steps = 5` in a file.
TEST(Arguments, AnUnknownOptionIsToldWhatItMostLikelyMeans) {
  EXPECT_EQ(refusal({"train", "a.toml", "--steps", "5"}),
            "unknown option '--steps', expected a key with its section: --training.steps, "
            "--validation.steps; see tessera train --help");
  EXPECT_THAT(refusal({"gradients", "--model", "m", "--batch", "b", "--out", "o", "--seq_len=8"}),
              Says("unknown option '--seq_len', expected a key with its section: "
                   "--training.seq_len"));
  EXPECT_EQ(refusal({"train", "a.toml", "--nprocs", "2"}),
            "unknown option '--nprocs'; the nearest is --nproc; see tessera train --help");
  EXPECT_THAT(refusal({"generate", "--model", "m", "--prompt", "x", "--max_new_tokens", "5"}),
              Says("unknown option '--max_new_tokens'; the nearest is --max-new-tokens"))
      << "not that --max-new-tokens is missing";
  EXPECT_THAT(refusal({"generate", "--model", "m", "--prompt", "x", "--max-new-tokens", "5",
                       "--temp", "1"}),
              Says("unknown option '--temp'; the nearest is --temperature"));
  EXPECT_THAT(refusal({"train", "--config", "a.toml"}),
              Says("expected the file alone, as in tessera train CONFIG.toml"));
  EXPECT_THAT(refusal({"train", "a.toml", "--seq-len", "8"}), Says("--training.seq_len"));
  // Names of others: without a section, with torchtitan's dashes, and where no key is meant.
  EXPECT_EQ(refusal({"train", "a.toml", "--learning-rate", "1e-4"}),
            "unknown option '--learning-rate'; it is called --optimizer.lr here; see tessera train "
            "--help");
  EXPECT_THAT(refusal({"train", "a.toml", "--context_parallel_degree=2"}),
              Says("--parallelism.context_parallel_degree"));
  EXPECT_THAT(refusal({"train", "a.toml", "--disable_loss_parallel"}), Says("it is no key here"));
  EXPECT_THAT(refusal({"train", "a.toml", "--warmup-step", "2"}),
              Says("the nearest is --lr_scheduler.warmup_steps"));
  EXPECT_EQ(refusal({"train", "a.toml", "--zzyzx", "2"}),
            "unknown option '--zzyzx'; see tessera train --help");
  EXPECT_THAT(refusal({"convert", "a", "b", "--learning-rate", "5"}), Not(Says("lr")));
  // These take no such key.
  EXPECT_THAT(refusal({"convert", "a", "b", "--steps", "5"}), Not(Says("section")));
  EXPECT_THAT(refusal({"inspect", "a", "--steps", "5"}), Not(Says("section")));
  EXPECT_THAT(refusal({"generate", "--model", "m", "--prompt", "x", "--steps", "5"}),
              Not(Says("section")));
  EXPECT_THAT(refusal({"inspect", "--contract", "a.toml", "--steps=5"}), Says("--training.steps"));
}

// Sizes as people write them, in any case; a rate with /s. Naive: 80 as 80 bytes, Gb/s as GB/s.
TEST(Arguments, SizesAndRatesAreTakenAsPeopleWriteThem) {
  const auto plan = [](const std::string& option, const std::string& value) {
    Words words{"plan",        "a.toml", "--flops",         "4e14",
                "--bandwidth", "50GB",   "--device-memory", "80GB"};
    *(std::ranges::find(words, option) + 1) = value;
    return words;
  };
  for (const std::string unit : {"GB", "gb", "G", "g", "GiB", "gib", "Gi", "MB", "tb"}) {
    EXPECT_NO_THROW(parse(plan("--device-memory", "80" + unit))) << unit;
    const bool small_b = unit.ends_with('b');
    for (const std::string rate : {"", "/s"}) {
      const auto words = plan("--bandwidth", "50" + unit + rate);
      if (small_b) {
        EXPECT_THAT(refusal(words), Says("'50" + unit + rate + "', expected bytes a second"));
      } else {
        EXPECT_EQ(std::get<PlanArguments>(parse(words)).machine.bandwidth, "50" + unit);
      }
    }
  }
  EXPECT_NO_THROW(parse(plan("--device-memory", "85899345920")));
  for (const std::string option : {"--device-memory", "--bandwidth"}) {
    for (const std::string bare : {"1", "80", "1048575"}) {
      EXPECT_THAT(refusal(plan(option, bare)),
                  Says(option + ": found '" + bare + "', expected a unit, as " + bare + "GiB"));
    }
    for (const std::string wrong : {"", "GB", "80 gigs", "80GBs", "-80GB", "80GB/h", "1.5GB"}) {
      EXPECT_THAT(refusal(plan(option, wrong)), Says(option)) << wrong;
    }
  }
  EXPECT_THAT(refusal(plan("--bandwidth", "400Gb/s")), Says("a small b may stand for bits"));
  for (const std::string rate : {"1e-300", "0.5", "0", "-1", "nan", "inf", "1e22"}) {
    EXPECT_THAT(refusal(plan("--flops", rate)),
                Says("--flops: found '" + rate + "', expected a number from 1 to "));
  }
  EXPECT_NO_THROW(parse(plan("--flops", "1")));
}

// Naive: --flops alone is a rate without a wire, and with --machine still wants --bandwidth.
TEST(Arguments, ARateAloneNeedsTheOtherOneUnlessAMachineHasIt) {
  for (const Words& verb : {Words{"plan", "a.toml"}, Words{"inspect", "--contract", "a.toml"}}) {
    for (const Words& rate : {Words{"--flops", "1e9"}, Words{"--bandwidth", "1MB"}}) {
      Words words = verb;
      words.insert(words.end(), rate.begin(), rate.end());
      EXPECT_THAT(refusal(words), Says(verb[0] + ": found " + rate[0] + " without --"));
      words.insert(words.end(), {"--machine", "h100"});
      EXPECT_NO_THROW(parse(words));
    }
  }
  const Words schedule{"schedule",        "GPipe", "--ranks",   "2",
                       "--micro-batches", "2",     "--machine", "h100"};
  EXPECT_THAT(refusal(schedule), Says("--machine requires --costs-from"));
  EXPECT_THAT(refusal({"inspect", "a", "--machine", "h100"}), Says("--contract"));
}

TEST(Arguments, MeasureHasAFileRanksAndKeysOfDeviceAndComm) {
  const auto measure = std::get<MeasureArguments>(
      parse({"measure", "--out", "a.toml", "--nproc", "3", "--device", "cpu"}));
  EXPECT_EQ(measure.out, "a.toml");
  EXPECT_EQ(measure.nproc, 3);
  EXPECT_EQ(measure.overrides, (Overrides{{"device", "cpu"}}));
  EXPECT_THAT(shown({"measure", "--help-keys"}),
              AllOf(Says("comm.backend"), Not(Says("training."))));
}

/// The first option of the list that the verb has; "" for none.
std::string first_of(const Words& options, const std::string& verb) {
  const std::string help = shown({verb, "--help"});
  const auto found = std::ranges::find_if(options, [&](const std::string& option) {
    return help.find("\n  " + option + " ") != std::string::npos;
  });
  return found == options.end() ? "" : *found;
}

// Drawn: the options of all verbs and of other launchers for the number of ranks, in every verb,
// with dashes or underscores, one dash or two. Naive: --ranks is near to --lora.rank.
TEST(Arguments, OptionsOfOtherVerbsAndLaunchersAreToldWhatTheyAreCalledHere) {
  const Words names{
      "nproc",    "world",         "ranks", "nproc_per_node", "np",    "n", "world_size",
      "num_gpus", "num_processes", "gpus",  "gpus-per-node",  "n-gpus"};
  const std::vector<Words> starts{{"train", "a.toml"},
                                  {"plan", "a.toml"},
                                  {"inspect", "--contract", "a.toml"},
                                  {"gradients", "--model", "m", "--batch", "b", "--out", "o"},
                                  {"schedule", "GPipe"},
                                  {"convert", "a", "b"},
                                  {"generate", "--model", "m", "--prompt", "x"},
                                  {"measure"}};
  std::mt19937 random(5);
  for (const Words& start : starts) {
    const std::string here = first_of({"--nproc", "--world", "--ranks"}, start[0]);
    const std::string says = here.empty() ? "tessera " + start[0] + " runs as one process"
                                          : "it is called " + here + " here";
    for (const std::string& name : names) {
      const std::string option = (name.size() < 3 && random() % 2 == 0 ? "-" : "--") + name;
      if (option == here) continue;
      Words words = start;
      const bool is_last = random() % 2 == 0;
      words.insert(is_last ? words.end() : words.begin() + 1, {option, "4"});
      EXPECT_EQ(refusal(words), "unknown option '" + option + "'; " + says + "; see tessera " +
                                    start[0] + " --help");
    }
  }
}

// Tries every option of every verb in every other one that has not got it.
TEST(Arguments, AnOptionOfAnotherVerbIsNeverNearSomethingElse) {
  const std::pair<const char*, const char*> cases[] = {
      {"--contract", "inspect"}, {"--actions", "plan"},   {"--check", "plan"},
      {"--merged", "convert"},   {"--svg", "schedule"},   {"--impose-routing", "gradients"},
      {"--top-p", "generate"},   {"--costs", "schedule"}, {"--bandwidth", "inspect, plan, check"}};
  for (const auto& [option, verb] : cases) {
    EXPECT_EQ(refusal({"train", "a.toml", option}), std::string("unknown option '") + option +
                                                        "'; it is an option of " + verb +
                                                        "; see tessera train --help");
  }
  EXPECT_THAT(refusal({"train", "a.toml", "--model", "m"}), Says("it is called --model.path here"));
}

// Naive: its value is taken for a folder, "DIR excludes --contract".
TEST(Arguments, AnUnknownOptionIsNamedBeforeWhatItsValueExcludes) {
  for (const std::string option : {"--nproc", "--zzyzx", "--worlds"}) {
    EXPECT_THAT(refusal({"inspect", "--contract", "c.toml", option, "4"}),
                AllOf(Says("unknown option '" + option + "'"), Not(Says("excludes"))));
    EXPECT_THAT(refusal({"inspect", option, "4", "--world", "2", "--json"}),
                Says("unknown option '" + option + "'"));
  }
  EXPECT_THAT(refusal({"inspect", "d", "--contract", "c.toml"}), Says("excludes"));
}

// A prompt may look like an option.
TEST(Arguments, AValueIsNotTakenForAnUnknownOption) {
  EXPECT_THAT(refusal({"generate", "--model", "m", "--prompt", "--hello"}),
              Says("found no --max-new-tokens"));
}

TEST(Arguments, NumbersAreDecimal) {
  const auto parsed = std::get<TrainArguments>(parse({"train", "a.toml", "--nproc", "010"}));
  EXPECT_EQ(parsed.nproc, 10);
}

TEST(Arguments, VersionIsMadeOnlyWhenAsked) {
  EXPECT_EQ(std::get<ShowText>(parse({"--version"})).text, "tessera 1 (git abc)\n");
  EXPECT_NO_THROW(parse_arguments({"train", "a.toml"},
                                  []() -> std::string { throw std::logic_error("version made"); }));
}

TEST(Arguments, RefusalsAreOneLineAndNameTheWord) {
  const std::string verbs =
      "train, gradients, inspect, generate, convert, schedule, plan, check, "
      "measure";
  EXPECT_EQ(refusal({}), "found no verb, expected one of " + verbs + "; see tessera --help");
  EXPECT_EQ(refusal({"trian"}),
            "unknown verb 'trian', expected one of " + verbs + "; the nearest is train");
  EXPECT_THAT(refusal({"help"}), Says("the nearest is --help"));
  EXPECT_EQ(refusal({"finetune"}),
            "unknown verb 'finetune', expected one of " + verbs + "; see tessera --help");
  EXPECT_THAT(refusal({"--nproc", "2", "train", "a.toml"}), Says("found '--nproc' first"));
  EXPECT_EQ(refusal({"train"}),
            "train: found no CONFIG.toml, expected it; see tessera train --help");
  EXPECT_THAT(refusal({"train", "a.toml", "b.toml"}), Says("b.toml"));
  for (const std::string ranks : {"0", "two", "4097", "2.5", ""}) {
    EXPECT_THAT(refusal({"train", "a.toml", "--nproc", ranks}),
                Says("--nproc: found '" + ranks + "', expected a whole number from 1 to 4096"));
  }
  EXPECT_THAT(refusal({"train", "a.toml", "--training.steps"}), Says("--training.steps"));
  EXPECT_THAT(refusal({"train", "a.toml", "--training.steps", "--optimizer.lr", "1"}),
              Says("--training.steps: found no value"));
  EXPECT_THAT(refusal({"gradients", "--model", "m", "--batch", "b"}), Says("--out"));
  EXPECT_THAT(refusal({"inspect"}), Says("inspect"));
  EXPECT_THAT(refusal({"generate", "--model", "m", "--max-new-tokens", "1"}),
              Says("found no prompt"));
  EXPECT_THAT(refusal({"generate", "--model", "m", "--prompt", "x"}), Says("--max-new-tokens"));
  EXPECT_THAT(refusal({"generate", "--model", "m", "--prompt", "x", "--prompt-tokens", "1",
                       "--max-new-tokens", "1"}),
              Says("--prompt-tokens"));
  for (const Words& bad :
       {Words{"--max-new-tokens", "0"}, Words{"--temperature", "-1"}, Words{"--temperature", "nan"},
        Words{"--temperature", "-nan"}, Words{"--temperature", "inf"},
        Words{"--temperature", "1e400"}, Words{"--temperature", "1x"}, Words{"--temperature", ""},
        Words{"--top-k", "0"}, Words{"--top-p", "0"}, Words{"--top-p", "-0.5"},
        Words{"--top-p", "1.0000001"}, Words{"--top-p", "nan"}, Words{"--top-p", "half"},
        Words{"--seed", "-1"}, Words{"--seed", "1.5"}, Words{"--seed", "18446744073709551616"},
        Words{"--seed", "99999999999999999999"}}) {
    Words words{"generate", "--model", "m", "--prompt", "x", "--max-new-tokens", "1"};
    if (bad[0] == "--max-new-tokens") words.resize(5);
    words.insert(words.end(), bad.begin(), bad.end());
    EXPECT_THAT(refusal(words), Says(bad[0]));
  }
  EXPECT_THAT(refusal({"convert", "a"}), Says("convert: found no OUT"));
  for (const Words& words : {Words{}, Words{"train"}, Words{"trian"}}) {
    EXPECT_EQ(refusal(words).find('\n'), std::string::npos);
  }
}

// Options that have no effect on the report are refused by name, not left out.
TEST(Arguments, DiffRefusesWhatItDoesNotRead) {
  const auto with = [](Words words, const Words& more) {
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  const auto diff = [&](const std::string& suffix, const Words& more) {
    return with({"gradients", "--diff", "a" + suffix, "b" + suffix}, more);
  };
  const std::vector<Words> of_no_diff{
      {"--out", "o.safetensors"}, {"--nproc", "2"}, {"--impose-routing"}};
  for (const auto& more : of_no_diff) {
    EXPECT_THAT(refusal(diff(".safetensors", more)), Says(more.front(), "--diff"));
    EXPECT_THAT(refusal(with(diff(".toml", {"--batch", "b.safetensors"}), more)),
                Says(more.front(), "--diff"));
  }
  const std::vector<Words> of_no_files{{"--model", "m"},
                                       {"--batch", "b.safetensors"},
                                       {"--precision.param_dtype", "float32"},
                                       {"--device", "cpu"}};
  for (const auto& more : of_no_files) {
    EXPECT_THAT(refusal(diff(".safetensors", more)),
                Says(more.front(), "with two files of gradients"));
    auto words = diff(".toml", {"--batch", "b.safetensors"});
    if (more.front() != "--batch") words = with(words, more);
    EXPECT_EQ(std::get<GradientsArguments>(parse(words)).diff.size(), 2U);
  }
  for (const std::string suffix : {"", ".st", ".safetensors.bak", "/"}) {
    EXPECT_THAT(refusal(diff(suffix, {})), Says("--diff: found 'a", ".safetensors", ".toml"));
  }
  EXPECT_THAT(refusal({"gradients", "--diff", "a.toml", "b.safetensors"}),
              Says("two files of gradients, or two configurations"));
  EXPECT_EQ(std::get<GradientsArguments>(parse(diff(".safetensors", {"--json"}))).diff.size(), 2U);
}

}  // namespace
}  // namespace tessera::cli::arguments_test
