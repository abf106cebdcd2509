#include "cli/arguments.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <algorithm>
#include <cctype>
#include <charconv>
#include <iterator>
#include <limits>
#include <string_view>
#include <system_error>

#include "base/text/printable.h"
#include "base/text/wildcard.h"
#include "cli/help_text.h"
#include "cli/option_values.h"
#include "cli/other_options.h"
#include "tessera/error.h"
#include "train/config/config_keys.h"
#include "train/config/config_names.h"

namespace tessera::cli {
namespace {

constexpr std::int64_t kMostNewTokens = std::int64_t{1} << 31;

// The name of `--name` or `--name=VALUE`, "" for another word.
std::string_view option_name(std::string_view word) {
  if (!word.starts_with("--")) return {};
  return word.substr(2, word.find('=') == std::string_view::npos ? word.npos : word.find('=') - 2);
}

// `--name` of that or of `--name=VALUE`, `-name` with one dash as well; "" for another word.
std::string dashed_name(const std::string& word) {
  const std::size_t first = word.find_first_not_of('-');
  if (first == 0 || first == std::string::npos || first > 2) return "";
  if (std::isalpha(static_cast<unsigned char>(word[first])) == 0) return "";
  return word.substr(0, word.find('='));
}

bool is_override(std::string_view word) {
  const std::string_view name = option_name(word);
  if (name.find('.') != std::string_view::npos) return true;
  const train::ConfigKey* key = train::find_key(name);
  return key != nullptr && key->section.empty();
}

struct SplitWords {
  Overrides overrides;             ///< in their order
  std::vector<std::string> other;  ///< everything else, in its order
};

/// Takes `--section.key VALUE`, `--section.key=VALUE` and the same of keys at top level out of
/// `words`; no other option has a dot in its name. Errors: kUsage for one without a VALUE. Whether
/// the key exists is apply()'s to say.
SplitWords split_overrides(const std::vector<std::string>& words) {
  SplitWords split;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (!is_override(words[i])) {
      split.other.push_back(words[i]);
      continue;
    }
    const std::string name(option_name(words[i]));
    const std::size_t equals = words[i].find('=');
    if (equals != std::string::npos) {
      split.overrides.emplace_back(name, words[i].substr(equals + 1));
      continue;
    }
    TESSERA_CHECK(i + 1 < words.size() && !words[i + 1].starts_with("--"), ErrorKind::kUsage,
                  words[i], ": found no value, expected one, as in ", words[i], " VALUE");
    split.overrides.emplace_back(name, words[++i]);
  }
  return split;
}

// Owns what the parser writes to, until the verb that was given is known.
struct Parsed {
  TrainArguments train;
  GradientsArguments gradients;
  InspectArguments inspect;
  GenerateArguments generate;
  ConvertArguments convert;
  ScheduleArguments schedule;
  PlanArguments plan;
  CheckArguments check;
  MeasureArguments measure;
};

::CLI::Option* add_nproc(::CLI::App& verb, std::optional<int>& nproc) {
  return verb
      .add_option("--nproc", nproc,
                  "Local ranks to start; default: the product of the parallelism degrees. Under a "
                  "launcher it has to be the world size.")
      ->transform(whole_number(kMostRanks));
}

void add_train(::CLI::App& app, TrainArguments& train, const std::string& keys) {
  ::CLI::App* verb =
      app.add_subcommand("train", "Train the model that a TOML file describes, or resume its run.");
  verb->add_option("CONFIG.toml", train.config_file, "The TOML file of the run.")->required();
  verb->add_flag("--print-config", train.print_config,
                 "Print the configuration after all overrides, and exit.");
  verb->add_flag("--profile", train.profile,
                 "Print the time of a step by part at the end: products, other kernels, waiting, "
                 "optimizer, own code (rank 0, from step 4 on).");
  add_nproc(*verb, train.nproc);
  verb->footer(keys);
}

constexpr std::string_view kSafetensors = ".safetensors";
constexpr const char* kModelFolder =
    "A run's folder (its latest checkpoint), checkpoint/step-N of one, or a Hugging Face folder.";

void add_gradients(::CLI::App& app, GradientsArguments& gradients, const std::string& keys) {
  ::CLI::App* verb = app.add_subcommand(
      "gradients", "Compute loss and gradients of one batch under any layout, or compare two.");
  verb->add_option("--model", gradients.model, kModelFolder);
  verb->add_option("--batch", gradients.batch, ".safetensors with input_ids and labels [B,T].");
  ::CLI::Option* out =
      verb->add_option("--out", gradients.out,
                       ".safetensors to write; with --precision-what-if its report as JSON.");
  ::CLI::Option* no_logits = verb->add_flag("--no-logits", gradients.no_logits, "Write no logits.");
  ::CLI::Option* routing =
      verb->add_flag("--impose-routing", gradients.impose_routing,
                     "Take the choice of experts from router/<i>/indices of the batch file.");
  ::CLI::Option* what_if =
      verb->add_flag("--precision-what-if", gradients.precision_what_if,
                     "Run the batch with groups of parameters in bfloat16 and in float32; print "
                     "the error of each gradient and the cheapest policy within --bound.")
          ->excludes(no_logits);
  ::CLI::Option* nproc = add_nproc(*verb, gradients.nproc);
  verb->add_option("--bound", gradients.bound,
                   "The largest error |g - g32| / |g32| of a gradient; default 0.05.")
      ->check(not_a_share, "FLOAT above 0, at most 1")
      ->needs(what_if);
  verb->add_option("--diff", gradients.diff,
                   "Compare two files of --out, or the gradients of two TOML files: equal, "
                   "different by rounding, or wrong and where that begins.")
      ->expected(2)
      ->excludes(no_logits)
      ->excludes(what_if)
      ->excludes(out)
      ->excludes(routing)
      ->excludes(nproc);
  verb->add_flag("--json", gradients.json,
                 "Print the report of --precision-what-if or --diff as JSON.");
  verb->footer(keys);
}

constexpr const char* kWorld = "Ranks to plan for; default: as many as train starts.";

void add_inspect(::CLI::App& app, InspectArguments& inspect, const std::string& keys) {
  ::CLI::App* verb = app.add_subcommand(
      "inspect",
      "List the tensors of a folder, or show the contract, memory and traffic of a run.");
  ::CLI::Option* folder =
      verb->add_option("DIR", inspect.folder,
                       "A run's folder (its latest checkpoint), checkpoint/step-N of one, a "
                       "Hugging Face folder, or one safetensors file.");
  verb->add_flag("--json", inspect.json, "Print JSON.");
  ::CLI::Option* contract =
      verb->add_option("--contract", inspect.contract_file,
                       "TOML file of a run: show what a rank holds and sends, each parameter's "
                       "contract with the reason of each value, and the bucket plan.");
  contract->excludes(folder);
  verb->add_flag("--all", inspect.all, "Show each layer, instead of one line for equal layers.")
      ->needs(contract);
  verb->add_option("--lock", inspect.lock,
                   "Write the contract to this file, for contract.lock: each value of each "
                   "parameter, buffer and unit on a line, sorted.")
      ->needs(contract);
  verb->add_option("--world", inspect.world, kWorld)
      ->needs(contract)
      ->transform(whole_number(1 << 20));
  add_expert_loads(*verb, inspect.expert_loads)->needs(contract);
  add_machine(*verb, inspect.machine);
  for (const char* option : kMachineOptions) verb->get_option(option)->needs(contract);
  verb->footer("With --contract: " + keys);
}

void add_generate(::CLI::App& app, GenerateArguments& generate) {
  ::CLI::App* verb = app.add_subcommand("generate", "Generate tokens after a prompt.");
  verb->add_option("--model", generate.model, kModelFolder)->required();
  ::CLI::Option* text = verb->add_option(
      "--prompt", generate.prompt, "Text, for models trained on bytes; \"\" begins a document.");
  ::CLI::Option* ids =
      verb->add_option("--prompt-tokens", generate.prompt_tokens, "Token ids, as 1,2,3.");
  text->excludes(ids);
  verb->add_option("--max-new-tokens", generate.max_new_tokens,
                   "The most tokens to generate; fewer where the model ends the document or has no "
                   "position left.")
      ->required()
      ->transform(whole_number(kMostNewTokens));
  verb->add_option("--temperature", generate.temperature,
                   "0 (default): take the most likely token; above 0: draw from softmax(logits / "
                   "temperature).")
      ->check(not_a_temperature, "FLOAT from 0 to 1e6");
  verb->add_option("--top-k", generate.top_k, "Draw from the N most likely tokens only.")
      ->transform(whole_number(kMostNewTokens));
  verb->add_option("--top-p", generate.top_p,
                   "Draw from the fewest of these whose probabilities add up to X; default 1: all.")
      ->check(not_a_share, "FLOAT above 0, at most 1");
  verb->add_option("--seed", generate.seed, "Seed of the draws; default 42.")
      ->check(not_a_seed, "below 2^64");
  verb->footer(
      "Prints the new tokens only: text after --prompt, ids after --prompt-tokens. Computes in the "
      "dtypes of the folder; --precision.KEY VALUE and --device VALUE change that.");
}

void add_convert(::CLI::App& app, ConvertArguments& convert) {
  ::CLI::App* verb = app.add_subcommand("convert",
                                        "Convert a checkpoint to a Hugging Face folder for "
                                        "transformers, or adapters to a folder for peft.");
  verb->add_option("CHECKPOINT", convert.source, kModelFolder)->required();
  verb->add_option("OUT", convert.out, "The folder to write; it must not exist, or be empty.")
      ->required();
  verb->add_option("--dtype", convert.dtype,
                   "auto (default): the dtype of each tensor in the folder that training began "
                   "with, else as stored; or float32, bfloat16 for all.");
  verb->add_option("--max-shard-size", convert.max_shard_size,
                   "The most bytes of a file, or with KB MB GB KiB MiB GiB; default 5GB. Adapters "
                   "are one file.");
  verb->add_flag("--merged", convert.merged,
                 "For a checkpoint of adapters: write the model with the adapters added, instead "
                 "of peft's files.");
  verb->add_flag(
      "--whole", convert.whole,
      "For a text model that was taken from a larger model: write the larger model, with its "
      "config.json and with what training left out, as a vision tower, unchanged.");
  verb->add_flag("--verify", convert.verify,
                 "Then compare OUT with the source: each tensor is equal, cast or changed (exit "
                 "code 3). An OUT that exists is only compared.");
  verb->footer("Takes one key of the configuration, --model.allow_unknown_config_keys VALUE.");
}

void add_schedule(::CLI::App& app, ScheduleArguments& schedule) {
  ::CLI::App* verb = app.add_subcommand(
      "schedule", "Make, validate and simulate a pipeline schedule, without a model.");
  verb->add_option("KIND|FILE.csv", schedule.schedule,
                   "GPipe, 1F1B, Interleaved1F1B, ZB1P, InterleavedZeroBubble, ZBV, DualPipeV, "
                   "Paired1F1B (PyTorch's names, too), or FILE.csv in PyTorch's form.")
      ->required();
  const auto count = whole_number(std::numeric_limits<int>::max());
  verb->add_option("--ranks", schedule.ranks, "Ranks of the pipeline; a file has one a row.")
      ->transform(count);
  verb->add_option("--micro-batches", schedule.micro_batches,
                   "Micro-batches of a step; a file has those up to its highest number.")
      ->transform(count);
  verb->add_option("--stages-per-rank", schedule.stages_per_rank, "Default: the kind's, 1 or 2.")
      ->transform(count);
  ::CLI::Option* costs = add_costs(*verb, schedule.costs);
  ::CLI::Option* costs_from = verb->add_option(
      "--costs-from", schedule.costs_from,
      "Costs of each stage from a trace of --trace (rows 'slots' and 'messages'), in ms, or from a "
      "configuration (.toml), in GFLOP, with --machine or --flops in ms.");
  costs_from->excludes(costs);
  add_described(*verb, schedule.machine)->needs(costs_from);
  add_flops(*verb, schedule.machine, "Operations a second of a rank, as 4e14.")->needs(costs_from);
  add_exchanges(*verb, schedule);
  verb->add_option("--csv", schedule.csv, "Write the lists to this file, in PyTorch's form.");
  verb->add_option(
          "--csv-form", schedule.csv_form,
          "compute_only (default), or compute_comms with messages and moves of parameters.")
      ->check(::CLI::IsMember({"compute_only", "compute_comms"}));
  verb->add_option("--svg", schedule.svg, "Write a picture to this file.");
  verb->add_option(
      "--trace", schedule.trace,
      "Write a trace for ui.perfetto.dev to this file, a unit of cost as a millisecond.");
  verb->footer("Exit code 3 where a file does not validate; prints every finding.");
}

void add_plan(::CLI::App& app, PlanArguments& plan, const std::string& keys) {
  ::CLI::App* verb = app.add_subcommand(
      "plan", "Show memory, choices and actions of a run's step, without running it.");
  verb->add_option("CONFIG.toml", plan.config_file,
                   "The TOML file of the run; [compile] says what may be chosen.")
      ->required();
  verb->add_option("--world", plan.world, kWorld)->transform(whole_number(1 << 20));
  verb->add_option("--profile", plan.profile,
                   "profile.json of a run: measured times of units. Without one choices go by "
                   "bytes, and there are no times.");
  ::CLI::Option* check = verb->add_option(
      "--check", plan.check,
      "Check the file of a plan: exit code 2 where it is another run's, 3 where it does not hold.");
  ::CLI::Option* json =
      verb->add_flag("--json", plan.json, "Print the plan as a file for compile.plan and --check.")
          ->excludes(check);
  verb->add_flag("--actions", plan.actions,
                 "Also print each gather, wait, release and reduction with its reason, and the "
                 "dtypes of gradients.")
      ->excludes(check)
      ->excludes(json);
  add_expert_loads(*verb, plan.expert_loads);
  add_machine(*verb, plan.machine);
  verb->footer(keys);
}

void add_check(::CLI::App& app, CheckArguments& check, const std::string& keys) {
  ::CLI::App* verb = app.add_subcommand("check",
                                        "Check a run before it starts: its gradients, the order of "
                                        "its collectives, memory and time of a step.");
  verb->add_option("CONFIG.toml", check.config_file, "The TOML file of the run.")->required();
  verb->add_option("--world", check.world, kWorld)->transform(whole_number(1 << 20));
  verb->add_flag("--json", check.json, "Print JSON.");
  verb->add_option("--html", check.html,
                   "Write a page with pictures of memory, bytes and time to this file.");
  add_expert_loads(*verb, check.expert_loads);
  add_machine(*verb, check.machine);
  verb->footer(concat("Exit code 3 where it finds a problem.\n", keys));
}

void add_measure(::CLI::App& app, MeasureArguments& measure) {
  ::CLI::App* verb = app.add_subcommand(
      "measure",
      "Measure what this machine computes, copies and sends in a second, for --machine.");
  verb->add_option("--out", measure.out, "File to write; default: stdout.");
  verb->add_option("--nproc", measure.nproc,
                   "Local ranks to start, as many as share a host in a run; default 2.")
      ->transform(whole_number(kMostRanks));
  verb->footer("Takes the keys --device VALUE and --comm.KEY VALUE of the configuration.");
}

const std::vector<std::string>& verbs() {
  static const std::vector<std::string> names{"train",    "gradients", "inspect",
                                              "generate", "convert",   "schedule",
                                              "plan",     "check",     "measure"};
  return names;
}

// The parser would only say that some verb is missing.
void check_verb(const std::vector<std::string>& words) {
  const std::string expected = concat(", expected one of ", joined(verbs()));
  TESSERA_CHECK(!words.empty(), ErrorKind::kUsage, "found no verb", expected,
                "; see tessera --help");
  std::vector<std::string> known = verbs();
  const std::string& verb = words.front();
  if (std::ranges::find(known, verb) != known.end()) return;
  if (verb == "-h" || verb == "--help" || verb == "--version") return;
  TESSERA_CHECK(!verb.starts_with("-"), ErrorKind::kUsage, "found ", printable(verb), " first",
                expected, " before it; see tessera --help");
  known.insert(known.end(), {"help", "version"});
  const auto close = close_name(verb, known);
  const bool is_option = close == "help" || close == "version";
  TESSERA_CHECK(
      false, ErrorKind::kUsage, "unknown verb ", printable(verb), expected,
      close ? concat("; the nearest is ", is_option ? "--" : "", *close) : "; see tessera --help");
}

bool takes(const ::CLI::App& verb, const train::ConfigKey& key) {
  const std::string& name = verb.get_name();
  if (name == "inspect" && verb.get_option("--contract")->count() == 0) return false;
  return takes_key(name, key.full_name());
}

std::vector<std::string> option_names(const ::CLI::App& verb) {
  std::vector<std::string> names;
  for (const ::CLI::Option* option : verb.get_options()) {
    if (!option->get_positional()) names.push_back(option->get_name());
  }
  names.emplace_back("--help-keys");
  return names;
}

bool takes_option(const ::CLI::App& verb, std::string_view option) {
  return verb.get_option_no_throw(std::string(option)) != nullptr;
}

/// The advice where `name`, with underscores, is another name of an option or of the ranks.
std::string option_meant(const std::string& name, const ::CLI::App& verb) {
  const auto& rows = other_options();
  const auto row = std::ranges::find_if(
      rows, [&](const OtherOption& other) { return std::ranges::count(other.theirs, name) > 0; });
  if (row == rows.end()) return "";
  for (const std::string_view here : row->here) {
    const train::ConfigKey* key = train::find_key(here.substr(2));
    if (key == nullptr ? takes_option(verb, here) : takes(verb, *key)) {
      const bool is_close = close_name("--" + name, {std::string(here)}).has_value();
      return is_close ? concat("; the nearest is ", here)
                      : concat("; it is called ", here, " here");
    }
  }
  if (row != rows.begin()) return "";
  return concat("; tessera ", verb.get_name(), " runs as one process");
}

/// The advice where other verbs have the option.
std::string option_elsewhere(const std::string& option, const ::CLI::App& verb) {
  std::vector<std::string> names;
  for (const std::string& other : verbs()) {
    if (takes_option(*verb.get_parent()->get_subcommand(other), option)) names.push_back(other);
  }
  return names.empty() ? "" : concat("; it is an option of ", joined(names));
}

/// Suggests what an unknown option may mean: `steps` alone a key without its section,
/// `learning-rate` a key as another program calls it, `ranks` the --nproc of this verb, anything
/// else a misspelt option.
std::string meant_by(const std::string& name, const ::CLI::App& verb) {
  if (verb.get_name() == "train" && name == "config") {
    return ", expected the file alone, as in tessera train CONFIG.toml, or --model.config";
  }
  std::string keys;
  std::string as_key = name;
  std::ranges::replace(as_key, '-', '_');
  for (const train::ConfigKey& key : train::config_keys()) {
    if (key.name != as_key || !takes(verb, key)) continue;
    keys += concat(keys.empty() ? "--" : ", --", key.full_name());
  }
  if (!keys.empty()) return concat(", expected a key with its section: ", keys);
  if (std::string meant = option_meant(as_key, verb); !meant.empty()) return meant;
  if (const train::OtherName* other = train::find_other_key(name)) {
    const train::ConfigKey* key = train::find_key(other->here);
    const bool of_run = takes(verb, *train::find_key("training.steps"));
    if (key == nullptr ? of_run : takes(verb, *key)) {
      return train::advice_on(*other, train::KeysIn::kCommandLine);
    }
  }
  const std::string word = concat("--", name);
  if (std::string other = option_elsewhere(word, verb); !other.empty()) return other;
  const auto options = option_names(verb);
  std::vector<std::string> longer;
  std::ranges::copy_if(options, std::back_inserter(longer),
                       [&](const std::string& option) { return option.starts_with(word); });
  // A prefix of an option means that option, however many letters are missing.
  const auto option = longer.empty() ? close_name(word, options) : longer.front();
  if (option) return concat("; the nearest is ", *option);
  const auto key = train::close_key(name);
  return key && takes(verb, *train::find_key(*key)) ? concat("; the nearest is --", *key) : "";
}

/// The refusal of `words`: what the parser found wrong, by its own name, and what to do.
std::string refusal_of(const ::CLI::ParseError& error, const std::vector<std::string>& words,
                       const ::CLI::App& app) {
  const auto given = app.get_subcommands();
  if (given.empty()) return one_line(error.what()) + "; see tessera --help";
  const ::CLI::App& verb = *given.front();
  const std::string see = concat("; see tessera ", verb.get_name(), " --help");
  const bool lacks = dynamic_cast<const ::CLI::RequiredError*>(&error) != nullptr;
  // First: what is missing may be there, misspelt; and the value of an unknown option is taken for
  // a file, with which others are excluded.
  if (lacks || dynamic_cast<const ::CLI::ExtrasError*>(&error) != nullptr ||
      dynamic_cast<const ::CLI::ExcludesError*>(&error) != nullptr ||
      dynamic_cast<const ::CLI::RequiresError*>(&error) != nullptr) {
    for (std::size_t i = 0; i < words.size(); ++i) {
      const std::string dashed = dashed_name(words[i]);
      if (dashed.empty()) continue;
      const ::CLI::Option* option = verb.get_option_no_throw(dashed);
      if (option == nullptr) {
        const std::string name = dashed.substr(dashed.find_first_not_of('-'));
        return concat("unknown option ", printable(dashed), meant_by(name, verb), see);
      }
      const bool value_follows = option->get_items_expected_max() > 0;
      if (value_follows && words[i].find('=') == std::string::npos) ++i;
    }
  }
  if (lacks) {
    std::string_view missing = error.what();
    missing = missing.substr(0, missing.find(" is required"));
    return concat(verb.get_name(), ": found no ", missing, ", expected it", see);
  }
  return one_line(error.what()) + see;
}

/// Refuses other files, and options of a run together with files.
void check_diff(const GradientsArguments& gradients, const Overrides& overrides) {
  std::size_t files = 0;
  for (const std::string& path : gradients.diff) {
    const bool is_file = path.ends_with(kSafetensors);
    files += is_file ? 1 : 0;
    TESSERA_CHECK(is_file || path.ends_with(".toml"), ErrorKind::kUsage, "--diff: found ",
                  shown(path), ", expected two files of gradients, which end in .safetensors, or ",
                  "two configurations, which end in .toml");
  }
  TESSERA_CHECK(files != 1, ErrorKind::kUsage, "--diff: found ", shown(gradients.diff.front()),
                " and ", shown(gradients.diff.back()),
                ", expected two files of gradients, or two configurations");
  if (files == 0) return;
  const auto refuse = [](bool found, std::string_view option) {
    TESSERA_CHECK(!found, ErrorKind::kUsage, option,
                  ": found with two files of gradients, expected none: what they hold was ",
                  "computed before");
  };
  refuse(!gradients.model.empty(), "--model");
  refuse(!gradients.batch.empty(), "--batch");
  if (!overrides.empty()) refuse(true, concat("--", overrides.front().first));
}

/// Refuses a form of the verb without what it needs.
void check_gradients(const GradientsArguments& gradients, const Overrides& overrides) {
  if (!gradients.diff.empty()) check_diff(gradients, overrides);
  const auto require = [](bool found, std::string_view option) {
    TESSERA_CHECK(found, ErrorKind::kUsage, "gradients: found no ", option,
                  ", expected it; see tessera gradients --help");
  };
  if (!gradients.diffs_files()) {
    require(!gradients.model.empty() || !gradients.diff.empty(), "--model");
    require(!gradients.batch.empty(), "--batch");
  }
  const bool reports = gradients.precision_what_if || !gradients.diff.empty();
  require(!gradients.out.empty() || reports, "--out");
  TESSERA_CHECK(reports || !gradients.json, ErrorKind::kUsage,
                "--json: found it with --out alone, expected --precision-what-if or --diff");
}

Arguments chosen(const ::CLI::App& app, Parsed parsed, Overrides overrides) {
  const auto takes_overrides = [&](auto arguments) -> Arguments {
    arguments.overrides = std::move(overrides);
    return arguments;
  };
  if (app.got_subcommand("train")) return takes_overrides(std::move(parsed.train));
  if (app.got_subcommand("gradients")) {
    check_gradients(parsed.gradients, overrides);
    return takes_overrides(std::move(parsed.gradients));
  }
  if (app.got_subcommand("inspect")) {
    TESSERA_CHECK(!parsed.inspect.folder.empty() || !parsed.inspect.contract_file.empty(),
                  ErrorKind::kUsage,
                  "inspect: found nothing to look at, expected a folder or --contract CONFIG.toml");
    check_rates("inspect", parsed.inspect.machine);
    return takes_overrides(std::move(parsed.inspect));
  }
  if (app.got_subcommand("generate")) {
    TESSERA_CHECK(parsed.generate.prompt || parsed.generate.prompt_tokens, ErrorKind::kUsage,
                  "generate: found no prompt, expected --prompt TEXT or --prompt-tokens 1,2,3");
    return takes_overrides(std::move(parsed.generate));
  }
  if (app.got_subcommand("plan")) {
    check_rates("plan", parsed.plan.machine);
    return takes_overrides(std::move(parsed.plan));
  }
  if (app.got_subcommand("check")) {
    check_rates("check", parsed.check.machine);
    return takes_overrides(std::move(parsed.check));
  }
  if (app.got_subcommand("measure")) return takes_overrides(std::move(parsed.measure));
  if (app.got_subcommand("schedule")) {
    TESSERA_CHECK(overrides.empty(), ErrorKind::kUsage, "schedule: found --",
                  overrides.empty() ? "" : overrides.front().first,
                  ", expected no key of a configuration");
    return std::move(parsed.schedule);
  }
  return takes_overrides(std::move(parsed.convert));
}

}  // namespace

