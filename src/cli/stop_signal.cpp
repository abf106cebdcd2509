#include "cli/stop_signal.h"

#include <signal.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "tessera/error.h"

namespace tessera::cli {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM};

std::atomic<bool> arrived{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a handler may touch it");

/// Only what a handler may call.
void on_signal(int number) {
  if (!arrived.exchange(true)) return;
  ::signal(number, SIG_DFL);
  ::raise(number);  // takes effect when the handler returns
}

void install(int number, void (*handler)(int)) {
  struct sigaction action{};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;  // a step under way does not notice
  ::sigemptyset(&action.sa_mask);
  TESSERA_CHECK(::sigaction(number, &action, nullptr) == 0, ErrorKind::kIo,
                "sigaction: ", std::strerror(errno));
}

}  // namespace

StopSignal::StopSignal() {
  arrived.store(false);
  for (const int number : kSignals) install(number, on_signal);
  install(SIGXFSZ, SIG_IGN);
}

bool StopSignal::requested() { return arrived.load(); }

}  // namespace tessera::cli
