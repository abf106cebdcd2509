#include "launch/hosts.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "base/text/printable.h"
#include "launch/child_ends.h"
#include "launch/launch_environment.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

constexpr const char* kAdvice = "; set MASTER_ADDR or comm.master_addr to an address of rank 0";

}  // namespace

std::uint16_t SocketAddress::port() const {
  return ntohs(bytes.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6*>(&bytes)->sin6_port
                   : reinterpret_cast<const sockaddr_in*>(&bytes)->sin_port);
}

std::string running_kernel() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string name;
  std::getline(file, name);
  return name;
}

std::string host_text(const SocketAddress& address) {
  std::array<char, NI_MAXHOST> text{};
  const int failure = ::getnameinfo(address.generic(), address.length, text.data(), text.size(),
                                    nullptr, 0, NI_NUMERICHOST);
  return failure == 0 ? text.data() : "unknown";
}

std::vector<SocketAddress> resolve(const std::string& host, std::uint16_t port) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failure = ::getaddrinfo(host == "localhost" ? "127.0.0.1" : host.c_str(),
                                    std::to_string(port).c_str(), &wanted, &found);
  TESSERA_CHECK(failure == 0, ErrorKind::kComm, "store: cannot find the host ", host, ": ",
                ::gai_strerror(failure), kAdvice);
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> all(found, &::freeaddrinfo);
  std::vector<SocketAddress> addresses;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    SocketAddress address;
    std::memcpy(&address.bytes, one->ai_addr, one->ai_addrlen);
    address.length = one->ai_addrlen;
    addresses.push_back(address);
  }
  return addresses;
}

std::string local_address_towards(const std::string& host) {
  constexpr std::uint16_t kAnyPort = 9;
  int why = 0;
  for (const SocketAddress& there : resolve(host, kAnyPort)) {
    // Connecting a datagram socket only chooses the route.
    const Descriptor socket(::socket(there.bytes.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    SocketAddress here;
    here.length = sizeof(here.bytes);
    if (::connect(socket.get(), there.generic(), there.length) == 0 &&
        ::getsockname(socket.get(), here.generic(), &here.length) == 0) {
      return host_text(here);
    }
    why = errno;
  }
  throw Error(ErrorKind::kComm,
              concat("store: no way to the host ", host, ": ", std::strerror(why), kAdvice));
}

namespace {

void check_listen(bool worked, const char* what) {
  TESSERA_CHECK(worked, ErrorKind::kComm, "store: cannot listen: ", what, ": ",
                std::strerror(errno));
}

/// Returns none where the address is not this host's.
std::optional<Listener> try_to_listen(const std::string& host, const SocketAddress& address) {
  Descriptor socket(::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (socket.get() < 0 && errno == EAFNOSUPPORT) return std::nullopt;
  check_listen(socket.get() >= 0, "socket");
  // A run that has just ended leaves connections in TIME_WAIT; they do not occupy the port.
  const int on = 1;
  check_listen(::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0,
               "setsockopt");
  const bool bound = ::bind(socket.get(), address.generic(), address.length) == 0 &&
                     ::listen(socket.get(), SOMAXCONN) == 0;
  if (!bound && errno == EADDRNOTAVAIL) return std::nullopt;
  TESSERA_CHECK(bound || errno != EADDRINUSE, ErrorKind::kComm, port_in_use(host, address.port()));
  check_listen(bound, "bind");
  SocketAddress taken;
  taken.length = sizeof(taken.bytes);
  check_listen(::getsockname(socket.get(), taken.generic(), &taken.length) == 0, "getsockname");
  return Listener{std::move(socket), host_text(taken), taken.port()};
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

Listener listen_on(const std::string& host, std::uint16_t port) {
  std::string tried;
  for (const SocketAddress& address : resolve(host, port)) {
    if (auto listener = try_to_listen(host, address)) return *std::move(listener);
    tried += concat(tried.empty() ? "" : ", ", host_text(address));
  }
  throw Error(
      ErrorKind::kComm,
      concat("store: found ", host, " (", tried,
             ") as the address of rank 0, expected one of its host's own; set MASTER_ADDR "
             "or comm.master_addr to one (0.0.0.0 on rank 0 alone, with GLOO_SOCKET_IFNAME: all of "
             "them)"));
}

std::string port_in_use(const std::string& host, std::uint16_t port) {
  return concat("store: found port ", port, " of ", host,
                " in use, expected a free one; set MASTER_PORT or comm.master_port to another");
}

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kLongestAnswer = 1U << 20U;  // some ten thousand hosts
// the length to which errors cut a list or an answer
constexpr std::size_t kLongestShown = 120;

[[noreturn]] void refuse(const std::string& list, const std::string& found) {
  throw Error(ErrorKind::kUsage,
              concat("Slurm: found ", found, " for `scontrol show hostnames ",
                     printable(list, kLongestShown),
                     "`, expected the hosts of the step; set MASTER_ADDR or comm.master_addr"));
}

/// A running scontrol. Its destructor ends it and everything that it has started.
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

  /// Returns all that it prints, once it has ended successfully.
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
  const ChildEnds ends_;
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

/// Checks that every line is one name, and returns the first.
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
