// What nearly every test uses: GoogleTest with its matchers and the parts of the standard library that it
// includes anyway, and refusals, which have a kind and say things.
#pragma once

#include <gmock/gmock.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/error.h"

namespace tessera {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

/// Matches a text that has all of these in it.
class Says {
 public:
  using is_gtest_matcher = void;

  template <class... Parts>
  explicit Says(const Parts&... parts) : parts_{std::string(parts)...} {}

  template <class Text>
  bool MatchAndExplain(const Text& text, std::ostream* why) const {
    return all_in(std::string(text), why);
  }
  void DescribeTo(std::ostream* out) const;
  void DescribeNegationTo(std::ostream* out) const;

 private:
  bool all_in(const std::string& text, std::ostream* why) const;

  std::vector<std::string> parts_;
};

/// The message of the error that `action` throws, and "" where it throws none; fails the test where
/// the error is of another kind.
std::string refusal_of(ErrorKind kind, const std::function<void()>& action);

/// Its kind and message: "usage: ...".
std::string refusal_of(const std::function<void()>& action);

/// The message of the error of this kind, where it fails the test that none is thrown.
std::string error_of(ErrorKind kind, const std::function<void()>& action);

/// What `action` throws, of whatever type; "" where it throws nothing.
std::string error_of(const std::function<void()>& action);

/// The action throws an error of this kind (`kFormat`, ...), whose message says all of the texts.
#define EXPECT_REFUSED(kind, action, ...)                                       \
  EXPECT_THAT(::tessera::error_of(::tessera::ErrorKind::kind, [&] { action; }), \
              ::tessera::Says(__VA_ARGS__))

}  // namespace tessera
