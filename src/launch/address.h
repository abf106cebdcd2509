// Names of hosts, turned into addresses that sockets take.
//
// Pure. Next: listener.h, where rank 0's store listens; gloo.h, which listens where the route to
// that store begins.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::comm {

/// Of either family, as the socket calls want it.
struct SocketAddress {
  sockaddr_storage bytes{};
  socklen_t length = 0;
  sockaddr* generic() { return reinterpret_cast<sockaddr*>(&bytes); }
  const sockaddr* generic() const { return reinterpret_cast<const sockaddr*>(&bytes); }
  std::uint16_t port() const;
};

/// "10.0.0.1", "fe80::1%eth0": without the port.
std::string host_text(const SocketAddress& address);

/// All addresses of a host, in the order in which they are to be tried; "localhost" is 127.0.0.1.
/// Asks the name service: may take its time. Errors: kComm for a name that is not known.
std::vector<SocketAddress> resolve(const std::string& host, std::uint16_t port);

/// The address of this host from which `host` is reached; nothing is sent. Errors: kComm for a name
/// that is not known, or no route.
std::string local_address_towards(const std::string& host);

}  // namespace tessera::comm
