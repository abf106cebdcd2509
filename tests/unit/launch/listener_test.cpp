#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "launch/hosts.h"
#include "tessera/error.h"
#include "unit/io/temporary_folder.h"

namespace tessera::comm::listener_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string bound_to(const Listener& listener) {
  sockaddr_storage bytes{};
  socklen_t length = sizeof(bytes);
  EXPECT_EQ(::getsockname(listener.socket.get(), reinterpret_cast<sockaddr*>(&bytes), &length), 0);
  char text[INET6_ADDRSTRLEN] = {};
  const void* const address =
      bytes.ss_family == AF_INET6
          ? static_cast<void*>(&reinterpret_cast<sockaddr_in6*>(&bytes)->sin6_addr)
          : &reinterpret_cast<sockaddr_in*>(&bytes)->sin_addr;
  ::inet_ntop(bytes.ss_family, address, text, sizeof(text));
  return text;
}

TEST(Listener, TakesAFreePortOfTheLoopbackAddressThatIsNamed) {
  const Listener one = listen_on("127.0.0.1", 0);
  const Listener two = listen_on("127.0.0.2", 0);
  const Listener name = listen_on("localhost", 0);
  EXPECT_EQ(bound_to(one), "127.0.0.1");
  EXPECT_EQ(bound_to(two), "127.0.0.2");
  EXPECT_EQ(bound_to(name), "127.0.0.1");
  EXPECT_NE(one.port, 0);
  EXPECT_NE(one.port, name.port);
}

TEST(Listener, SaysAtWhichAddress) {
  EXPECT_EQ(listen_on("localhost", 0).address, "127.0.0.1");
  EXPECT_EQ(listen_on("0.0.0.0", 0).address, "0.0.0.0");
}

// Of the documentation's network: nobody's.
TEST(Listener, AnotherHostsAddressIsRefused) {
  EXPECT_THAT(testing::error_of(ErrorKind::kComm, [] { listen_on("192.0.2.1", 0); }),
              AllOf(HasSubstr("found 192.0.2.1 (192.0.2.1) as the address of rank 0"),
                    HasSubstr("comm.master_addr"), HasSubstr("with GLOO_SOCKET_IFNAME")));
}

TEST(Listener, PortInUseIsNamedWithWhatToDo) {
  const Listener first = listen_on("127.0.0.1", 0);
  try {
    listen_on("127.0.0.1", first.port);
    FAIL() << "two listen on one port";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kComm);
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr(concat("found port ", first.port, " of 127.0.0.1 in use")),
                      HasSubstr("MASTER_PORT")));
  }
}

}  // namespace
}  // namespace tessera::comm::listener_test
