// A listening socket at one address.
//
// c10d's store server listens on every interface; it is handed one of these instead. No torch
// header. Next: spawn.cpp passes one to rank 0, store.cpp opens one.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace tessera::comm {

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
  /// Whoever takes it closes it.
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

struct Listener {
  Descriptor socket;    ///< close-on-exec
  std::string address;  ///< "127.0.0.1"
  std::uint16_t port = 0;
};

/// Listens on the first address of `host` that is this host's own; port 0 = any free one.
/// Errors: kComm when the port is taken (it says so), no address of `host` is this host's, or
/// sockets cannot be had.
Listener listen_on(const std::string& host, std::uint16_t port);

/// "store: cannot listen on HOST:PORT: ...; do Z", for a port that somebody else listens on.
std::string port_in_use(const std::string& host, std::uint16_t port);

}  // namespace tessera::comm
