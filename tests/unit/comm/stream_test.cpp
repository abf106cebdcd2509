// comm/stream.h on the CPU, in a program that knows no other device: nothing is asked of libtorch.
#include "comm/stream.h"

#include "support/test.h"

namespace tessera::comm::stream_test {
namespace {

TEST(Streams, TheCpuHasNone) {
  EXPECT_FALSE(Stream::current(c10::kCPU));
  EXPECT_FALSE(Stream::make(c10::kCPU));
  EXPECT_EQ(Stream::make(c10::kCPU), Stream());
  EXPECT_TRUE(Stream().device().is_cpu());
}

TEST(Streams, AnEventOfTheCpuIsDone) {
  Event event;
  EXPECT_TRUE(event.done());
  event.record(Stream::current(c10::kCPU), EventSite::kIssue);
  EXPECT_TRUE(event.done());
  event.block(Stream(), EventSite::kIssue);
  const StreamScope nothing_changes{Stream()};
}

}  // namespace
}  // namespace tessera::comm::stream_test
