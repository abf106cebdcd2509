#include "base/log.h"

#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

#include "base/appended_file.h"
#include "base/mutex.h"
#include "base/text/printable.h"

namespace tessera::log {
namespace {

spdlog::level::level_enum level_of(Level level) {
  switch (level) {
    case Level::kWarn:
      return spdlog::level::warn;
    case Level::kError:
      return spdlog::level::err;
    case Level::kNone:
      return spdlog::level::off;
    default:
      return spdlog::level::info;
  }
}

/// Writes each line at once, and follows no link.
class FileSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit FileSink(const std::filesystem::path& path) : file_(path, AppendedFile::From::kEnd) {}

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    file_.append({line.data(), line.size()});
  }
  void flush_() override {}

  AppendedFile file_;
};

/// Returns the least level that stderr shows: `asked` on rank 0, at least errors on other ranks.
spdlog::level::level_enum level_on_screen(int rank, Level asked) {
  return rank == 0 ? level_of(asked) : std::max(level_of(asked), spdlog::level::err);
}

std::shared_ptr<spdlog::logger> make_logger(const Options& options, Level on_screen) {
  auto screen = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  screen->set_level(level_on_screen(options.rank, on_screen));
  auto logger = std::make_shared<spdlog::logger>("tessera", std::move(screen));
  if (!options.file.empty()) {
    logger->sinks().push_back(std::make_shared<FileSink>(options.file));
  }
  std::string pattern = "%Y-%m-%d %H:%M:%S.%e %l ";
  if (options.world_size > 1) pattern += "[rank " + std::to_string(options.rank) + "] ";
  logger->set_pattern(pattern + "%v");
  logger->flush_on(spdlog::level::trace);
  return logger;
}

/// The only mutable state: the sinks of lines, stderr first.
class Sinks {
 public:
  std::shared_ptr<spdlog::logger> get() {
    const base::Lock lock(mutex_);
    if (!logger_) logger_ = make_logger({}, on_screen_);
    return logger_;
  }
  void open(const Options& options) {
    const base::Lock lock(mutex_);
    logger_ = make_logger(options, on_screen_);
    rank_ = options.rank;
  }
  void set_level(Level on_screen) {
    const base::Lock lock(mutex_);
    on_screen_ = on_screen;
    if (logger_) logger_->sinks().front()->set_level(level_on_screen(rank_, on_screen));
  }

 private:
  base::Mutex mutex_;
  std::shared_ptr<spdlog::logger> logger_ TESSERA_GUARDED_BY(mutex_);
  Level on_screen_ TESSERA_GUARDED_BY(mutex_) = Level::kNone;
  int rank_ TESSERA_GUARDED_BY(mutex_) = 0;
};

Sinks& sinks() {
  // Never destroyed: a watcher thread may report a failure while the process exits.
  static auto* const instance = new Sinks;
  return *instance;
}

}  // namespace

void init(const Options& options) {
  try {
    if (options.file.has_parent_path()) {
      std::filesystem::create_directories(options.file.parent_path());
    }
    sinks().open(options);
  } catch (const Error& error) {  // AppendedFile's errors name the file
    throw Error(error.kind(), concat("log file ", error.what()));
  } catch (const std::exception& error) {  // errors of spdlog and of the file system
    throw Error(ErrorKind::kIo,
                concat("cannot open the log file ", shown(options.file), ": ", error.what()));
  }
}

void write(Level level, const std::string& message) {
  terminal_line::clear();
  sinks().get()->log(level_of(level), spdlog::string_view_t(message));
}

void write_to_file(Level level, const std::string& message) {
  const auto all = sinks().get();
  if (all->sinks().size() < 2) return;
  spdlog::logger file("tessera", all->sinks().back());
  file.flush_on(spdlog::level::trace);
  file.log(level_of(level), spdlog::string_view_t(message));
}

}  // namespace tessera::log

namespace tessera {

void set_log_level(LogLevel level) { log::sinks().set_level(level); }

}  // namespace tessera

namespace tessera::terminal_line {
namespace {

constexpr const char* kEraseLine = "\r\x1B[K";

/// The only mutable state: whether a line of progress is shown.
struct State {
  base::Mutex mutex;
  bool visible TESSERA_GUARDED_BY(mutex) = false;
};

State& state() {
  // Never destroyed: other threads may log while the process exits.
  static auto* const instance = new State;
  return *instance;
}

std::size_t columns() {
  winsize size{};
  const bool known = ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1;
  return known ? size.ws_col : 80;
}

void put(const std::string& text) {
  // A failed write to a terminal that is gone is ignored.
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
}

}  // namespace

bool is_possible() { return ::isatty(STDERR_FILENO) == 1; }

void show(const std::string& text) {
  if (!is_possible()) return;
  State& line = state();
  const base::Lock lock(line.mutex);
  // The last column stays free: a character there would wrap on some terminals.
  put(kEraseLine + text.substr(0, columns() - 1));
  line.visible = true;
}

void clear() {
  State& line = state();
  const base::Lock lock(line.mutex);
  if (line.visible) put(kEraseLine);
  line.visible = false;
}

void clear_of_any_process() {
  State& line = state();
  const base::Lock lock(line.mutex);
  if (is_possible()) put(kEraseLine);
  line.visible = false;
}

}  // namespace tessera::terminal_line
