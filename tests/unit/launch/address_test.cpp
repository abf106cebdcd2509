#include <gmock/gmock.h>

#include "launch/hosts.h"
#include "unit/io/temporary_folder.h"

namespace tessera::comm::address_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Address, NumbersAndLocalhostNeedNoNameService) {
  const auto four = resolve("10.1.2.3", 4711);
  ASSERT_EQ(four.size(), 1U);
  EXPECT_EQ(host_text(four[0]), "10.1.2.3");
  EXPECT_EQ(four[0].port(), 4711);
  const auto six = resolve("::1", 80);
  ASSERT_EQ(six.size(), 1U);
  EXPECT_EQ(host_text(six[0]), "::1");
  EXPECT_EQ(six[0].port(), 80);
  EXPECT_EQ(host_text(resolve("localhost", 1).at(0)), "127.0.0.1");
}

TEST(Address, UnknownNamesAreSaid) {
  // RFC 2606: never a host.
  EXPECT_THAT(testing::error_of(ErrorKind::kComm, [] { resolve("rank0.invalid", 1); }),
              AllOf(HasSubstr("rank0.invalid"), HasSubstr("comm.master_addr")));
}

TEST(Address, TheRouteToThisHostBeginsAtItself) {
  EXPECT_EQ(local_address_towards("127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(local_address_towards("localhost"), "127.0.0.1");
}

}  // namespace
}  // namespace tessera::comm::address_test
