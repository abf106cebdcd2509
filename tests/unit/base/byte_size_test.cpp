// Sizes as people write them, and counts as they are shown.
#include "base/text/byte_size.h"

#include <gtest/gtest.h>

#include <cctype>
#include <iterator>
#include <random>
#include <string>

#include "base/text/count_text.h"

namespace tessera::byte_size_test {
namespace {

// Drawn: a number, a unit, each letter large or small, with the B or without it.
TEST(ByteSize, TakesUnitsInAnyCaseAndWithoutTheirB) {
  std::mt19937 random(1);
  constexpr std::string_view kLetters = "kmgt";
  for (int round = 0; round < 500; ++round) {
    const auto number = static_cast<std::int64_t>(1 + random() % 9999);
    std::int64_t expected = number;
    std::string unit;
    const bool is_binary = random() % 2 == 0;
    const std::size_t power = random() % 5;
    if (power > 0) unit += kLetters[power - 1];
    if (power > 0 && is_binary) unit += 'i';
    for (std::size_t i = 0; i < power; ++i) expected *= is_binary ? 1024 : 1000;
    if (random() % 2 == 0) unit += 'b';
    for (char& c : unit) {
      if (random() % 2 == 0) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    }
    const std::string text = std::to_string(number) + unit;
    EXPECT_EQ(byte_size(text), expected) << text;
    for (const char* wrong : {"x", "b", " ", "/s"}) {
      const bool is_b = *wrong == 'b' && !unit.ends_with('b') && !unit.ends_with('B');
      EXPECT_EQ(byte_size(text + wrong).has_value(), is_b) << text << wrong;
    }
    EXPECT_EQ(byte_size("-" + text), std::nullopt);
  }
  for (const char* wrong : {"", "0", "0GB", "GB", "i", "8i", "8iB", "1.5GB", "8 GB", "8E",
                            "9223372036854775807K", "99999999999999999999"}) {
    EXPECT_EQ(byte_size(wrong), std::nullopt) << wrong;
  }
}

TEST(ByteSize, IsShownWithANumberToCopyAndOneToRead) {
  EXPECT_EQ(exact_size_text(1000), "1000 bytes");
  EXPECT_EQ(exact_size_text(197472672), "197472672 bytes (188 MiB)");
}

TEST(CountText, HasTheWordOfOneOrOfMany) {
  EXPECT_EQ(count_text(0, "unit"), "0 units");
  EXPECT_EQ(count_text(1, "micro-batch"), "1 micro-batch");
  EXPECT_EQ(count_text(2, "micro-batch"), "2 micro-batches");
  EXPECT_EQ(count_text(64, "rank"), "64 ranks");
}

}  // namespace
}  // namespace tessera::byte_size_test
