#include "launch/listener.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "launch/address.h"
#include "tessera/error.h"

namespace tessera::comm {
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
