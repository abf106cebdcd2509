#include "cli/arguments.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>

#include "base/printable.h"
#include "tessera/error.h"
#include "train/config_keys.h"

namespace tessera::cli {
namespace {

constexpr int kMostRanks = 4096;

// Owns what the parser writes to, until the verb that was given is known.
struct Parsed {
  TrainArguments train;
  GradientsArguments gradients;
  InspectArguments inspect;
};

void add_nproc(::CLI::App& verb, std::optional<int>& nproc) {
  verb.add_option("--nproc", nproc,
                  "Local ranks to start; default the product of the parallelism degrees. Under a "
                  "launcher its world size.")
      ->check(::CLI::Range(1, kMostRanks));
}

void add_train(::CLI::App& app, TrainArguments& train, const std::string& keys) {
  ::CLI::App* verb = app.add_subcommand("train", "Train a model as a TOML file says.");
  verb->add_option("config", train.config_file, "The TOML file.")->required();
  verb->add_flag("--print-config", train.print_config,
                 "Print the whole configuration after all overrides, and leave.");
  verb->add_flag("--profile", train.profile,
                 "Print at the end where a step went: products, other kernels, waiting, optimizer, "
                 "our own code (rank 0, from the fourth step on).");
  add_nproc(*verb, train.nproc);
  verb->footer(keys);
}

void add_gradients(::CLI::App& app, GradientsArguments& gradients, const std::string& keys) {
  ::CLI::App* verb = app.add_subcommand(
      "gradients", "Loss and every parameter's gradient for one batch, under any layout.");
  verb->add_option("--model", gradients.model, "Hugging Face folder.")->required();
  verb->add_option("--batch", gradients.batch, ".safetensors with input_ids and labels [B,T].")
      ->required();
  verb->add_option("--out", gradients.out, ".safetensors to write.")->required();
  verb->add_flag("--no-logits", gradients.no_logits, "Leave the logits out.");
  verb->add_flag("--impose-routing", gradients.impose_routing,
                 "Route by router/<i>/indices of the batch file.");
  add_nproc(*verb, gradients.nproc);
  verb->footer(keys);
}

void add_inspect(::CLI::App& app, InspectArguments& inspect) {
  ::CLI::App* verb =
      app.add_subcommand("inspect", "Tensors of a folder, or the contract of a run.");
  ::CLI::Option* folder = verb->add_option("folder", inspect.folder, "Hugging Face folder.");
  verb->add_flag("--json", inspect.json, "As JSON.");
  ::CLI::Option* contract =
      verb->add_option("--contract", inspect.contract_file,
                       "TOML file: every parameter's contract with the reason of each value, and "
                       "the bucket plan.");
  contract->excludes(folder);
  verb->add_option("--world", inspect.world, "Ranks to plan for; default as own spawn.")
      ->needs(contract)
      ->check(::CLI::Range(1, 1 << 20));
}

void add_unbuilt(::CLI::App& app) {
  for (const auto& [name, what] :
       {std::pair{"generate", "Text from a model; not yet built."},
        std::pair{"convert", "A checkpoint as a folder; not yet built."}}) {
    app.add_subcommand(name, what)->allow_extras();
  }
}

const std::vector<std::string>& verbs() {
  static const std::vector<std::string> names{"train", "gradients", "inspect", "generate",
                                              "convert"};
  return names;
}

// The parser would only say that some verb is missing.
void check_verb(const std::vector<std::string>& words) {
  if (words.empty() || words.front().starts_with("-")) return;
  const std::string& verb = words.front();
  TESSERA_CHECK(std::ranges::find(verbs(), verb) != verbs().end(), ErrorKind::kUsage,
                "unknown verb ", printable(verb), "; the nearest is ",
                train::nearest_name(verb, verbs()));
}

std::string one_line(std::string text) {
  std::ranges::replace(text, '\n', ' ');
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text;
}

Arguments chosen(const ::CLI::App& app, Parsed parsed, Overrides overrides) {
  const auto takes_overrides = [&](auto arguments) -> Arguments {
    arguments.overrides = std::move(overrides);
    return arguments;
  };
  if (app.got_subcommand("train")) return takes_overrides(std::move(parsed.train));
  if (app.got_subcommand("gradients")) return takes_overrides(std::move(parsed.gradients));
  if (app.got_subcommand("inspect")) {
    TESSERA_CHECK(!parsed.inspect.folder.empty() || !parsed.inspect.contract_file.empty(),
                  ErrorKind::kUsage,
                  "inspect: found nothing to look at, expected a folder or --contract "
                  "CONFIG.toml");
    return takes_overrides(std::move(parsed.inspect));
  }
  return UnbuiltVerb{app.got_subcommand("generate") ? "generate" : "convert"};
}

}  // namespace

Arguments parse_arguments(const std::vector<std::string>& words,
                          const std::function<std::string()>& version) {
  SplitWords split = split_overrides(words);
  check_verb(split.other);
  const std::string keys = train::config_help();
  Parsed parsed;
  ::CLI::App app("Tessera: sharded mixed-precision training on libtorch.", "tessera");
  app.require_subcommand(1);
  app.set_version_flag("--version", version, "Git hash, torch and backends.");
  app.footer(keys);
  add_train(app, parsed.train, keys);
  add_gradients(app, parsed.gradients, keys);
  add_inspect(app, parsed.inspect);
  add_unbuilt(app);
  try {
    std::ranges::reverse(split.other);  // the order that this parser wants
    app.parse(split.other);
  } catch (const ::CLI::CallForHelp&) {
    const auto given = app.get_subcommands();
    return ShowText{given.empty() ? app.help() : given.front()->help()};
  } catch (const ::CLI::CallForVersion& call) {
    return ShowText{std::string(call.what()) + "\n"};
  } catch (const ::CLI::ParseError& error) {
    throw Error(ErrorKind::kUsage, one_line(error.what()) + "; see tessera --help");
  }
  return chosen(app, std::move(parsed), std::move(split.overrides));
}

}  // namespace tessera::cli
