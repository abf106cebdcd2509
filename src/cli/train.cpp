// tessera train: the run in its folder.
#include <ATen/Context.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/environment.h"
#include "base/hash.h"
#include "base/log.h"
#include "cli/arguments.h"
#include "cli/program_end.h"
#include "cli/ranks.h"
#include "comm/failure_report.h"
#include "comm/group.h"
#include "io/atomic_file.h"
#include "io/checkpoint_store.h"
#include "io/folder.h"
#include "tessera/error.h"
#include "tessera/world.h"
#include "train/config/config.h"
#include "train/config/config_resolve.h"
#include "train/data/config_paths.h"
#include "train/hf/model_source.h"
#include "train/trainer.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

// RUN: the folder of a run, the same on every rank, and of no other run while this one runs. A run
// that is refused leaves nothing that it has made: all that it makes before its first step is
// noted, and removed without anything that others put there (MadePaths).

struct RunFolder {
  train::Config config;  ///< its folders absolute (train::resolved_for_run)
  /// Rank 0: on all that the run writes into; for as long as it runs.
  std::vector<FolderLock> locks;
  /// With the files that this rank puts there before the first step.
  MadePaths made;
};

constexpr char kBetween = '\0';  // of paths: no name has it
constexpr const char* kConfigFile = "config.toml";

/// RUN/logs/rank_N.log.
fs::path log_file(const train::Config& run, int rank) {
  return fs::path(*run.job.dump_folder) / "logs" / concat("rank_", rank, ".log");
}

std::string local_time() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  localtime_r(&now, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y%m%d-%H%M%S", &parts);
  return text.data();
}

// A rank of an earlier attempt that was killed may still be giving its memory back.
constexpr std::chrono::seconds kEndOfEarlierRun{3};

bool holds(const fs::path& path, const std::string& text) {
  std::error_code unknown;
  if (fs::file_size(path, unknown) != text.size()) return false;
  std::ifstream file(path, std::ios::binary);
  return std::equal(std::istreambuf_iterator<char>(file), {}, text.begin(), text.end());
}

// Two runs of the same second get different folders: create_directory says whether it was new.
fs::path make_fresh_folder(const std::string& name, MadePaths& made) {
  made.make("outputs", "job.dump_folder");
  const std::string base = concat("outputs/", local_time(), "-", name);
  for (int attempt = 1;; ++attempt) {
    const fs::path folder = attempt == 1 ? base : concat(base, "-", attempt);
    std::error_code error;
    if (fs::create_directory(folder, error)) {
      made.add_folder(folder);
      return folder;
    }
    TESSERA_CHECK(!error, ErrorKind::kIo, "job.dump_folder: cannot make ", folder.string(), " (",
                  error.message(), ")");
  }
}

/// Where rank 0 notes which folder it chose, for torchrun's next attempt at the same job; none
/// under other launchers.
std::optional<fs::path> note_for_restarts() {
  if (!base::environment_variable("TORCHELASTIC_RESTART_COUNT")) return std::nullopt;
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  Hasher job;
  job.add(std::string_view(host.data()));
  for (const char* name : {"TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"}) {
    job.add(std::string_view(base::environment_variable(name).value_or("")));
  }
  return fs::path("outputs") / ".restarts" / std::to_string(job.digest());
}

/// The folder of the attempts before this one: a restart resumes there.
std::optional<fs::path> folder_of_earlier_attempt(const fs::path& note) {
  if (base::environment_variable("TORCHELASTIC_RESTART_COUNT") == "0") return std::nullopt;
  std::string folder;
  std::getline(std::ifstream(note), folder);
  std::error_code ignored;
  if (!folder.empty() && fs::is_directory(folder, ignored)) return folder;
  log::warn(
      "torchrun started this job again, and which folder it had is not known: it starts again "
      "in another; set job.dump_folder");
  return std::nullopt;
}

fs::path choose_folder(const std::string& name, MadePaths& made) {
  const auto note = note_for_restarts();
  if (!note) return make_fresh_folder(name, made);
  if (const auto earlier = folder_of_earlier_attempt(*note)) return *earlier;
  const auto folder = make_fresh_folder(name, made);
  made.expect_file(*note);
  made.make(note->parent_path(), "job.dump_folder");
  write_atomically(*note, fs::absolute(folder).string() + '\n');
  return folder;
}

/// Another run that is refused may take an empty folder back just as this one wants to lock it:
/// then it is made again, once.
FolderLock lock_folder(const fs::path& path, std::string_view key, MadePaths& made) {
  const auto take = [&] {
    std::error_code unknown;
    const bool is_new =
        fs::symlink_status(lock_file(path), unknown).type() == fs::file_type::not_found;
    FolderLock lock(path, kEndOfEarlierRun,
                    concat("wait for that run to end, or set another ", key));
    if (is_new) made.add_lock(lock_file(path));
    return lock;
  };
  try {
    return take();
  } catch (const Error& error) {
    std::error_code unknown;
    if (error.kind() != ErrorKind::kIo || fs::exists(path, unknown) || unknown) throw;
  }
  made.make(path, key);
  return take();
}

