// Hosts for sockets (names resolved to addresses, and a listening socket at one of them), and the
// first host of a Slurm step, which `scontrol` tells.
//
// c10d's store server listens on every interface, so it is given one of these sockets instead.
// spawn.cpp passes one to rank 0, store.cpp opens one; gloo.h listens where the route to that store
// begins.
//
// Slurm gives a step its hosts as a list ("node[01-03,7],gpu5") in a special syntax, and no
// address. Only where neither MASTER_ADDR nor the user gives one, scontrol expands the list: one
// short process, no shell, a limit on its time and on what is read. Pure. Next:
// launch_environment.h, which says whether that is needed.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tessera::comm {

struct LaunchEnvironment;

/// An address of either family, for the socket calls.
struct SocketAddress {
  sockaddr_storage bytes{};
  socklen_t length = 0;
  sockaddr* generic() { return reinterpret_cast<sockaddr*>(&bytes); }
  const sockaddr* generic() const { return reinterpret_cast<const sockaddr*>(&bytes); }
  std::uint16_t port() const;
};

/// Returns a text that is the same for all processes of a machine, until it reboots; "" where it is
/// unknown. Unlike a host name it is the same in containers, and different on other machines.
std::string running_kernel();

/// "10.0.0.1", "fe80::1%eth0": without the port.
std::string host_text(const SocketAddress& address);

/// Returns all addresses of a host, in the order in which to try them; "localhost" is 127.0.0.1.
/// Asks the name service, which may take time. Errors: kComm for an unknown name.
std::vector<SocketAddress> resolve(const std::string& host, std::uint16_t port);

/// Returns the address of this host from which `host` is reached; nothing is sent. Errors: kComm
/// for an unknown name, or no route.
std::string local_address_towards(const std::string& host);

/// A file descriptor that closes itself.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();
  int get() const { return fd_; }
  /// Releases the descriptor; the caller closes it.
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

struct Listener {
  Descriptor socket;    ///< close-on-exec
  std::string address;  ///< "127.0.0.1"
  std::uint16_t port = 0;
};

/// Listens on the first address of `host` that is this host's; port 0 = any free one. Errors: kComm
/// when the port is taken (it says so), no address of `host` is this host's, or sockets cannot be
/// made.
Listener listen_on(const std::string& host, std::uint16_t port);

/// "store: cannot listen on HOST:PORT: ...; do Z", for a port on which another process listens.
std::string port_in_use(const std::string& host, std::uint16_t port);

/// scontrol only reads files of its host for this.
inline constexpr std::chrono::seconds kScontrolPatience{10};

/// Fills in `launch.master_addr` from `launch.node_list` if there is none yet.
/// Errors: kUsage when scontrol is missing, fails, gives no answer within `limit`, or answers with
/// anything but host names.
void find_first_host(LaunchEnvironment& launch, std::chrono::milliseconds limit);

}  // namespace tessera::comm
