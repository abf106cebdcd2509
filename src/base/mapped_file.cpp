#include "base/mapped_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/text/printable.h"
#include "base/where_relative.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::string reason(int error_number) {
  return concat(std::generic_category().message(error_number), " (errno ", error_number, ")");
}

// A fault maps the cached pages of the whole aligned window around it (Linux, fault_around_bytes).
constexpr std::uintptr_t kFaultWindowBytes = std::uintptr_t{64} * 1024;

}  // namespace

InputFile::InputFile(std::filesystem::path path) : path_(std::move(path)) {
  // Without O_NONBLOCK opening a pipe would wait for a writer for ever.
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  const int open_error = errno;
  TESSERA_CHECK(descriptor_ >= 0, ErrorKind::kIo, "cannot open ", shown(path_), ": ",
                reason(open_error), open_error == ENOENT ? where_relative(path_) : "");
  struct stat status{};
  const int failed = ::fstat(descriptor_, &status);
  const int error_number = errno;
  const bool regular = failed == 0 && S_ISREG(status.st_mode);
  if (!regular) ::close(std::exchange(descriptor_, -1));
  TESSERA_CHECK(failed == 0, ErrorKind::kIo, "cannot stat ", shown(path_), ": ",
                reason(error_number));
  TESSERA_CHECK(regular, ErrorKind::kIo, "cannot read ", shown(path_),
                ": found a folder or a device, expected a regular file");
  size_bytes_ = status.st_size;
}

InputFile::~InputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

InputFile& InputFile::operator=(InputFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

void InputFile::read_range(std::int64_t offset, std::span<std::byte> out) const {
  std::size_t done = 0;
  while (done < out.size()) {
    const ssize_t got = ::pread(descriptor_, out.data() + done, out.size() - done,
                                offset + static_cast<std::int64_t>(done));
    if (got < 0 && errno == EINTR) continue;
    TESSERA_CHECK(got >= 0, ErrorKind::kIo, "cannot read ", shown(path_), " at byte ", offset, ": ",
                  reason(errno));
    TESSERA_CHECK(got > 0, ErrorKind::kIo, "cannot read ", shown(path_), ": it ends after ",
                  offset + static_cast<std::int64_t>(done), " bytes, expected at least ",
                  offset + static_cast<std::int64_t>(out.size()));
    done += static_cast<std::size_t>(got);
  }
}

std::string read_text_file(const std::filesystem::path& path, std::int64_t max_bytes) {
  const InputFile file(path);
  TESSERA_CHECK(file.size_bytes() <= max_bytes, ErrorKind::kFormat, shown(path), ": found ",
                file.size_bytes(), " bytes, expected at most ", max_bytes,
                " for a file of this kind");
  std::string text(static_cast<std::size_t>(file.size_bytes()), '\0');
  file.read_range(0, std::as_writable_bytes(std::span(text)));
  return text;
}

namespace {

/// A mapping for the handler of SIGBUS, which takes no lock and allocates nothing.
struct Watched {
  std::atomic<const std::string*> name = nullptr;  ///< null: free
  std::atomic<std::uintptr_t> begin = 0;
  std::atomic<std::uintptr_t> end = 0;  ///< 0: not mapped
};

// A process has some 65530 mappings by default; mappings beyond this number are not watched.
constexpr std::size_t kMostWatched = 65536;
constexpr std::size_t kUnwatched = 0;
constinit std::array<Watched, kMostWatched> watched_files;  // the first one stays unused
constinit std::atomic<std::size_t> last_watched = kUnwatched;
static_assert(std::atomic<std::uintptr_t>::is_always_lock_free &&
                  std::atomic<const std::string*>::is_always_lock_free,
              "a handler reads them");

std::size_t watch(std::span<const std::byte> bytes, const std::filesystem::path& path) {
  auto name = std::make_unique<const std::string>(shown(path));
  for (std::size_t tried = 0; tried < kMostWatched; ++tried) {
    const std::size_t at = (last_watched.fetch_add(1) + 1) % kMostWatched;
    Watched& place = watched_files[at];
    const std::string* none = nullptr;
    if (at == kUnwatched || !place.name.compare_exchange_strong(none, name.get())) continue;
    place.name.store(name.release());
    const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data());
    place.begin.store(begin);
    place.end.store(begin + bytes.size());
    return at;
  }
  return kUnwatched;
}

void unwatch(std::size_t at) noexcept {
  if (at == kUnwatched) return;
  Watched& place = watched_files[at];
  place.end.store(0);
  const std::unique_ptr<const std::string> name(place.name.load());
  place.name.store(nullptr);
}

/// Text in memory of a fixed size.
class FixedText {
 public:
  void add(std::string_view text) {
    const std::size_t count = std::min(text.size(), text_.size() - size_);
    std::memcpy(text_.data() + size_, text.data(), count);
    size_ += count;
  }
  void add(std::uint64_t number) {
    std::array<char, 20> digits{};
    std::size_t begin = digits.size();
    do {
      digits[--begin] = static_cast<char>('0' + number % 10);
      number /= 10;
    } while (number != 0);
    add({digits.data() + begin, digits.size() - begin});
  }
  bool write_to(int descriptor) const {
    return ::write(descriptor, text_.data(), size_) == static_cast<ssize_t>(size_);
  }

 private:
  std::array<char, 8192> text_;  // shown paths are bounded
  std::size_t size_ = 0;
};

constinit std::atomic<const CutFileReport*> cut_file_report = nullptr;
struct sigaction action_before{};

/// Calls only functions that a signal handler may call.
void add_message(FixedText& text, const Watched& file) {
  text.add(*file.name.load());
  text.add(": became shorter while it was read (it was ");
  text.add(file.end.load() - file.begin.load());
  text.add(
      " bytes when it was opened) or its disk failed, expected a file that stays as it is; "
      "restore it and run again, and put new data under another name or by a rename");
}

[[noreturn]] void end_with_message(const Watched& file) {
  const CutFileReport& report = *cut_file_report.load();
  FixedText told, printed;
  told.add(report.head);
  add_message(told, file);
  printed.add("tessera: io: ");
  add_message(printed, file);
  printed.add("\n");
  if (report.descriptor < 0 || !told.write_to(report.descriptor)) printed.write_to(STDERR_FILENO);
  ::_exit(1);
}

void on_bus_error(int number, siginfo_t* info, void* context) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  for (const Watched& file : watched_files) {
    // A signal sent by a process has no address.
    if (info->si_code > 0 && address >= file.begin.load() && address < file.end.load()) {
      end_with_message(file);
    }
  }
  if ((action_before.sa_flags & SA_SIGINFO) != 0) {
    return action_before.sa_sigaction(number, info, context);
  }
  if (action_before.sa_handler != SIG_DFL && action_before.sa_handler != SIG_IGN) {
    return action_before.sa_handler(number);
  }
  ::signal(number, SIG_DFL);
  ::raise(number);  // takes effect when the handler returns
}

}  // namespace

