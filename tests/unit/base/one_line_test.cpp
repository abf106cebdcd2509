#include <gtest/gtest.h>

#include "base/text/printable.h"

namespace tessera::one_line_test {
namespace {

TEST(OneLine, OneLineStaysAsItIs) {
  EXPECT_EQ(one_line("what: found  2,\texpected 1"), "what: found  2,\texpected 1");
  EXPECT_EQ(one_line(""), "");
}

TEST(OneLine, LibtorchsStackIsLeftOut) {
  EXPECT_EQ(one_line("can't allocate memory\nException raised from alloc_cpu at cpu.cpp:117 (most "
                     "recent call first):\nframe #0: c10::Error::Error()\n"),
            "can't allocate memory");
}

TEST(OneLine, LinesAreJoinedBySingleSpaces) {
  EXPECT_EQ(one_line("\n two\n\n  lines \r\nhere \n"), "two lines here");
}

}  // namespace
}  // namespace tessera::one_line_test
