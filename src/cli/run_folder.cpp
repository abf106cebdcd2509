#include "cli/run_folder.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <ctime>
#include <fstream>
#include <iterator>
#include <optional>
#include <set>
#include <system_error>

#include "base/environment.h"
#include "base/hash.h"
#include "base/log.h"
#include "comm/group.h"
#include "io/atomic_file.h"
#include "tessera/error.h"
#include "train/config/config_resolve.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

constexpr char kBetween = '\0';  // of paths: no name has it

fs::path whole_path(const fs::path& path) {
  fs::path whole = fs::absolute(path).lexically_normal();
  return whole.has_filename() ? whole : whole.parent_path();
}

}  // namespace

void MadeFolders::make(const fs::path& folder, std::string_view key) {
  std::error_code error;
  std::vector<fs::path> absent;  // the innermost first
  for (fs::path path = whole_path(folder); path != path.root_path() && !fs::exists(path, error);
       path = path.parent_path()) {
    absent.push_back(path);
  }
  error.clear();
  for (std::size_t left = absent.size(); left > 0 && !error; --left) {
    const fs::path& path = absent[left - 1];
    // Another run may make it at the same time: then it is not ours.
    if (!fs::create_directory(path, error)) continue;
    const base::Lock lock(mutex_);
    (left == 1 ? own_ : above_).push_back(path);
  }
  if (!error) fs::create_directories(folder, error);  // says why it is none
  TESSERA_CHECK(!error, ErrorKind::kIo, key, ": cannot make ", folder.string(), " (",
                error.message(), ")");
}

void MadeFolders::add(const fs::path& path) {
  const base::Lock lock(mutex_);
  own_.push_back(whole_path(path));
}

void MadeFolders::leave(const fs::path& path) {
  const base::Lock lock(mutex_);
  std::erase(own_, whole_path(path));
}

void MadeFolders::remove() const {
  const base::Lock lock(mutex_);
  std::error_code ignored;
  for (const fs::path& path : own_) fs::remove_all(path, ignored);
  // Of two that one is inside the other the longer path goes first.
  std::vector<fs::path> above = above_;
  std::ranges::sort(above, std::greater(),
                    [](const fs::path& path) { return path.native().size(); });
  for (const fs::path& path : above) fs::remove(path, ignored);
}

std::string MadeFolders::own() const {
  const base::Lock lock(mutex_);
  std::string text;
  for (const fs::path& path : own_) text += path.native() + kBetween;
  return text;
}

void MadeFolders::take(const std::string& own) {
  const base::Lock lock(mutex_);
  for (std::size_t begin = 0; begin < own.size();) {
    const std::size_t end = own.find(kBetween, begin);
    own_.emplace_back(own.substr(begin, end - begin));
    begin = end + 1;
  }
}

namespace {

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
fs::path make_fresh_folder(const std::string& name, MadeFolders& made) {
  made.make("outputs");
  const std::string base = concat("outputs/", local_time(), "-", name);
  for (int attempt = 1;; ++attempt) {
    const fs::path folder = attempt == 1 ? base : concat(base, "-", attempt);
    std::error_code error;
    if (fs::create_directory(folder, error)) {
      made.add(folder);
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

fs::path choose_folder(const std::string& name, MadeFolders& made) {
  const auto note = note_for_restarts();
  if (!note) return make_fresh_folder(name, made);
  if (const auto earlier = folder_of_earlier_attempt(*note)) return *earlier;
  const auto folder = make_fresh_folder(name, made);
  made.make(note->parent_path());
  std::error_code ignored;
  if (!fs::exists(fs::symlink_status(*note, ignored))) made.add(*note);
  write_atomically(*note, fs::absolute(folder).string() + '\n');
  return folder;
}

/// Locks on RUN and on each folder of the run, inside RUN too: another run may name it as its own.
std::vector<FolderLock> lock_folders(const train::Config& run, MadeFolders& made) {
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
    made.make(path, key);
    std::error_code error;
    const fs::path real = fs::canonical(path, error);
    TESSERA_CHECK(!error, ErrorKind::kIo, key, ": cannot open ", path.string(), " (",
                  error.message(), ")");
    if (!locked.insert(real).second) continue;
    try {
      locks.emplace_back(real, kEndOfEarlierRun,
                         concat("wait for that run to end, or set another ", key));
    } catch (const Error&) {
      made.leave(path);  // another run was quicker: it has become that one's
      throw;
    }
  }
  return locks;
}

}  // namespace

void prepare_run_folder(const train::Config& config, const std::string& name, World& world,
                        RunFolder& folder) {
  std::string chosen;
  if (world.rank() == 0) {
    if (config.job.dump_folder) folder.made.make(*config.job.dump_folder);
    const fs::path run = config.job.dump_folder ? fs::path(*config.job.dump_folder)
                                                : choose_folder(name, folder.made);
    chosen = fs::absolute(run).lexically_normal().string();
    // Before any rank opens its log there.
    folder.locks = lock_folders(train::resolved_for_run(config, chosen), folder.made);
    chosen += kBetween + folder.made.own();
  }
  chosen = comm::from_first_rank(world, "run folder", chosen);
  const std::size_t end = chosen.find(kBetween);
  if (world.rank() != 0) folder.made.take(chosen.substr(end + 1));
  folder.config = train::resolved_for_run(config, chosen.substr(0, end));
}

void write_run_config(const train::Config& run) {
  const fs::path file = fs::path(*run.job.dump_folder) / "config.toml";
  const std::string text = train::to_toml(run);
  if (!holds(file, text)) write_atomically(file, text);
}

}  // namespace tessera::cli
