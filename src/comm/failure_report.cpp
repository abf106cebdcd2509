#include "comm/failure_report.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/environment.h"
#include "base/log.h"
#include "base/text/printable.h"
#include "comm/process_world.h"
#include "comm/run_place.h"
#include "launch/abort_flag.h"
#include "launch/bounded_calls.h"
#include "launch/failure_record.h"
#include "launch/hosts.h"
#include "launch/launch_environment.h"
#include "launch/peer_watch.h"
#include "launch/store.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// For how long the other ranks are looked for: they have just been started, and read the same
/// files.
std::chrono::milliseconds patience_for(const LaunchEnvironment& launch) {
  return WatchTimes{watch_poll(launch.world_size)}.meeting();
}

/// Returns none when no process serves the store, or what answers is no store.
std::shared_ptr<Store> reach_others(const LaunchEnvironment& launch) {
  try {
    return Store::connect(launch, patience_for(launch), patience_for(launch));
  } catch (const Error&) {
    return nullptr;
  }
}

/// Tries to write the failure key. Returns its value then.
FailureRecord announce(Store& store, const FailureRecord& record) {
  try {
    const auto standing = store.set_if_absent(store_key::kFailure, encode(record));
    return decode_failure(standing).value_or(record);
  } catch (const Error&) {
    return record;
  }
}

/// Keeps rank 0's store up until the others have read what it says.
void wait_for_readers(const LaunchEnvironment& launch, Store& store) {
  constexpr const char* kKey = "refused";
  try {
    if (launch.rank != 0) {
      store.arrive(kKey, launch.rank, launch.world_size);
    } else if (!launch.agent_store) {
      store.meet(kKey, launch.rank, all_ranks(launch.world_size), patience_for(launch),
                 AbortFlag());
    }
  } catch (const Error&) {
    // A rank that did not come was not refused, or reports its error itself.
  }
}

/// Whether `standing`, the value of the failure key, makes it needless that this rank prints
/// `record`.
bool says_the_same(const FailureRecord& standing, const FailureRecord& record) {
  return standing.rank != record.rank && standing.message == record.message;
}

/// Ignores SIGTERM. A launcher that sees one rank end sends it to the others: it must not cut short
/// what this rank is about to print. For processes that are leaving.
void finish_report() { ::signal(SIGTERM, SIG_IGN); }

void print_unless_others_do(const LaunchEnvironment& launch, const FailureRecord& record,
                            const std::function<void()>& print) {
  finish_report();
  const auto store = launch.world_size > 1 ? reach_others(launch) : nullptr;
  if (!store) return print();
  if (!says_the_same(announce(*store, record), record)) print();
  wait_for_readers(launch, *store);
}

void refuse_once(LaunchEnvironment launch, const std::exception& error, int code,
                 const std::function<void()>& print) {
  if (code != kRefusedCode) return print();
  try {
    find_first_host(launch, patience_for(launch));
  } catch (const Error&) {
    return print();  // no address at which others could be asked
  }
  print_unless_others_do(
      launch, {FailureClass::kPrimary, monotonic_ns(), launch.rank, code, one_line(error.what())},
      print);
}

}  // namespace

void refuse_once(const std::exception& error, int code, const std::function<void()>& print) {
  LaunchEnvironment launch;
  try {
    launch = read_launch_environment(base::environment());
  } catch (const Error&) {
    return print();
  }
  refuse_once(launch, error, code, print);
}

