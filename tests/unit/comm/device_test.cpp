// One device for each rank of a host, where a backend wants that.
#include "comm/device.h"

#include <gtest/gtest.h>

#include <string>

#include "launch/store.h"
#include "tessera/error.h"

namespace tessera::comm::device_test {
namespace {

std::string refusal(Store& store, const std::string& host, const std::string& device, int rank) {
  try {
    claim_device(store, host, device, rank);
  } catch (const Error& error) {
    return concat(to_string(error.kind()), ": ", error.what());
  }
  return "";
}

TEST(ClaimedDevice, OfTwoRanksOfAHostIsRefusedAndNamesBoth) {
  const auto store = Store::in_memory();
  EXPECT_EQ(refusal(*store, "host", "0000:41:00.0", 1), "");
  EXPECT_EQ(
      refusal(*store, "host", "0000:41:00.0", 3),
      "usage: world: found ranks 1 and 3 on one device (0000:41:00.0 of their host), expected "
      "one for each rank; start as many ranks on a host as it has devices, each with a local "
      "rank of its own, or take comm.backend = \"gloo\"");
}

TEST(ClaimedDevice, OfOtherRanksIsAnotherOneOrOnAnotherHost) {
  const auto store = Store::in_memory();
  EXPECT_EQ(refusal(*store, "host", "0000:41:00.0", 0), "");
  EXPECT_EQ(refusal(*store, "host", "0000:42:00.0", 1), "");
  EXPECT_EQ(refusal(*store, "other host", "0000:41:00.0", 2), "");
  EXPECT_EQ(refusal(*store, "host", "0000:41:00.0", 0), "") << "said again";
}

TEST(ClaimedDevice, OfHostsThatCannotBeToldIsNotCompared) {
  const auto store = Store::in_memory();
  EXPECT_EQ(refusal(*store, "", "0000:41:00.0", 0), "");
  EXPECT_EQ(refusal(*store, "", "0000:41:00.0", 1), "");
}

}  // namespace
}  // namespace tessera::comm::device_test
