#include "io/folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <functional>
#include <system_error>
#include <thread>

#include "base/appended_file.h"
#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

bool is_inside(const fs::path& file, const fs::path& folder) {
  const auto [rest, unused] = std::mismatch(folder.begin(), folder.end(), file.begin(), file.end());
  return rest == folder.end();
}

fs::path real_path(const fs::path& path) {
  std::error_code failed;
  fs::path real = fs::canonical(path, failed);
  TESSERA_CHECK(!failed, ErrorKind::kIo, "cannot open ", shown(path), ": ", failed.message());
  return real;
}

}  // namespace

bool is_plain_file_name(std::string_view name) {
  constexpr std::size_t kLongest = 255;
  return !name.empty() && name.size() <= kLongest && name != "." && name != ".." &&
         std::none_of(name.begin(), name.end(), [](char c) {
           return c == '/' || c == '\\' || static_cast<unsigned char>(c) < 0x20U || c == '\x7F';
         });
}

fs::path file_inside(const fs::path& folder, const std::string& name) {
  const fs::path real_folder = real_path(folder);
  const fs::path real_file = real_path(folder / name);
  if (is_inside(real_file, real_folder)) return folder / name;
  // The hub's cache shares files so: models--NAME/snapshots/REVISION/FILE -> ../../blobs/HASH.
  const bool is_snapshot = real_folder.parent_path().filename() == "snapshots";
  const fs::path blobs = real_folder.parent_path().parent_path() / "blobs";
  TESSERA_CHECK(is_snapshot && is_inside(real_file, blobs), ErrorKind::kFormat, folder.native(),
                ": ", printable(name), " is a link to ", shown(real_file),
                ", expected a file inside the folder; copy it there");
  return folder / name;
}

std::optional<fs::path> optional_file_inside(const fs::path& folder, const std::string& name) {
  std::error_code ignored;
  if (!fs::exists(fs::symlink_status(folder / name, ignored))) return std::nullopt;
  fs::path file = file_inside(folder, name);
  TESSERA_CHECK(fs::is_regular_file(file, ignored), ErrorKind::kFormat, folder.native(), ": ",
                printable(name), " is no plain file, expected one");
  return file;
}

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kLookAgain{20};
// The limit of retries, since some file systems give a file a new number at each request.
constexpr int kMostReplaced = 100;

std::string this_process() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  return concat("process ", ::getpid(), " on ", host.data());
}

/// Returns what the holder wrote; it may be between taking the lock and writing.
std::string holder(int descriptor) {
  std::array<char, 300> text{};
  const ssize_t size = ::pread(descriptor, text.data(), text.size(), 0);
  if (size <= 0) return "another process";
  const std::string shown = printable({text.data(), static_cast<std::size_t>(size)}, 300);
  return shown.substr(1, shown.size() - 2);  // it becomes part of our own sentence and is no name
}

/// Whether the locked file is still the one at the path: a holder may have unlinked it, and then no
/// other process will open the file that is locked here.
bool stands_at(int descriptor, const fs::path& path) {
  struct stat held{};
  struct stat named{};
  return ::fstat(descriptor, &held) == 0 && ::lstat(path.c_str(), &named) == 0 &&
         held.st_dev == named.st_dev && held.st_ino == named.st_ino;
}

/// Writes only what a message tells later: the lock is held even where this fails.
void write_holder(int descriptor) {
  const std::string text = this_process();
  if (::ftruncate(descriptor, 0) != 0) return;
  [[maybe_unused]] const ssize_t written = ::pwrite(descriptor, text.data(), text.size(), 0);
}

}  // namespace

std::filesystem::path lock_file(const std::filesystem::path& folder) { return folder / ".lock"; }

