#include "cli/program_end.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <system_error>

#include "base/log.h"
#include "base/text/printable.h"
#include "io/atomic_file.h"
#include "tessera/error.h"
#include "train/config/config_resolve.h"
#include "train/report/checks.h"

namespace tessera::cli {

int exit_code(const std::exception& error, Phase phase) {
  if (dynamic_cast<const train::FoundProblems*>(&error) != nullptr) return kFoundProblems;
  const auto* known = dynamic_cast<const Error*>(&error);
  if (known == nullptr || phase == Phase::kStepping) return kFailed;
  switch (known->kind()) {
    case ErrorKind::kUsage:
    case ErrorKind::kConfig:
    case ErrorKind::kContract:
    case ErrorKind::kFormat:
    case ErrorKind::kIo:
      return kRefused;
    case ErrorKind::kComm:
    case ErrorKind::kNumeric:
    case ErrorKind::kInternal:
      return kFailed;
  }
  return kFailed;
}

int report(const std::exception& error, Phase phase) {
  const auto* known = dynamic_cast<const Error*>(&error);
  std::cout.flush();  // what was printed before stands before it
  terminal_line::clear_of_any_process();
  std::cerr << "tessera: " << to_string(known == nullptr ? ErrorKind::kInternal : known->kind())
            << ": " << one_line(error.what()) << '\n';
  return exit_code(error, phase);
}

void try_output(std::string_view option, const std::string& file, const std::string& input) {
  TESSERA_CHECK(!file.empty(), ErrorKind::kUsage, option,
                ": found nothing, expected a file to write");
  std::error_code unknown;  // what does not exist is equivalent to nothing
  TESSERA_CHECK(input.empty() || !std::filesystem::equivalent(file, input, unknown),
                ErrorKind::kUsage, option, ": found ", shown(file),
                ", the file that is read, expected another");
  train::open_as(option, [&] { const AtomicFile tried(file); });
}

void write_output(std::string_view option, const std::string& file, std::string_view text) {
  try {
    train::open_as(option, [&] { write_atomically(file, text); });
  } catch (const Error& error) {
    throw OutputLost(error.kind(), error.what());
  }
}

namespace {

[[noreturn]] void throw_output_lost(int why) {
  throw OutputLost(ErrorKind::kIo,
                   concat("stdout: found that it cannot be written", why == 0 ? "" : ": ",
                          why == 0 ? "" : std::strerror(why),
                          ", expected an open file with space; what was printed is not complete"));
}

/// Whether stdout is a pipe, a socket or a terminal whose other end is closed.
bool reader_has_gone() {
  pollfd output{STDOUT_FILENO, 0, 0};
  return ::poll(&output, 1, 0) == 1 && (output.revents & (POLLERR | POLLHUP)) != 0;
}

/// Makes writes to std::cout that fail throw std::ios_base::failure, while it lives.
class ThrowingOutput {
 public:
  ThrowingOutput() { std::cout.exceptions(std::ios_base::badbit); }
  ~ThrowingOutput() { std::cout.exceptions(std::ios_base::goodbit); }
  ThrowingOutput(const ThrowingOutput&) = delete;
  ThrowingOutput& operator=(const ThrowingOutput&) = delete;
};

}  // namespace

int run_for_output(const std::function<int()>& verb) {
  int code = kDone;
  errno = 0;
  try {
    const ThrowingOutput throws;
    code = verb();
    std::cout.flush();
  } catch (const std::ios_base::failure&) {
    const int why = errno;
    if (!reader_has_gone()) throw_output_lost(why);
  }
  return code;
}

int print_found(std::string_view text, int code) {
  run_for_output([&] {
    std::cout << text;
    return code;
  });
  return code;
}

void check_standard_output() {
  errno = 0;
  std::cout.flush();
  const int why = errno;
  if (!std::cout.good() && !reader_has_gone()) throw_output_lost(why);
}

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
}

bool StopSignal::requested() { return arrived.load(); }

}  // namespace tessera::cli
