// The command line as a value: which verb, with what; and the verbs, one file each, which return
// the exit code or throw what main() reports. The library that parses it stays in arguments.cpp.
//
// Nothing is opened or checked here beyond the words themselves.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "train/config/config.h"

namespace tessera::cli {

/// `--section.key VALUE` among the words, in their order: the last one wins.
using Overrides = std::vector<std::pair<std::string, std::string>>;

/// Errors: as train::apply_override.
void apply(const Overrides& overrides, train::Config& config);

struct TrainArguments {
  std::string config_file;
  std::optional<int> nproc;
  bool print_config = false;
  bool profile = false;
  Overrides overrides;
};

struct GradientsArguments {
  std::string model;
  std::string batch;
  std::string out;
  bool no_logits = false;
  bool impose_routing = false;
  bool precision_what_if = false;  ///< with which `out` may be empty
  std::optional<double> bound;
  bool json = false;
  std::optional<int> nproc;
  Overrides overrides;
  std::vector<std::string> diff;  ///< --diff A B; empty: it was not asked for

  /// Whether that is of two files of gradients, and not of two configurations.
  bool diffs_files() const { return !diff.empty() && diff.front().ends_with(".safetensors"); }
};

/// The options that describe machines other than this one; planned_machine.h makes one of them.
struct PlannedMachine {
  std::optional<std::string> machine;        ///< a file, or one of check::shipped_machines()
  std::optional<std::string> device_memory;  ///< "80GiB"
  std::optional<int> ranks_per_host;
  std::optional<double> flops;           ///< operations a second; without `machine` with
  std::optional<std::string> bandwidth;  ///< "50GB" a second
};

struct InspectArguments {
  std::string folder;         ///< or
  std::string contract_file;  ///< --contract
  bool json = false;
  bool all = false;                 ///< layers that are alike one by one
  std::optional<std::string> lock;  ///< --lock: a file to write
  std::optional<int> world;
  std::optional<std::string> expert_loads;  ///< a file; none: even
  PlannedMachine machine;
  Overrides overrides;
};

struct GenerateArguments {
  std::string model;
  std::optional<std::string> prompt;         ///< or
  std::optional<std::string> prompt_tokens;  ///< "1,2,3"
  std::int64_t max_new_tokens = 0;
  double temperature = 0.0;
  std::int64_t top_k = 0;  ///< 0 = all
  double top_p = 1.0;
  std::uint64_t seed = 42;
  Overrides overrides;
};

struct ConvertArguments {
  std::string source;
  std::string out;
  std::string dtype = "auto";
  std::optional<std::string> max_shard_size;  ///< none = "5GB"
  bool merged = false;
  bool whole = false;
  bool verify = false;
  Overrides overrides;
};

struct ScheduleArguments {
  std::string schedule;  ///< a kind's name, or a file's that ends in .csv
  std::optional<int> ranks;
  std::optional<int> micro_batches;
  std::optional<int> stages_per_rank;
  std::vector<double> costs;  ///< F, I, W, or these and F with B; empty = 1, 1, 1
  std::optional<std::string> costs_from;
  std::vector<int> exchanges;           ///< of a layer in F and in B; empty = none
  int layers = 1;                       ///< of a stage, which have the exchanges
  std::optional<double> exchange_cost;  ///< of one
  PlannedMachine machine;               ///< for times of a configuration's costs
  std::optional<std::string> csv;
  std::string csv_form = "compute_only";
  std::optional<std::string> svg;
  std::optional<std::string> trace;
};

struct PlanArguments {
  std::string config_file;
  std::optional<int> world;
  std::optional<std::string> profile;
  std::optional<std::string> check;
  std::optional<std::string> expert_loads;
  bool json = false;
  bool actions = false;
  PlannedMachine machine;
  Overrides overrides;
};

struct MeasureArguments {
  std::optional<std::string> out;  ///< none: stdout
  std::optional<int> nproc;
  Overrides overrides;  ///< of device and [comm]
};

struct CheckArguments {
  std::string config_file;
  std::optional<int> world;
  bool json = false;
  std::optional<std::string> html;  ///< a page is written there
  std::optional<std::string> expert_loads;
  PlannedMachine machine;
  Overrides overrides;
};

/// --help, --help-keys and --version.
struct ShowText {
  std::string text;
};

using Arguments = std::variant<TrainArguments, GradientsArguments, InspectArguments,
                               GenerateArguments, ConvertArguments, ScheduleArguments,
                               PlanArguments, CheckArguments, MeasureArguments, ShowText>;

/// `words` without the program's name; `version` makes what --version shows, called for that only.
/// Errors: kUsage with what is wrong, in one line.
Arguments parse_arguments(const std::vector<std::string>& words,
                          const std::function<std::string()>& version);

int run_train(const TrainArguments& arguments);
int run_gradients(const GradientsArguments& arguments);
int run_inspect(const InspectArguments& arguments);
int run_generate(const GenerateArguments& arguments);
int run_convert(const ConvertArguments& arguments);
int run_schedule(const ScheduleArguments& arguments);
int run_plan(const PlanArguments& arguments);
int run_check(const CheckArguments& arguments);
int run_measure(const MeasureArguments& arguments);

}  // namespace tessera::cli
