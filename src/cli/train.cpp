// tessera train: the run's folder, RUN, the same on every rank; and the run in it.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <optional>
#include <set>
#include <span>
#include <string>
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
#include "io/folder.h"
#include "tessera/error.h"
#include "tessera/world.h"
#include "train/config/config.h"
#include "train/config/config_resolve.h"
#include "train/trainer.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

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

void make_folder(const fs::path& folder, std::string_view key = "job.dump_folder") {
  std::error_code error;
  fs::create_directories(folder, error);
  TESSERA_CHECK(!error, ErrorKind::kIo, key, ": cannot make ", folder.string(), " (",
                error.message(), ")");
}

bool holds(const fs::path& path, const std::string& text) {
  std::error_code unknown;
  if (fs::file_size(path, unknown) != text.size()) return false;
  std::ifstream file(path, std::ios::binary);
  return std::equal(std::istreambuf_iterator<char>(file), {}, text.begin(), text.end());
}

// Two runs of the same second get different folders: create_directory says whether it was new.
fs::path make_fresh_folder(const std::string& name) {
  make_folder("outputs");
  const std::string base = concat("outputs/", local_time(), "-", name);
  for (int attempt = 1;; ++attempt) {
    const fs::path folder = attempt == 1 ? base : concat(base, "-", attempt);
    std::error_code error;
    if (fs::create_directory(folder, error)) return folder;
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

/// The folder of the attempts before this one: a restart goes on where they were.
std::optional<fs::path> folder_of_earlier_attempt(const fs::path& note) {
  if (base::environment_variable("TORCHELASTIC_RESTART_COUNT") == "0") return std::nullopt;
  std::string folder;
  std::getline(std::ifstream(note), folder);
  std::error_code ignored;
  if (!folder.empty() && fs::is_directory(folder, ignored)) return folder;
  log::warn(
      "torchrun started this job again, and which folder it had is not known: it begins anew "
      "in another; set job.dump_folder");
  return std::nullopt;
}

fs::path choose_folder(const std::string& name) {
  const auto note = note_for_restarts();
  if (!note) return make_fresh_folder(name);
  if (const auto earlier = folder_of_earlier_attempt(*note)) return *earlier;
  const auto folder = make_fresh_folder(name);
  make_folder(note->parent_path());
  write_atomically(*note, fs::absolute(folder).string() + '\n');
  return folder;
}

/// Locks on RUN and on each folder of the run, inside RUN too: another run may name it as its own.
std::vector<FolderLock> lock_folders(const train::Config& run) {
  struct Folder {
    std::string_view key;
    fs::path path;
  };
  const fs::path home = *run.job.dump_folder;
  std::vector<Folder> folders{{"job.dump_folder", home}, {"metrics.folder", run.metrics.folder}};
  if (run.checkpoint.enable) folders.push_back({"checkpoint.folder", run.checkpoint.folder});
  std::vector<FolderLock> locks;
  std::set<fs::path> locked;
  for (const auto& [key, path] : folders) {
    make_folder(path, key);
    std::error_code error;
    const fs::path real = fs::canonical(path, error);
    TESSERA_CHECK(!error, ErrorKind::kIo, key, ": cannot open ", path.string(), " (",
                  error.message(), ")");
    if (!locked.insert(real).second) continue;
    locks.emplace_back(real, kEndOfEarlierRun,
                       concat("wait for that run to end, or set another ", key));
  }
  return locks;
}

/// "tiny" of "configs/tiny.toml".
std::string run_name(const std::string& config_file) {
  const std::string stem = fs::path(config_file).stem().string();
  return stem.empty() ? "run" : stem;
}

struct RunFolder {
  train::Config config;  ///< its folders absolute (train::resolved_for_run)
  std::vector<FolderLock>
      locks;  ///< rank 0: on all that the run writes into; for as long as it runs
};

/// Rank 0 chooses job.dump_folder where the config names none and makes it: outputs/<time>-<name>,
/// never one that exists but where torchrun restarts a job, which goes on in its folder.
/// Collective over the World. Errors: kIo when it cannot be made; kConfig where another run uses
/// it.
RunFolder prepare_run_folder(const train::Config& config, const std::string& name, World& world) {
  RunFolder folder;
  std::string chosen;
  if (world.rank() == 0) {
    if (config.job.dump_folder) make_folder(*config.job.dump_folder);
    const fs::path run =
        config.job.dump_folder ? fs::path(*config.job.dump_folder) : choose_folder(name);
    chosen = fs::absolute(run).lexically_normal().string();
    // Before any rank opens its log there.
    folder.locks = lock_folders(train::resolved_for_run(config, chosen));
  }
  chosen = comm::all_gather_bytes(world.control(), chosen, "run folder").front();
  folder.config = train::resolved_for_run(config, chosen);
  return folder;
}

/// RUN/config.toml, once the command is not refused any more. Errors: kIo.
void write_run_config(const train::Config& run) {
  const fs::path file = fs::path(*run.job.dump_folder) / "config.toml";
  const std::string text = train::to_toml(run);
  if (!holds(file, text)) write_atomically(file, text);
}

}  // namespace

int run_train(const TrainArguments& arguments) {
  train::Config config = train::load_config(arguments.config_file);
  apply(arguments.overrides, config);
  train::validate(config, train::Verb::kTrain);
  if (arguments.print_config) {
    std::cout << train::to_toml(config);
    return kDone;
  }
  return run_ranks(config, arguments.nproc, [&](World& world, RunPhase& phase) {
    const RunFolder run_folder = prepare_run_folder(config, run_name(arguments.config_file), world);
    const train::Config& run = run_folder.config;
    const std::filesystem::path folder = *run.job.dump_folder;
    log::init({.rank = world.rank(),
               .world_size = world.size(),
               .file = folder / "logs" / concat("rank_", world.rank(), ".log")});
    log::info("run folder ", folder.string());
    const StopSignal stop;
    train::TrainingHooks hooks;
    hooks.on_first_step = [&] {
      if (world.rank() == 0) {
        world.work_at("writing config.toml");
        write_run_config(run);
      }
      phase.begin_steps();
    };
    hooks.stop_requested = [] { return StopSignal::requested(); };
    hooks.on_failure = [&](const std::exception& error) {
      if (world.size() > 1) comm::report_failure(&world, error, exit_code(error, phase.now()));
    };
    if (arguments.profile) hooks.profiling = train::Profiling::kYes;
    train::run_training(run, world, hooks);
  });
}

}  // namespace tessera::cli
