// Runs of spawned_rank.cpp, and what they have printed.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <future>
#include <type_traits>

#include "base/environment.h"
#include "support/free_port.h"
#include "support/test.h"

namespace tessera::process_test {

struct Outcome {
  int exit_code = -1;
  std::string out;
  std::string err;
  double seconds = 0;

  std::string last_error_line() const {
    const auto end = err.find_last_not_of('\n');
    if (end == std::string::npos) return {};
    const auto begin = err.rfind('\n', end);
    return err.substr(begin == std::string::npos ? 0 : begin + 1, end - begin);
  }
};

/// A program and what it has printed; the pipes reach end of file only when all its processes are
/// gone.
class Program {
 public:
  Program(std::vector<std::string> arguments, base::Environment variables)
      : start_(std::chrono::steady_clock::now()) {
    int out[2];
    int err[2];
    if (::pipe2(out, O_CLOEXEC) != 0 || ::pipe2(err, O_CLOEXEC) != 0) std::abort();
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions, err[1], STDERR_FILENO);
    std::vector<char*> argument_pointers;
    for (auto& one : arguments) argument_pointers.push_back(one.data());
    argument_pointers.push_back(nullptr);
    std::vector<std::string> lines;
    for (const auto& [name, value] : variables) lines.push_back(name + "=" + value);
    std::vector<char*> variable_pointers;
    for (auto& one : lines) variable_pointers.push_back(one.data());
    variable_pointers.push_back(nullptr);
    if (::posix_spawn(&pid_, arguments[0].c_str(), &actions, nullptr, argument_pointers.data(),
                      variable_pointers.data()) != 0) {
      std::abort();
    }
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(out[1]);
    ::close(err[1]);
    out_ = out[0];
    err_ = err[0];
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  pid_t pid() const { return pid_; }

  Outcome wait() {
    Outcome outcome;
    pollfd events[2] = {{out_, POLLIN, 0}, {err_, POLLIN, 0}};
    std::string* texts[2] = {&outcome.out, &outcome.err};
    int open = 2;
    while (open > 0) {
      ::poll(events, 2, -1);
      for (int i = 0; i < 2; ++i) {
        if (events[i].fd < 0 || events[i].revents == 0) continue;
        char buffer[4096];
        const auto got = ::read(events[i].fd, buffer, sizeof(buffer));
        if (got > 0) {
          texts[i]->append(buffer, static_cast<std::size_t>(got));
        } else {
          ::close(events[i].fd);
          events[i].fd = -1;
          --open;
        }
      }
    }
    int status = 0;
    ::waitpid(pid_, &status, 0);
    outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
    outcome.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    return outcome;
  }

 private:
  std::chrono::steady_clock::time_point start_;
  pid_t pid_ = -1;
  int out_ = -1;
  int err_ = -1;
};

struct Plan {
  int nproc = 2;
  std::string mode = "none";
  int rank = 0;
  int step = 0;
  int steps = 30;
  int timeout_ms = 100000;
};

inline std::vector<std::string> arguments(const Plan& plan) {
  return {TESSERA_SPAWNED_RANK,           std::to_string(plan.nproc), plan.mode,
          std::to_string(plan.rank),      std::to_string(plan.step),  std::to_string(plan.steps),
          std::to_string(plan.timeout_ms)};
}

inline Outcome run(const Plan& plan) {
  return Program(arguments(plan), base::environment()).wait();
}

/// The result of `call` for each item. All run at once: they wait most of their time.
template <class Item, class Call>
auto at_once(const std::vector<Item>& items, Call call) {
  std::vector<std::future<std::invoke_result_t<Call, const Item&>>> runs;
  for (const Item& item : items) runs.push_back(std::async(std::launch::async, call, item));
  std::vector<std::invoke_result_t<Call, const Item&>> results;
  for (auto& one : runs) results.push_back(one.get());
  return results;
}

inline std::vector<Outcome> run_all(const std::vector<Plan>& plans) {
  return at_once(plans, [](const Plan& plan) { return run(plan); });
}

/// The ranks of a run, as mpirun and torchrun start them: without a parent of ours, the store at a
/// port that all know.
inline std::vector<Outcome> run_without_parent(const Plan& plan) {
  auto variables = base::environment();
  variables["WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] = std::to_string(plan.nproc);
  variables["MASTER_ADDR"] = "127.0.0.1";
  variables["MASTER_PORT"] = std::to_string(free_port());
  std::vector<base::Environment> ranks;
  for (int rank = 0; rank < plan.nproc; ++rank) {
    variables["RANK"] = variables["LOCAL_RANK"] = std::to_string(rank);
    ranks.push_back(variables);
  }
  return at_once(
      ranks, [&](const base::Environment& own) { return Program(arguments(plan), own).wait(); });
}

inline std::vector<std::vector<Outcome>> run_all_without_parent(const std::vector<Plan>& plans) {
  return at_once(plans, [](const Plan& plan) { return run_without_parent(plan); });
}

// Starting two ranks takes a few seconds on a busy machine; the rest is the promise of 10 s.
inline constexpr double kSeconds = 25;

/// It has ended with this code, in time, and with a last line of errors that `last` matches.
inline void expect_end(const Outcome& outcome, int code,
                       const ::testing::Matcher<std::string>& last, double seconds = kSeconds) {
  EXPECT_EQ(outcome.exit_code, code) << outcome.err;
  EXPECT_THAT(outcome.last_error_line(), last) << outcome.err;
  EXPECT_LT(outcome.seconds, seconds);
}

}  // namespace tessera::process_test
