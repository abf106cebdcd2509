// Gives nearly every test what it uses: GoogleTest with its matchers, the parts of the standard
// library that it includes anyway, and checks of refusals, which have a kind and a message.
#pragma once

#include <gmock/gmock.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <source_location>
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

/// The message of the error that `action` throws, and "" where it throws none; fails the test, and
/// names the caller, where the error is of another kind.
std::string refusal_of(ErrorKind kind, const std::function<void()>& action,
                       std::source_location caller = std::source_location::current());

/// Returns the kind and the message of that error: "usage: ...".
std::string refusal_of(const std::function<void()>& action);

/// As refusal_of(kind, action), but fails the test where no error is thrown, too.
std::string error_of(ErrorKind kind, const std::function<void()>& action,
                     std::source_location caller = std::source_location::current());

/// Returns the message of an exception of any type that `action` throws; "" where it throws none.
std::string thrown_by(const std::function<void()>& action);

/// The action throws an error of this kind (`kFormat`, ...), whose message says all of the texts.
#define EXPECT_REFUSED(kind, action, ...)                                 \
  EXPECT_THAT(                                                            \
      ::tessera::refusal_of(::tessera::ErrorKind::kind, [&] { action; }), \
      ::testing::AllOf(::testing::Not(::testing::IsEmpty()), ::tessera::Says(__VA_ARGS__)))

/// Returns the seconds that `action` takes.
double seconds_of(const std::function<void()>& action);

}  // namespace tessera
