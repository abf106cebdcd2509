#include "base/terminal_line.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <mutex>

namespace tessera::terminal_line {
namespace {

constexpr const char* kEraseLine = "\r\x1B[K";

/// The one mutable thing: whether a line stands there.
struct State {
  std::mutex mutex;
  bool visible = false;
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
  // A terminal that is gone cannot be told.
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
}

}  // namespace

bool is_possible() { return ::isatty(STDERR_FILENO) == 1; }

void show(const std::string& text) {
  if (!is_possible()) return;
  State& line = state();
  const std::lock_guard lock(line.mutex);
  // The last column stays free: a character there would wrap on some terminals.
  put(kEraseLine + text.substr(0, columns() - 1));
  line.visible = true;
}

void clear() {
  State& line = state();
  const std::lock_guard lock(line.mutex);
  if (line.visible) put(kEraseLine);
  line.visible = false;
}

void clear_of_any_process() {
  State& line = state();
  const std::lock_guard lock(line.mutex);
  if (is_possible()) put(kEraseLine);
  line.visible = false;
}

}  // namespace tessera::terminal_line
