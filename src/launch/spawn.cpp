#include "launch/spawn.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/environment.h"
#include "base/log.h"
#include "base/string_array.h"
#include "base/threads/cores.h"
#include "launch/child_ends.h"
#include "launch/failure_record.h"
#include "launch/hosts.h"
#include "launch/launch_environment.h"
#include "launch/peer_watch.h"
#include "launch/rank_variables.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

void check_spawn(bool worked, const char* what) {
  TESSERA_CHECK(worked, ErrorKind::kIo, "own spawn: ", what, ": ", std::strerror(errno));
}

std::vector<std::string> own_arguments() {
  std::ifstream in("/proc/self/cmdline", std::ios::binary);
  const std::string all((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  std::vector<std::string> arguments;
  for (std::size_t begin = 0; begin < all.size();) {
    const auto end = std::min(all.find('\0', begin), all.size());
    arguments.push_back(all.substr(begin, end - begin));
    begin = end + 1;
  }
  TESSERA_CHECK(!arguments.empty(), ErrorKind::kIo, "own spawn: cannot read /proc/self/cmdline");
  return arguments;
}

base::Environment child_environment(int rank, int nproc, const Listener& listener, int error_fd) {
  auto variables = base::environment();
  variables[spawn_variable::kRank] = std::to_string(rank);
  variables[spawn_variable::kSize] = std::to_string(nproc);
  variables[spawn_variable::kPort] = std::to_string(listener.port);
  variables[spawn_variable::kErrorFd] = std::to_string(error_fd);
  if (rank == 0) {
    variables[spawn_variable::kListenFd] = std::to_string(listener.socket.get());
  }
  set_thread_variables(variables, std::max(1, base::usable_cores() / nproc));
  return variables;
}

struct Child {
  pid_t pid = -1;
  bool running = true;
  Descriptor errors;
  std::string told;  ///< what came through `errors`
};

/// SIGINT, SIGTERM and SIGCHLD as readable events instead of handlers, while it lives.
class Signals {
 public:
  Signals() {
    sigset_t set;
    ::sigemptyset(&set);
    for (const int one : {SIGINT, SIGTERM, SIGCHLD}) ::sigaddset(&set, one);
    check_spawn(::sigprocmask(SIG_BLOCK, &set, &before_) == 0, "sigprocmask");
    events_ = Descriptor(::signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC));
    check_spawn(events_.get() >= 0, "signalfd");
  }
  ~Signals() { ::sigprocmask(SIG_SETMASK, &before_, nullptr); }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  int fd() const { return events_.get(); }
  const sigset_t& before() const { return before_; }
  /// SIGINTs and SIGTERMs since the last call.
  std::vector<int> take() const {
    std::vector<int> asked;
    signalfd_siginfo info;
    while (::read(events_.get(), &info, sizeof(info)) == static_cast<ssize_t>(sizeof(info))) {
      if (info.ssi_signo != SIGCHLD) asked.push_back(static_cast<int>(info.ssi_signo));
    }
    return asked;
  }

 private:
  sigset_t before_{};
  Descriptor events_;
};

/// Runs in the child between fork and exec: only calls that are safe there.
[[noreturn]] void become_rank(pid_t parent, const sigset_t& mask, const int (&keep)[2],
                              char* const* arguments, char* const* variables) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);  // the parent died before the line above
  ::setpgid(0, 0);  // the terminal's Ctrl-C reaches the parent, which passes it on once
  for (const int fd : keep) {
    if (fd >= 0) ::fcntl(fd, F_SETFD, 0);
  }
  ::sigprocmask(SIG_SETMASK, &mask, nullptr);
  ::execve("/proc/self/exe", arguments, variables);
  ::_exit(127);
}

Child start_child(int rank, int nproc, const Listener& listener, const Signals& signals) {
  int ends[2];
  check_spawn(::pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0, "pipe");
  Child child;
  child.errors = Descriptor(ends[0]);
  const Descriptor write_end(ends[1]);
  const base::StringArray arguments(own_arguments());
  const base::StringArray variables(child_environment(rank, nproc, listener, write_end.get()));
  const int keep[2] = {write_end.get(), rank == 0 ? listener.socket.get() : -1};
  const pid_t parent = ::getpid();
  child.pid = ::fork();
  check_spawn(child.pid >= 0, "fork");
  if (child.pid == 0) {
    become_rank(parent, signals.before(), keep, arguments.data(), variables.data());
  }
  return child;
}

