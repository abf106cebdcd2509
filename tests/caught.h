// What a comparison says of a mistake that was injected: the comparison itself, which has to fail.
#pragma once

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tessera::test {

/// The failures of the expectations in `compare`, on this thread, none of which counts. Empty: what
/// was injected passes unnoticed.
template <class Compare>
std::vector<std::string> failures_of(const Compare& compare) {
  ::testing::TestPartResultArray results;
  {
    const ::testing::ScopedFakeTestPartResultReporter reporter(
        ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &results);
    compare();
  }
  std::vector<std::string> failures;
  for (int i = 0; i < results.size(); ++i) {
    const auto& result = results.GetTestPartResult(i);
    if (result.failed()) failures.emplace_back(result.message());
  }
  return failures;
}

}  // namespace tessera::test