namespace {

/// Returns once for a process: a second thread waits for the first one's _exit. Its mutex is the
/// one mutable global of this layer, since a process leaves, and not a World.
void claim_exit() {
  static std::atomic_flag claimed;
  while (claimed.test_and_set()) std::this_thread::sleep_for(std::chrono::hours(1));
}

// A disk that takes longer for one line delays no rank, nor does a pipe that is not read.
constexpr std::chrono::milliseconds kLogPatience{1000};

/// Prints what this process has written so far before its error: _exit flushes nothing.
void flush_output() {
  BoundedCalls().run(
      [] {
        std::cout.flush();
        return std::fflush(stdout) == 0;
      },
      kLogPatience);
}

/// Returns whether there is a parent, which prints the error last.
bool tell_parent(const FailureRecord& record) {
  const auto fd = base::environment_variable(spawn_variable::kErrorFd);
  if (!fd) return false;
  const std::string bytes = encode(record);
  // A parent that has ended cannot be told, so a failed write is ignored.
  return std::cmp_equal(::write(std::atoi(fd->c_str()), bytes.data(), bytes.size()), bytes.size());
}

void print(const std::string& line) {
  terminal_line::clear_of_any_process();
  const std::string text = line + "\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
}

/// A refusal is about the request, not about a rank, so a parent that is told prints it once.
void print_unless_told(const FailureRecord& record, bool parent_knows) {
  if (!parent_knows || record.exit_code != kRefusedCode) print(to_string(record));
}

/// Writes to the rank's log why it leaves. Launchers drop what was printed last when they end, and
/// kill ranks that are slow to leave, so this comes before anything that may wait for others. A log
/// that cannot be written delays no rank.
void keep_in_log(const FailureRecord& record) {
  BoundedCalls().run(
      [text = record.message] {
        log::write_to_file(log::Level::kError, text);
        return true;
      },
      kLogPatience);
}

/// Begins to leave; the log says why before other ranks are told.
FailureRecord begin_report(int rank, const std::exception& error, int code) {
  claim_exit();
  finish_report();
  flush_output();
  FailureRecord record{FailureClass::kPrimary, monotonic_ns(), rank, code, one_line(error.what())};
  keep_in_log(record);  // a store that is gone may take a second to say so
  return record;
}

/// Writes the report of a hang to stderr and to the rank's log.
void report_hang(ProcessWorld& world) {
  const std::string report = world.hang_report();
  if (report.empty()) return;
  const std::string text = of_rank(world.rank(), report);
  BoundedCalls().run(
      [text] {
        log::write_to_file(log::Level::kError, text);
        return true;
      },
      kLogPatience);
  print(text);
}

/// Announces an error of this rank first: the rank whose record stands in the store prints it for
/// all that failed alike. An error that was only noticed is printed by every rank. Where the ranks
/// hang, the first one that says so prints why before its error, which stays the last line; the
/// others leave their boards for it.
void print_and_announce(ProcessWorld& world, const FailureRecord& record, bool parent_knows,
                        bool hangs) {
  if (hangs) world.keep_board();
  const bool is_primary = record.what == FailureClass::kPrimary;
  if (!is_primary && !hangs) print(to_string(record));
  const auto standing = world.announce_failure(record);
  const bool reports = hangs && (!standing || standing->rank == record.rank);
  if (reports) report_hang(world);
  if (!is_primary) {
    if (hangs) print(to_string(record));
  } else if (!standing || !says_the_same(*standing, record)) {
    print_unless_told(record, parent_knows);
  }
  if (!reports) world.publish_board();
}

}  // namespace

void report_failure(const RunPlace& place, const std::exception& error, int code) {
  FailureRecord record = begin_report(place.launch.rank, error, code);
  if (dynamic_cast<const LostRank*>(&error) != nullptr) record.what = FailureClass::kNoticed;
  const bool told = tell_parent(record);
  refuse_once(place.launch, error, code, [&] { print_unless_told(record, told); });
  ::_exit(code);
}

void report_failure(World& world, const std::exception& error, int code) {
  FailureRecord record = begin_report(world.rank(), error, code);
  auto* const others = dynamic_cast<ProcessWorld*>(&world);
  int first_code = code;  // of the rank that failed first
  const bool is_own = others != nullptr && others->is_disagreement(error);
  bool hangs = is_own;  // and no other rank has said why
  if (dynamic_cast<const LostRank*>(&error) != nullptr && !is_own) {
    record.what = FailureClass::kNoticed;
    const auto cause = others != nullptr ? others->failure_behind() : std::nullopt;
    hangs = !cause;
    if (cause) {
      record.message = concat("stopped because of ", to_string(*cause));
      keep_in_log(record);
      first_code = cause->exit_code;
    }
  }
  const bool told = tell_parent(record);
  if (others == nullptr) {
    print_unless_told(record, told);
  } else {
    print_and_announce(*others, record, told, hangs);
    if (first_code == kRefusedCode) others->refused();
    others->stay_for_readers();
  }
  ::_exit(record.exit_code);
}

void leave_after(ProcessWorld& world, const FailureRecord& cause) {
  claim_exit();
  finish_report();
  flush_output();
  const FailureRecord record{FailureClass::kNoticed, monotonic_ns(), world.rank(), cause.exit_code,
                             concat("stopped because of ", to_string(cause))};
  tell_parent(record);
  keep_in_log(record);
  world.publish_board();
  // A refusal is about the request, not about a rank: it is printed once.
  if (cause.exit_code != kRefusedCode) print(to_string(record));
  if (cause.exit_code == kRefusedCode) world.refused();
  world.stay_for_readers();
  ::_exit(record.exit_code);
}

void when_refused(World& world, std::function<void()> undo) {
  if (auto* const others = dynamic_cast<ProcessWorld*>(&world)) {
    others->when_refused(std::move(undo));
  }
}

int default_exit_code(const std::exception& error) {
  const auto* known = dynamic_cast<const Error*>(&error);
  if (known == nullptr) return 1;
  const ErrorKind kind = known->kind();
  const bool asked_wrongly = kind == ErrorKind::kUsage || kind == ErrorKind::kConfig ||
                             kind == ErrorKind::kContract || kind == ErrorKind::kFormat;
  return asked_wrongly ? kRefusedCode : 1;
}

}  // namespace tessera::comm