/// The ranks of a run, for their parent.
class Spawned {
 public:
  Spawned(int nproc, const Signals& signals)
      : signals_(signals), grace_(WatchTimes{watch_poll(nproc)}.leaving()) {
    const Listener listener = listen_on("127.0.0.1", 0);
    for (int rank = 0; rank < nproc; ++rank) {
      children_.push_back(start_child(rank, nproc, listener, signals));
    }
  }
  ~Spawned() {  // after an exception: no rank stays behind
    for (Child& child : children_) {
      if (!child.running) continue;
      ::kill(child.pid, SIGKILL);
      ::waitpid(child.pid, nullptr, 0);
    }
  }
  Spawned(const Spawned&) = delete;
  Spawned& operator=(const Spawned&) = delete;

  /// Blocks until all ranks have ended.
  void wait_for_all() {
    while (any_running()) {
      pollfd event{signals_.fd(), POLLIN, 0};
      ::poll(&event, 1, timeout_ms());
      for (const int asked : signals_.take()) pass_on(asked);
      for (std::size_t rank = 0; rank < children_.size(); ++rank) reap(static_cast<int>(rank));
      if (kill_at_ && Clock::now() >= *kill_at_) kill_rest();
    }
  }

  const std::vector<FailureRecord>& failures() const { return failures_; }

 private:
  bool any_running() const {
    return std::any_of(children_.begin(), children_.end(),
                       [](const Child& child) { return child.running; });
  }

  /// Returns at most a second: another part of this process may take the signal of an end.
  int timeout_ms() const {
    constexpr std::int64_t kMost = 1000;
    if (!kill_at_ || killed_) return kMost;
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(*kill_at_ - Clock::now());
    return static_cast<int>(std::clamp<std::int64_t>(left.count() + 1, 0, kMost));
  }

  void pass_on(int asked) {
    passed_on_ = asked;
    for (const Child& child : children_) {
      if (child.running) ::kill(child.pid, asked);
    }
  }

  void kill_rest() {
    killed_ = true;
    kill_at_.reset();
    for (const Child& child : children_) {
      if (child.running) ::kill(child.pid, SIGKILL);
    }
  }

  void reap(int rank) {
    Child& child = children_[static_cast<std::size_t>(rank)];
    if (!child.running) return;
    int code = 0;
    const pid_t ended = ::waitpid(child.pid, &code, WNOHANG);
    const bool taken = ended < 0 && errno == ECHILD;  // by another part of this process
    if (ended != child.pid && !taken) return;
    const auto status = taken ? std::nullopt : std::optional(code);
    child.running = false;
    char buffer[4096];
    for (ssize_t got = 0; (got = ::read(child.errors.get(), buffer, sizeof(buffer))) > 0;) {
      child.told.append(buffer, static_cast<std::size_t>(got));
    }
    auto failure = failure_of(rank, child, status);
    if (!failure) return;
    failures_.push_back(std::move(*failure));
    if (!kill_at_ && !killed_) kill_at_ = Clock::now() + grace_;
  }

  std::optional<FailureRecord> failure_of(int rank, const Child& child,
                                          std::optional<int> status) const {
    FailureRecord record{FailureClass::kPrimary, monotonic_ns(), rank, 1, {}};
    if (status && WIFSIGNALED(*status)) {
      const int number = WTERMSIG(*status);
      const bool ours = (killed_ && number == SIGKILL) || number == passed_on_;
      record.what = ours ? FailureClass::kNoticed : FailureClass::kKilled;
      record.exit_code = 128 + number;
      const char* name = ::sigabbrev_np(number);
      record.message = concat("killed by signal ", number, " (SIG", name ? name : "?", ")");
      return record;
    }
    if (status) record.exit_code = WEXITSTATUS(*status);
    if (record.exit_code == 0) return std::nullopt;
    if (auto told = decode_failure(child.told)) {
      told->exit_code = record.exit_code;
      told->rank = rank;
      return told;
    }
    record.message = status ? concat("ended with exit code ", record.exit_code)
                            : "ended, found no exit code (another part of this process has waited "
                              "for it, or ignores SIGCHLD), expected that own spawn gets it";
    return record;
  }

  const Signals& signals_;
  const std::chrono::milliseconds grace_;  ///< after a failure, in which the others may leave
  std::vector<Child> children_;
  std::vector<FailureRecord> failures_;
  std::optional<Clock::time_point> kill_at_;
  bool killed_ = false;
  int passed_on_ = 0;
};

}  // namespace

int spawn_ranks(int nproc) {
  TESSERA_CHECK(nproc >= 1, ErrorKind::kUsage, "--nproc: found ", nproc, ", expected at least 1");
  const ChildEnds ends;
  const Signals signals;
  Spawned run(nproc, signals);
  run.wait_for_all();
  const auto guilty = culprit(run.failures());
  if (!guilty) return 0;
  std::cout.flush();
  terminal_line::clear_of_any_process();
  std::cerr << to_string(*guilty) << std::endl;
  return guilty->exit_code;
}

}  // namespace tessera::comm