FolderLock::FolderLock(const std::filesystem::path& folder, std::chrono::milliseconds patience,
                       const std::string& remedy) {
  const auto path = lock_file(folder);
  int error_number = 0;
  const auto failed = [&](std::string_view what) {
    return concat("cannot ", what, " ", shown(path), ": ",
                  std::generic_category().message(error_number), " (errno ", error_number, ")");
  };
  const auto open = [&] {
    if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
    require_no_link(path);
    descriptor_ =
        ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    error_number = errno;
    TESSERA_CHECK(descriptor_ >= 0, ErrorKind::kIo, failed("create"));
  };
  open();
  int replaced = 0;
  const auto deadline = Clock::now() + patience;
  while (true) {
    if (::flock(descriptor_, LOCK_EX | LOCK_NB) == 0) {
      if (stands_at(descriptor_, path) || ++replaced == kMostReplaced) break;
      open();
      continue;
    }
    error_number = errno;
    if (error_number == EINTR) continue;
    const bool is_held = error_number == EWOULDBLOCK;
    if (is_held && Clock::now() < deadline) {
      std::this_thread::sleep_for(kLookAgain);
      continue;
    }
    const std::string by = holder(descriptor_);
    ::close(std::exchange(descriptor_, -1));
    TESSERA_CHECK(is_held, ErrorKind::kIo, failed("lock"));
    throw Error(ErrorKind::kConfig, concat(shown(folder), ": found in use by ", by,
                                           ", expected no other user; ", remedy));
  }
  write_holder(descriptor_);
}

FolderLock::~FolderLock() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

namespace {

constexpr char kEnd = '\0';  // ends a path in a list: no name has it

/// Whether the name is free; a link that leads nowhere takes its name, too.
bool is_free(const fs::path& path) {
  std::error_code unknown;  // then it counts as taken
  return fs::symlink_status(path, unknown).type() == fs::file_type::not_found;
}

}  // namespace

fs::path whole_path(const fs::path& path) {
  fs::path whole = fs::absolute(path).lexically_normal();
  return whole.has_filename() ? whole : whole.parent_path();
}

void MadePaths::make(const fs::path& folder, std::string_view key) {
  const fs::path whole = whole_path(folder);
  std::error_code error;
  std::vector<fs::path> absent;  // the innermost first
  for (fs::path path = whole; path != path.root_path() && !fs::exists(path, error);
       path = path.parent_path()) {
    absent.push_back(path);
  }
  error.clear();
  for (std::size_t left = absent.size(); left > 0 && !error; --left) {
    // Another run may make it at the same time: then it is not ours.
    if (fs::create_directory(absent[left - 1], error)) add_folder(absent[left - 1]);
  }
  if (!error) fs::create_directories(whole, error);  // says why it is no folder
  TESSERA_CHECK(!error, ErrorKind::kIo, key, ": cannot make ", folder.string(), " (",
                error.message(), ")");
}

void MadePaths::add_folder(const fs::path& folder) {
  const base::Lock lock(mutex_);
  folders_.push_back(whole_path(folder));
}

void MadePaths::expect_file(const fs::path& file) {
  const fs::path whole = whole_path(file);
  const base::Lock lock(mutex_);
  if (is_free(whole)) files_.push_back(whole);
  for (fs::path path = whole.parent_path(); path != path.root_path() && is_free(path);
       path = path.parent_path()) {
    folders_.push_back(path);
  }
}

void MadePaths::add_lock(const fs::path& file) {
  const base::Lock lock(mutex_);
  locks_.push_back(whole_path(file));
}

void MadePaths::remove() const {
  const base::Lock lock(mutex_);
  // A path that cannot be removed stays: the user is told only of the refusal.
  for (const auto* const files : {&files_, &locks_}) {
    for (const fs::path& path : *files) {
      [[maybe_unused]] const int gone = ::unlink(path.c_str());
    }
  }
  // The longer path goes first where one is inside the other.
  std::vector<fs::path> folders = folders_;
  std::ranges::sort(folders, std::greater(),
                    [](const fs::path& path) { return path.native().size(); });
  for (const fs::path& path : folders) {
    [[maybe_unused]] const int gone = ::rmdir(path.c_str());
  }
}

std::string MadePaths::folders() const {
  const base::Lock lock(mutex_);
  std::string text;
  for (const fs::path& path : folders_) text += path.native() + kEnd;
  return text;
}

void MadePaths::take_folders(std::string_view folders) {
  const base::Lock lock(mutex_);
  for (std::size_t begin = 0; begin < folders.size();) {
    const std::size_t end = std::min(folders.find(kEnd, begin), folders.size());
    folders_.emplace_back(folders.substr(begin, end - begin));
    begin = end + 1;
  }
}

}  // namespace tessera