void report_cut_files(const CutFileReport& report) {
  auto mine = std::make_unique<const CutFileReport>(report);
  const std::unique_ptr<const CutFileReport> before(cut_file_report.exchange(mine.release()));
  if (before != nullptr) return;
  struct sigaction action{};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO;
  ::sigemptyset(&action.sa_mask);
  TESSERA_CHECK(::sigaction(SIGBUS, &action, &action_before) == 0, ErrorKind::kIo,
                "cannot handle SIGBUS: ", reason(errno));
}

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path) {
  const InputFile file(path);
  if (file.size_bytes() == 0) return;  // an empty mapping is refused by the system
  const auto length = static_cast<std::size_t>(file.size_bytes());
  void* const address = ::mmap(nullptr, length, PROT_READ, MAP_SHARED, file.descriptor(), 0);
  TESSERA_CHECK(address != MAP_FAILED, ErrorKind::kIo, "cannot map ", shown(path), " (", length,
                " bytes): ", reason(errno));
  bytes_ = {static_cast<const std::byte*>(address), length};
  watched_ = watch(bytes_, path_);
}

MappedFile::~MappedFile() { unmap(); }

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      bytes_(std::exchange(other.bytes_, {})),
      watched_(std::exchange(other.watched_, kUnwatched)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(bytes_, other.bytes_);
  std::swap(watched_, other.watched_);
  return *this;
}

void MappedFile::unmap() noexcept {
  unwatch(std::exchange(watched_, kUnwatched));
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  bytes_ = {};
}

std::span<const std::byte> MappedFile::range(std::int64_t offset, std::int64_t length) const {
  TESSERA_CHECK(
      offset >= 0 && length >= 0 && offset <= size_bytes() && length <= size_bytes() - offset,
      ErrorKind::kFormat, shown(path_), ": bytes from ", offset, ", ", length,
      " of them, do not lie inside its ", size_bytes(), " bytes");
  return bytes_.subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(length));
}

void MappedFile::advise(Access access) const {
  if (bytes_.empty()) return;
  int advice = MADV_NORMAL;
  if (access == Access::kSequential) advice = MADV_SEQUENTIAL;
  if (access == Access::kRandom) advice = MADV_RANDOM;
  ::madvise(const_cast<std::byte*>(bytes_.data()), bytes_.size(), advice);
}

void MappedFile::release(std::span<const std::byte> part) const {
  if (part.empty()) return;
  TESSERA_INVARIANT(
      part.data() >= bytes_.data() && part.size() <= bytes_.size() &&
          part.data() - bytes_.data() <= static_cast<std::ptrdiff_t>(bytes_.size() - part.size()),
      "release of memory outside the mapping of ", path_.native());
  // Rounded outwards to the windows that faults mapped: another reader there only faults its pages
  // in again.
  const auto mapping = reinterpret_cast<std::uintptr_t>(bytes_.data());
  const auto first = reinterpret_cast<std::uintptr_t>(part.data()) & ~(kFaultWindowBytes - 1);
  const auto last =
      (reinterpret_cast<std::uintptr_t>(part.data()) + part.size() + kFaultWindowBytes - 1) &
      ~(kFaultWindowBytes - 1);
  const std::size_t begin = std::max(first, mapping) - mapping;
  const std::size_t end = std::min<std::size_t>(last - mapping, bytes_.size());
  ::madvise(const_cast<std::byte*>(bytes_.data() + begin), end - begin, MADV_DONTNEED);
}

}  // namespace tessera
