#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <future>
#include <stdexcept>
#include <thread>

#include "launch/bounded_calls.h"
#include "launch/hosts.h"
#include "support/temporary_folder.h"

namespace tessera::comm::listener_test {
namespace {

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

// An address of the network for documentation, which no host has.
TEST(Listener, AnotherHostsAddressIsRefused) {
  EXPECT_REFUSED(kComm, listen_on("192.0.2.1", 0),
                 "found 192.0.2.1 (192.0.2.1) as the address of rank 0", "comm.master_addr",
                 "with GLOO_SOCKET_IFNAME");
}

TEST(Listener, PortInUseIsNamedWithWhatToDo) {
  const Listener first = listen_on("127.0.0.1", 0);
  try {
    listen_on("127.0.0.1", first.port);
    FAIL() << "two listen on one port";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kComm);
    EXPECT_THAT(error.what(),
                Says(concat("found port ", first.port, " of 127.0.0.1 in use"), "MASTER_PORT"));
  }
}

using std::chrono::hours;
using std::chrono::milliseconds;

TEST(BoundedCalls, ReturnWhatTheCallReturnsAndThrowWhatItThrows) {
  BoundedCalls calls;
  EXPECT_EQ(calls.run([] { return 7; }, hours(1)), 7);
  EXPECT_THROW(calls.run([]() -> int { throw std::runtime_error("no"); }, hours(1)),
               std::runtime_error);
  EXPECT_EQ(calls.run([] { return 8; }, hours(1)), 8) << "an error is no reason to stop";
}

TEST(BoundedCalls, RunInTurnOnOneOtherThread) {
  BoundedCalls calls;
  const auto first = calls.run([] { return std::this_thread::get_id(); }, hours(1));
  EXPECT_NE(first, std::this_thread::get_id());
  EXPECT_EQ(calls.run([] { return std::this_thread::get_id(); }, hours(1)), first);
}

TEST(BoundedCalls, OneThatHangsIsLeftBehindAndNoneFollowsIt) {
  std::promise<void> never_answered;
  const auto answer = std::make_shared<std::shared_future<void>>(never_answered.get_future());
  {
    BoundedCalls calls;
    const auto hang = [answer] {
      answer->wait();
      return 1;
    };
    EXPECT_FALSE(calls.run(hang, milliseconds(1)).has_value());
    EXPECT_FALSE(calls.run([] { return 2; }, hours(1)).has_value());
  }  // no caller waits for it
  never_answered.set_value();
}

TEST(BoundedCalls, OneThatIsInVainIsLeftBehind) {
  std::promise<void> never_answered;
  const auto answer = std::make_shared<std::shared_future<void>>(never_answered.get_future());
  int looks = 0;
  const auto in_vain = [&looks] { return ++looks == 3; };
  const auto hang = [answer] {
    answer->wait();
    return 1;
  };
  EXPECT_FALSE(BoundedCalls().run(hang, hours(1), in_vain).has_value());
  EXPECT_EQ(looks, 3);
  EXPECT_EQ(BoundedCalls().run([] { return 2; }, hours(1), [] { return false; }), 2);
  never_answered.set_value();
}

}  // namespace
}  // namespace tessera::comm::listener_test
