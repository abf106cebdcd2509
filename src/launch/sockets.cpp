#include "launch/sockets.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

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

/// None where the address is not this host's.
std::optional<Listener> try_to_listen(const std::string& host, const SocketAddress& address) {
  Descriptor socket(::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (socket.get() < 0 && errno == EAFNOSUPPORT) return std::nullopt;
  check_listen(socket.get() >= 0, "socket");
  // A run that has just ended leaves connections in TIME_WAIT; they do not make the port taken.
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

}  // namespace tessera::comm
