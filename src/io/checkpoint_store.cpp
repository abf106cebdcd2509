#include "io/checkpoint_store.h"

#include <algorithm>
#include <charconv>
#include <system_error>

#include "base/mapped_file.h"
#include "base/text/printable.h"
#include "io/atomic_file.h"
#include "io/checkpoint_manifest.h"
#include "io/folder.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kStepPrefix = "step-";
constexpr std::string_view kTemporary = ".tmp";
// A complete step that gave its name to another of the same number, until that one has it.
constexpr std::string_view kReplaced = ".replaced.tmp";
constexpr std::int64_t kMaxLatestBytes = 64;

void check_done(const std::error_code& error, std::string_view what, const fs::path& path) {
  TESSERA_CHECK(!error, ErrorKind::kIo, "cannot ", what, " ", shown(path), ": ", error.message(),
                " (errno ", error.value(), ")");
}

std::vector<fs::path> entries(const fs::path& folder) {
  std::vector<fs::path> paths;
  std::error_code error;
  fs::directory_iterator entry(folder, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    paths.push_back(entry->path());
  }
  if (error != std::errc::no_such_file_or_directory) check_done(error, "list", folder);
  return paths;
}

/// Whether the name is one of ours: the folder may hold other things, too.
bool is_unfinished(std::string_view name) {
  return name.ends_with(kTemporary) &&
         (name.starts_with(kStepPrefix) || name.starts_with(concat(kLatestFile, ".")));
}

void rename_folder(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::rename(from, to, error);
  check_done(error, "rename to", to);
}

/// Removes in two moves: a crash in between leaves no complete folder with missing files.
void remove_complete(const fs::path& folder) {
  fs::path aside = folder;
  aside += concat(".old", kTemporary);
  rename_folder(folder, aside);
  std::error_code error;
  fs::remove_all(aside, error);
  check_done(error, "remove", aside);
}

}  // namespace

std::string step_folder(std::int64_t step) { return concat(kStepPrefix, step); }

std::optional<std::int64_t> parse_step_folder(std::string_view name) {
  if (!name.starts_with(kStepPrefix)) return std::nullopt;
  const std::string_view digits = name.substr(kStepPrefix.size());
  std::int64_t step = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  const bool whole = error == std::errc() && end == digits.data() + digits.size();
  // "step-007" and "step--1" are never the names of our folders.
  return whole && step >= 0 && step_folder(step) == name ? std::optional(step) : std::nullopt;
}

bool CheckpointStore::takes(std::string_view name) {
  return name.starts_with(kStepPrefix) || name == kLatestFile ||
         name.starts_with(concat(kLatestFile, "."));
}

bool CheckpointStore::is_of_a_run() const {
  std::error_code ignored;
  // Other programs may have a link `latest` next to folders of steps.
  if (fs::is_regular_file(fs::symlink_status(folder_ / kLatestFile, ignored))) return true;
  for (const std::int64_t step : steps()) {
    if (fs::exists(complete(step) / kManifestFile, ignored)) return true;
  }
  // RUN itself and its metrics also have a lock.
  return fs::exists(lock_file(folder_), ignored) && !fs::exists(folder_ / "config.toml", ignored) &&
         !fs::exists(folder_ / "metrics.jsonl", ignored);
}

fs::path CheckpointStore::complete(std::int64_t step) const { return folder_ / step_folder(step); }

fs::path CheckpointStore::temporary(std::int64_t step) const {
  return folder_ / concat(step_folder(step), kTemporary);
}

std::vector<std::int64_t> CheckpointStore::steps() const {
  std::vector<std::int64_t> found;
  for (const fs::path& path : entries(folder_)) {
    std::error_code ignored;
    const auto step = parse_step_folder(path.filename().native());
    if (step && fs::is_directory(path, ignored)) found.push_back(*step);
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::optional<std::int64_t> CheckpointStore::latest() const {
  const fs::path file = folder_ / kLatestFile;
  std::error_code ignored;
  if (!fs::exists(fs::symlink_status(file, ignored))) {
    const auto found = steps();
    return found.empty() ? std::nullopt : std::optional(found.back());
  }
  std::string text = read_text_file(file, kMaxLatestBytes);
  while (text.ends_with('\n')) text.pop_back();
  const auto step = parse_step_folder(text);
  TESSERA_CHECK(step, ErrorKind::kFormat, shown(file), ": found ", printable(text),
                ", expected step-N; write the name of a complete checkpoint into it");
  TESSERA_CHECK(fs::is_directory(complete(*step), ignored), ErrorKind::kFormat, shown(file),
                ": found ", text,
                ", which is not there; write the name of a complete checkpoint into it, or remove "
                "it: then the newest one counts");
  return step;
}

void CheckpointStore::clean() const {
  std::error_code error;
  fs::create_directories(folder_, error);
  check_done(error, "make the folder", folder_);
  for (const fs::path& path : entries(folder_)) {
    const std::string name = path.filename().native();
    if (!is_unfinished(name)) continue;
    const auto replaced = name.ends_with(kReplaced)
                              ? parse_step_folder(name.substr(0, name.size() - kReplaced.size()))
                              : std::nullopt;
    if (replaced && !fs::exists(fs::symlink_status(complete(*replaced), error))) {
      rename_folder(path, complete(*replaced));  // a crash came before the other one had its name
      continue;
    }
    fs::remove_all(path, error);
    check_done(error, "remove the unfinished", path);
  }
}

void CheckpointStore::begin(std::int64_t step) const {
  std::error_code error;
  fs::create_directories(temporary(step), error);
  check_done(error, "make the folder", temporary(step));
  // Another rank may have made the folder; through a link the ranks would write elsewhere.
  TESSERA_CHECK(fs::is_directory(fs::symlink_status(temporary(step), error)), ErrorKind::kIo,
                shown(temporary(step)), ": found a link, expected a folder of its own; remove it");
}

void CheckpointStore::discard(std::int64_t step) const noexcept {
  std::error_code ignored;
  fs::remove_all(temporary(step), ignored);
}

void CheckpointStore::finish(std::int64_t step) const {
  sync_folder(temporary(step));
  std::error_code error;
  const fs::path replaced = folder_ / concat(step_folder(step), kReplaced);
  const bool replaces = fs::exists(complete(step), error);
  if (replaces) {
    fs::remove_all(replaced, error);
    check_done(error, "remove the unfinished", replaced);
    rename_folder(complete(step), replaced);
  }
  try {
    rename_folder(temporary(step), complete(step));
  } catch (const Error&) {
    if (replaces) rename_folder(replaced, complete(step));
    throw;
  }
  sync_folder(folder_);
  // The folder that it replaced stays whole on disk until here.
  fs::remove_all(replaced, error);
  check_done(error, "remove", replaced);
}

void CheckpointStore::set_latest(std::int64_t step) const {
  const std::string text = step_folder(step);
  const fs::path path = folder_ / kLatestFile;
  std::error_code none;
  // A resumed run most often finds this text there already: a write would wait for the disk.
  if (fs::file_size(path, none) == text.size() && read_text_file(path, kMaxLatestBytes) == text) {
    return;
  }
  write_atomically(path, text);
}

void CheckpointStore::keep(std::int64_t count, std::int64_t step) const {
  if (count <= 0) return;
  auto found = steps();
  std::erase_if(found, [step](std::int64_t one) { return one > step; });
  const auto kept = static_cast<std::size_t>(count);
  for (std::size_t i = 0; i + kept < found.size(); ++i) remove_complete(complete(found[i]));
}

}  // namespace tessera