/// Locks on RUN and on each folder of the run, inside RUN too: another run may name it as its own.
/// Into `locks` one by one: where a later one is refused, the earlier ones are held until what was
/// made there is removed.
void lock_folders(const train::Config& run, MadePaths& made, std::vector<FolderLock>& locks) {
  struct Folder {
    std::string_view key;
    fs::path path;
  };
  const fs::path home = *run.job.dump_folder;
  std::vector<Folder> folders{{"job.dump_folder", home}, {"metrics.folder", run.metrics.folder}};
  if (run.checkpoint.enable) folders.push_back({"checkpoint.folder", run.checkpoint.folder});
  std::set<fs::path> locked;
  for (const auto& [key, path] : folders) {
    made.make(path, key);
    std::error_code error;
    const fs::path real = fs::canonical(path, error);
    TESSERA_CHECK(!error, ErrorKind::kIo, key, ": cannot open ", path.string(), " (",
                  error.message(), ")");
    if (locked.insert(real).second) locks.push_back(lock_folder(real, key, made));
  }
}

/// Notes the files that a rank makes there before the first step. Event files are not among them:
/// their names are not known before.
void expect_files(const train::Config& run, int rank, MadePaths& made) {
  made.expect_file(log_file(run, rank));
  if (run.checkpoint.enable) {  // by which ranks find out whether they can write there
    const CheckpointStore store(run.checkpoint.folder);
    made.expect_file(store.temporary(0) / concat("rank_", rank));
  }
  if (rank != 0) return;
  made.expect_file(fs::path(*run.job.dump_folder) / kConfigFile);
  made.expect_file(fs::path(run.metrics.folder) / "metrics.jsonl");
}

/// Rank 0 chooses job.dump_folder where the config names none and makes it: outputs/<time>-<name>,
/// never one that exists but where torchrun restarts a job, which resumes in its folder. `folder`
/// is filled as things are made. Collective over the World. Errors: kIo when it cannot be made;
/// kConfig where another run uses it.
void prepare_run_folder(const train::Config& config, const std::string& name, World& world,
                        RunFolder& folder) {
  std::string chosen;
  if (world.rank() == 0) {
    if (config.job.dump_folder) {
      folder.made.make(*config.job.dump_folder, "job.dump_folder");
    }
    const fs::path run = config.job.dump_folder ? fs::path(*config.job.dump_folder)
                                                : choose_folder(name, folder.made);
    chosen = fs::absolute(run).lexically_normal().string();
    // Before any rank opens its log there.
    folder.config = train::resolved_for_run(config, chosen);
    lock_folders(folder.config, folder.made, folder.locks);
    expect_files(folder.config, 0, folder.made);
    chosen += kBetween + folder.made.folders();
  }
  chosen = comm::from_first_rank(world, "run folder", chosen);
  if (world.rank() == 0) return;
  const std::size_t end = chosen.find(kBetween);
  folder.config = train::resolved_for_run(config, chosen.substr(0, end));
  folder.made.take_folders(std::string_view(chosen).substr(end + 1));
  expect_files(folder.config, world.rank(), folder.made);
}

/// RUN/config.toml, once the command is not refused any more. Errors: kIo.
void write_run_config(const train::Config& run) {
  const fs::path file = fs::path(*run.job.dump_folder) / kConfigFile;
  const std::string text = train::to_toml(run);
  if (!holds(file, text)) write_atomically(file, text);
}

/// "tiny" of "configs/tiny.toml".
std::string run_name(const std::string& config_file) {
  const std::string stem = std::filesystem::path(config_file).stem().string();
  return stem.empty() ? "run" : stem;
}

}  // namespace

int run_train(const TrainArguments& arguments) {
  train::Config config =
      train::open_as("CONFIG.toml", [&] { return train::load_config(arguments.config_file); });
  apply(arguments.overrides, config);
  train::validate(config, train::Verb::kTrain);
  if (arguments.print_config) {
    std::cout << train::to_toml(config);
    return kDone;
  }
  return run_ranks(config, arguments.nproc, [&](World& world, RunPhase& phase) {
    // Locked until nothing is left to remove.
    const auto run_folder = std::make_shared<RunFolder>();
    phase.when_refused([run_folder] { run_folder->made.remove(); });
    comm::when_refused(world, [&phase] { phase.refused(); });
    train::require_relative_paths(config, arguments.config_file, train::Verb::kTrain);
    prepare_run_folder(config, run_name(arguments.config_file), world, *run_folder);
    train::Config& run = run_folder->config;
    log::init(
        {.rank = world.rank(), .world_size = world.size(), .file = log_file(run, world.rank())});
    train::take_checkpoint_of_run(run, world);
    const StopSignal stop;
    train::TrainingHooks hooks;
    hooks.on_first_step = [&](std::int64_t done) {
      // Keeps the configuration that the run was trained with: a command that trains nothing does
      // not change it.
      if (world.rank() == 0 && done < *run.training.steps) {
        world.work_at("writing config.toml");
        write_run_config(run);
      }
      phase.begin_steps();
    };
    hooks.stop_requested = [] { return StopSignal::requested(); };
    hooks.on_failure = [&](const std::exception& error) {
      if (world.size() > 1) comm::report_failure(world, error, exit_code(error, phase.now()));
    };
    if (arguments.profile) hooks.profiling = train::Profiling::kYes;
    if (world.size() == 1 && !arguments.nproc && !launched() &&
        config.parallelism.data_parallel_shard_degree == -1) {
      hooks.rank_count = train::RankCount::kByDefault;
    }
    // Else libtorch seeds each process for itself, and ranks of one stage draw other numbers.
    at::manual_seed(static_cast<std::uint64_t>(run.debug.seed));
    train::run_training(run, world, hooks);
  });
}

}  // namespace tessera::cli
