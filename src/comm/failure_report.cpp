#include "comm/failure_report.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <thread>

#include "base/environment.h"
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

/// Leaves even if the store no longer answers.
void leave_at_the_latest(std::chrono::seconds after, int code) {
  std::thread([after, code] {
    std::this_thread::sleep_for(after);
    ::_exit(code);
  }).detach();
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
  leave_at_the_latest(std::chrono::seconds(3), code);
  const int rank = world != nullptr ? world->rank() : rank_by_environment();
  FailureRecord record{FailureClass::kPrimary, monotonic_ns(), rank, code, error.what()};
  auto* const process_world = dynamic_cast<ProcessWorld*>(world);
  if (dynamic_cast<const PeerLost*>(&error) != nullptr) {
    record.what = FailureClass::kNoticed;
    if (process_world != nullptr) {
      if (const auto cause = process_world->known_failure()) {
        record.message = concat("stopped because of ", *cause);
      }
    }
  }
  const std::string line = concat("rank ", rank, ": ", record.message);
  tell_parent(record);
  print(line);
  if (process_world != nullptr) process_world->announce_failure(line);
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