void apply(const Overrides& overrides, train::Config& config) {
  for (const auto& [key, value] : overrides) train::apply_override(config, key, value);
}

Arguments parse_arguments(const std::vector<std::string>& words,
                          const std::function<std::string()>& version) {
  if (!words.empty() && !words.front().starts_with("-")) check_verb({words.front()});
  if (std::string text = keys_asked_for(words); !text.empty()) return ShowText{std::move(text)};
  SplitWords split = split_overrides(words);
  check_verb(split.other);
  const std::string keys = where_keys_are();
  Parsed parsed;
  ::CLI::App app("Tessera: sharded mixed-precision training on libtorch.", "tessera");
  app.formatter(screen_formatter());
  app.require_subcommand(1);
  app.set_version_flag("--version", version, "Git hash, torch and backends.");
  add_train(app, parsed.train, keys);
  add_gradients(app, parsed.gradients, keys);
  add_inspect(app, parsed.inspect, keys);
  add_generate(app, parsed.generate);
  add_convert(app, parsed.convert);
  add_schedule(app, parsed.schedule);
  add_plan(app, parsed.plan, keys);
  add_check(app, parsed.check, keys);
  add_measure(app, parsed.measure);
  try {
    // In the order that this parser wants.
    app.parse(std::vector<std::string>(split.other.rbegin(), split.other.rend()));
  } catch (const ::CLI::CallForHelp&) {
    const auto given = app.get_subcommands();
    return ShowText{given.empty() ? app.help() : given.front()->help()};
  } catch (const ::CLI::CallForVersion& call) {
    return ShowText{std::string(call.what()) + "\n"};
  } catch (const ::CLI::ParseError& error) {
    throw Error(ErrorKind::kUsage, refusal_of(error, split.other, app));
  }
  return chosen(app, std::move(parsed), std::move(split.overrides));
}

}  // namespace tessera::cli
