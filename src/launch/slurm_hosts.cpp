#include "launch/slurm_hosts.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/printable.h"
#include "launch/sockets.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kLongestAnswer = 1U << 20U;  // some ten thousand hosts
constexpr std::size_t kLongestShown = 120;         // of a list or an answer, in an error

[[noreturn]] void refuse(const std::string& list, const std::string& found) {
  throw Error(ErrorKind::kUsage,
              concat("Slurm: found ", found, " for `scontrol show hostnames ",
                     printable(list, kLongestShown),
                     "`, expected the hosts of the step; set MASTER_ADDR or comm.master_addr"));
}

/// A running scontrol, which is gone, with whatever it has started, when this is.
class Scontrol {
 public:
  explicit Scontrol(const std::string& list) : list_(list) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) refuse(list_, std::strerror(errno));
    answer_ = Descriptor(ends[0]);
    const Descriptor written(ends[1]);
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    ::posix_spawn_file_actions_adddup2(&actions, written.get(), STDOUT_FILENO);
    ::posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    ::posix_spawnattr_init(&attributes);
    ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
    std::array<std::string, 4> words{"scontrol", "show", "hostnames", list};
    std::array<char*, 5> arguments{words[0].data(), words[1].data(), words[2].data(),
                                   words[3].data(), nullptr};
    const int failure =
        ::posix_spawnp(&pid_, "scontrol", &actions, &attributes, arguments.data(), environ);
    ::posix_spawnattr_destroy(&attributes);
    ::posix_spawn_file_actions_destroy(&actions);
    if (failure != 0) {
      pid_ = -1;
      refuse(list_, failure == ENOENT ? "no scontrol on PATH" : std::strerror(failure));
    }
  }
  ~Scontrol() {
    if (pid_ <= 0) return;
    ::kill(-pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Scontrol(const Scontrol&) = delete;
  Scontrol& operator=(const Scontrol&) = delete;

  /// All that it prints, once it has ended well.
  std::string answer(Clock::time_point deadline) {
    std::string text;
    std::array<char, 4096> buffer{};
    for (;;) {
      wait_for_more(deadline);
      const auto count = ::read(answer_.get(), buffer.data(), buffer.size());
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) break;
      text.append(buffer.data(), static_cast<std::size_t>(count));
      if (text.size() > kLongestAnswer) refuse(list_, "more than 1 MiB");
    }
    wait_for_end(deadline);
    return text;
  }

 private:
  [[noreturn]] void refuse_silence() const { refuse(list_, "no answer in time"); }

  void wait_for_more(Clock::time_point deadline) const {
    for (;;) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
      if (left <= 0) refuse_silence();
      pollfd more{answer_.get(), POLLIN, 0};
      if (::poll(&more, 1, static_cast<int>(left)) > 0) return;
    }
  }

  void wait_for_end(Clock::time_point deadline) {
    int status = 0;
    while (::waitpid(pid_, &status, WNOHANG) == 0) {
      if (Clock::now() > deadline) refuse_silence();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    pid_ = -1;
    if (WIFSIGNALED(status)) refuse(list_, concat("death by signal ", WTERMSIG(status)));
    if (WEXITSTATUS(status) != 0) refuse(list_, concat("exit code ", WEXITSTATUS(status)));
  }

  const std::string& list_;
  Descriptor answer_;
  pid_t pid_ = -1;
};

bool is_host_name(std::string_view name) {
  constexpr std::size_t kLongest = 253;
  const auto fits = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_' || c == '.';
  };
  return !name.empty() && name.size() <= kLongest && name.front() != '-' && name.front() != '.' &&
         std::all_of(name.begin(), name.end(), fits);
}

/// One name a line, every line a name.
std::string first_of(const std::string& list, const std::string& answer) {
  const std::string_view text = answer;
  for (std::size_t begin = 0; begin < text.size();) {
    const auto end = std::min(text.find('\n', begin), text.size());
    const auto line = text.substr(begin, end - begin);
    if (!is_host_name(line)) refuse(list, printable(line, kLongestShown));
    begin = end + 1;
  }
  if (answer.empty()) refuse(list, "nothing");
  return answer.substr(0, answer.find('\n'));
}

}  // namespace

void find_first_host(LaunchEnvironment& launch, std::chrono::milliseconds limit) {
  if (!launch.master_addr.empty() || launch.node_list.empty()) return;
  const std::string& list = launch.node_list;
  if (list.front() == '-') refuse(list, "an option in place of a list");
  launch.master_addr = first_of(list, Scontrol(list).answer(Clock::now() + limit));
}

}  // namespace tessera::comm
