// The program as a user starts it in the background: `tessera` in a folder, its ranks, its end.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "cli/program.h"

namespace tessera::cli {

using std::chrono::milliseconds;

class StartedProgram {
 public:
  /// `largest_file`: what the system lets it write into one file, in bytes.
  StartedProgram(const testing::TemporaryFolder& folder, std::vector<std::string> words,
                 std::optional<rlim_t> largest_file = std::nullopt)
      : folder_(folder) {
    words.insert(words.begin(), TESSERA_PROGRAM);
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ != 0) return;
    const auto to = [](const std::filesystem::path& path, int fd) {
      ::dup2(::open(path.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600), fd);
    };
    to(folder / "stdout.txt", STDOUT_FILENO);
    to(folder / "stderr.txt", STDERR_FILENO);
    if (::chdir(folder.path().c_str()) != 0) ::_exit(99);
    if (largest_file) {
      const rlimit limit{*largest_file, *largest_file};
      ::setrlimit(RLIMIT_FSIZE, &limit);
    }
    ::setenv("OMP_NUM_THREADS", "1", 1);
    for (const auto* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}) {
      ::unsetenv(name);
    }
    ::execv(TESSERA_PROGRAM, arguments.data());
    ::_exit(99);
  }
  ~StartedProgram() {
    if (pid_ > 0 && !code_) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
  }
  StartedProgram(const StartedProgram&) = delete;
  StartedProgram& operator=(const StartedProgram&) = delete;

  void signal(int number) const { ::kill(pid_, number); }

  /// The processes of the ranks that own spawn has started so far, in their order.
  std::vector<pid_t> rank_pids() const {
    const auto id = std::to_string(pid_);
    std::istringstream text(read_file("/proc/" + id + "/task/" + id + "/children"));
    std::vector<pid_t> pids;
    for (pid_t pid = 0; text >> pid;) pids.push_back(pid);
    return pids;
  }

  /// Whether it ended, without waiting.
  bool ended() { return wait(milliseconds(0)) != -1; }
  /// Exit code (128 + signal), or -1 if it is still there after `limit`.
  int wait(milliseconds limit) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    while (!code_) {
      int status = 0;
      if (::waitpid(pid_, &status, WNOHANG) == pid_) {
        code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      } else if (std::chrono::steady_clock::now() >= deadline) {
        return -1;
      } else {
        std::this_thread::sleep_for(milliseconds(5));
      }
    }
    return *code_;
  }
  std::string err() const { return read_file(folder_ / "stderr.txt"); }

 private:
  const testing::TemporaryFolder& folder_;
  pid_t pid_ = -1;
  std::optional<int> code_;
};

/// Looks every 5 ms for up to a minute. Returns whether it came true.
template <class Condition>
bool eventually(const Condition& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(milliseconds(5));
  }
  return true;
}

}  // namespace tessera::cli
