// An error of libtorch itself, with the stack that it carries.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/text/printable.h"

namespace tessera::one_line_torch_test {
namespace {

TEST(OneLine, ErrorsOfLibtorchLoseTheirStackOnly) {
  try {
    at::empty({-1});
    FAIL() << "no error was thrown";
  } catch (const c10::Error& error) {
    ASSERT_THAT(error.what(), testing::HasSubstr("Exception raised from"));
    const std::string line = one_line(error.what());
    EXPECT_EQ(line, one_line(error.what_without_backtrace()));
    EXPECT_THAT(line, testing::HasSubstr("-1"));
    EXPECT_EQ(line.find('\n'), std::string::npos);
  }
}

}  // namespace
}  // namespace tessera::one_line_torch_test
