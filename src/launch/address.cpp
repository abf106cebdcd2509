#include "launch/address.h"

#include <netdb.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include "launch/listener.h"
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

}  // namespace tessera::comm
