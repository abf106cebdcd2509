#include "comm/listener.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// An address of either family, as the socket calls want it.
struct Address {
  sockaddr_storage bytes{};
  socklen_t length = 0;
  sockaddr* generic() { return reinterpret_cast<sockaddr*>(&bytes); }
};

Address loopback_address(const std::string& host, std::uint16_t port) {
  Address address;
  if (host == "::1") {
    auto* const six = reinterpret_cast<sockaddr_in6*>(&address.bytes);
    six->sin6_family = AF_INET6;
    six->sin6_addr = in6addr_loopback;
    six->sin6_port = htons(port);
    address.length = sizeof(*six);
    return address;
  }
  auto* const four = reinterpret_cast<sockaddr_in*>(&address.bytes);
  four->sin_family = AF_INET;
  four->sin_port = htons(port);
  if (::inet_pton(AF_INET, host.c_str(), &four->sin_addr) != 1) {
    four->sin_addr.s_addr = htonl(INADDR_LOOPBACK);  // "localhost"
  }
  address.length = sizeof(*four);
  return address;
}

void check_call(bool worked, const char* what) {
  TESSERA_CHECK(worked, ErrorKind::kComm, "store: cannot listen: ", what, ": ",
                std::strerror(errno));
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

Listener listen_on_loopback(const std::string& host, std::uint16_t port) {
  Address address = loopback_address(host, port);
  Listener listener{Descriptor(::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0)),
                    port};
  check_call(listener.socket.get() >= 0, "socket");
  // A run that has just ended leaves connections in TIME_WAIT; they do not make the port taken.
  const int on = 1;
  check_call(::setsockopt(listener.socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0,
             "setsockopt");
  const bool bound = ::bind(listener.socket.get(), address.generic(), address.length) == 0 &&
                     ::listen(listener.socket.get(), SOMAXCONN) == 0;
  TESSERA_CHECK(bound || errno != EADDRINUSE, ErrorKind::kComm, port_in_use(host, port));
  check_call(bound, "bind");
  check_call(::getsockname(listener.socket.get(), address.generic(), &address.length) == 0,
             "getsockname");
  listener.port = ntohs(address.bytes.ss_family == AF_INET6
                            ? reinterpret_cast<sockaddr_in6*>(&address.bytes)->sin6_port
                            : reinterpret_cast<sockaddr_in*>(&address.bytes)->sin_port);
  return listener;
}

std::string port_in_use(const std::string& host, std::uint16_t port) {
  return concat("store: found port ", port, " of ", host,
                " in use, expected a free one; set MASTER_PORT or comm.master_port to another");
}

}  // namespace tessera::comm
