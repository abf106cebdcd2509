#include "comm/failure_report.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "base/environment.h"
#include "base/terminal_line.h"
#include "comm/failure_record.h"
#include "comm/launch_environment.h"
#include "comm/poison.h"
#include "comm/process_world.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// A process leaves once; a second thread that wants to waits for the first one's _exit. The one
/// mutable global of this floor: leaving is the process's business, not a World's.
void claim_exit() {
  static std::atomic_flag claimed;
  while (claimed.test_and_set()) std::this_thread::sleep_for(std::chrono::hours(1));
}

// What a failing rank still spends on the store.
constexpr std::chrono::milliseconds kLastWords{1000};

/// Leaves even if the store no longer answers.
void leave_at_the_latest(std::chrono::milliseconds after, int code) {
  std::thread([after, code] {
    std::this_thread::sleep_for(after);
    ::_exit(code);
  }).detach();
}

/// What the failure key says; none when there is none, or the store does not answer soon.
std::optional<std::string> known_cause(ProcessWorld* world) {
  if (world == nullptr) return std::nullopt;
  auto answer = std::make_shared<std::promise<std::optional<std::string>>>();
  auto future = answer->get_future();
  std::thread([world, answer] { answer->set_value(world->known_failure()); }).detach();
  if (future.wait_for(kLastWords / 2) != std::future_status::ready) return std::nullopt;
  return future.get();
}

void tell_parent(const FailureRecord& record) {
  const auto fd = base::environment_variable(spawn_variable::kErrorFd);
  if (!fd) return;
  const std::string bytes = encode(record);
  // A parent that has gone cannot be told: nothing to do about a failed write.
  [[maybe_unused]] const auto written = ::write(std::atoi(fd->c_str()), bytes.data(), bytes.size());
}

void print(const std::string& line) {
  std::cout.flush();
  std::fflush(stdout);
  terminal_line::clear_of_any_process();
  const std::string text = line + "\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
}

int rank_by_environment() {
  try {
    return read_launch_environment(base::environment()).rank;
  } catch (const Error&) {
    return 0;
  }
}

}  // namespace

void report_failure(World* world, const std::exception& error, int code) {
  claim_exit();
  const int rank = world != nullptr ? world->rank() : rank_by_environment();
  FailureRecord record{FailureClass::kPrimary, monotonic_ns(), rank, code, error.what()};
  auto* const process_world = dynamic_cast<ProcessWorld*>(world);
  if (dynamic_cast<const PeerLost*>(&error) != nullptr) {
    record.what = FailureClass::kNoticed;
    if (const auto cause = known_cause(process_world)) {
      record.message = concat("stopped because of ", *cause);
    }
  }
  const std::string line = concat("rank ", rank, ": ", record.message);
  tell_parent(record);
  print(line);
  if (process_world != nullptr) {
    leave_at_the_latest(kLastWords, code);
    process_world->announce_failure(line);
    // The others read it from this process.
    if (process_world->serves_store()) std::this_thread::sleep_for(kLastWords / 2);
  }
  ::_exit(code);
}

void leave_after(int rank, const std::string& why) {
  claim_exit();
  const std::string message = concat("stopped because of ", why);
  tell_parent({FailureClass::kNoticed, monotonic_ns(), rank, 1, message});
  print(concat("rank ", rank, ": ", message));
  ::_exit(1);
}

int default_exit_code(const std::exception& error) {
  const auto* known = dynamic_cast<const Error*>(&error);
  if (known == nullptr) return 1;
  const ErrorKind kind = known->kind();
  const bool asked_wrongly = kind == ErrorKind::kUsage || kind == ErrorKind::kConfig ||
                             kind == ErrorKind::kContract || kind == ErrorKind::kFormat;
  return asked_wrongly ? 2 : 1;
}

}  // namespace tessera::comm
