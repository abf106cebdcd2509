// Bytes of a model as text: what a terminal may show, and what becomes \xNN.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text/printable.h"

namespace tessera::byte_text_test {
namespace {

std::string shown(std::string_view bytes) {
  ByteText text;
  std::string out;
  for (const char c : bytes) out += text.add(static_cast<unsigned char>(c));
  return out + text.finish();
}

TEST(ByteText, ValidUtf8PassesAsItIs) {
  for (const std::string_view text :
       {"plain\n\ttext\r\n", "\u00e9\u00fc\u00df", "\u20ac \u4e2d\u6587", "\U0001F600",
        "\\x41 stays", "\xED\x9F\xBF", "\xEE\x80\x80", "\xF4\x8F\xBF\xBF", "\xE0\xA0\x80",
        "\xF0\x90\x80\x80"}) {
    EXPECT_EQ(shown(text), text);
  }
}

TEST(CharacterBegin, IsTheByteItselfOrTheLeadBeforeIt) {
  const std::string_view text = "a\u20ac\U0001F600b";
  const std::vector<std::size_t> begins{0, 1, 1, 1, 4, 4, 4, 4, 8};
  for (std::size_t at = 0; at < text.size(); ++at) EXPECT_EQ(character_begin(text, at), begins[at]);
  EXPECT_EQ(character_begin("\x80\x80\x80", 2), 0u) << "where nothing leads, the first byte";
  EXPECT_EQ(character_begin("", 0), 0u);
}

TEST(ByteText, ACharacterAppearsWithItsLastByte) {
  ByteText text;
  EXPECT_EQ(text.add(0xE2), "");
  EXPECT_EQ(text.add(0x82), "");
  EXPECT_EQ(text.add(0xAC), "\u20ac");
  EXPECT_EQ(text.add('a'), "a");
  EXPECT_EQ(text.finish(), "");
}

TEST(ByteText, EveryByteThatBelongsToNoCharacterIsEscaped) {
  EXPECT_EQ(shown("\x80 \xFF \xC0\x80 \xF5"), "\\x80 \\xff \\xc0\\x80 \\xf5");
  EXPECT_EQ(shown("a\xC3"), "a\\xc3") << "cut short at the end";
  EXPECT_EQ(shown("\xE2\x82z"), "\\xe2\\x82z") << "cut short by a letter";
  EXPECT_EQ(shown("\xE2\xC3\xA9"), "\\xe2\u00e9") << "cut short by another character";
  EXPECT_EQ(shown("\xE2\x82\xE2\x82\xAC"), "\\xe2\\x82\u20ac");
}

TEST(ByteText, OverlongFormsSurrogatesAndWhatIsAboveUnicodeAreEscaped) {
  EXPECT_EQ(shown("\xE0\x9F\xBF"), "\\xe0\\x9f\\xbf");
  EXPECT_EQ(shown("\xF0\x8F\xBF\xBF"), "\\xf0\\x8f\\xbf\\xbf");
  EXPECT_EQ(shown("\xED\xA0\x80"), "\\xed\\xa0\\x80");
  EXPECT_EQ(shown("\xF4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");
}

TEST(ByteText, ControlCodesDoNotReachATerminal) {
  EXPECT_EQ(shown(std::string_view("\x1b[2J\0\x7f", 6)), "\\x1b[2J\\x00\\x7f");
  EXPECT_EQ(shown("\xC2\x9B"), "\\xc2\\x9b") << "C1, valid UTF-8";
  EXPECT_EQ(shown("\xC2\xA0"), "\xC2\xA0");
}

TEST(ByteText, EveryPairOfBytesEndsInPrintableUtf8) {
  for (int first = 0; first < 256; ++first) {
    for (int second = 0; second < 256; ++second) {
      const std::string pair{static_cast<char>(first), static_cast<char>(second)};
      const std::string out = shown(pair);
      EXPECT_EQ(shown(out), out) << first << " " << second;
    }
  }
}

// Three digits in the largest unit of which there is one, whatever rounding makes of them.
TEST(SizeText, HasThreeDigitsAndTheUnitThatFits) {
  constexpr std::int64_t kMi = std::int64_t{1} << 20;
  constexpr std::int64_t kGi = std::int64_t{1} << 30;
  const std::pair<std::int64_t, std::string_view> cases[] = {
      {0, "0 B"},
      {1023, "1023 B"},
      {1024, "1.00 KiB"},
      {24 * 1024, "24.0 KiB"},
      {10235, "10.0 KiB"},
      {1023 * 1024, "1023 KiB"},
      {kMi - 1, "1.00 MiB"},
      {512 * kMi, "512 MiB"},
      {kGi + 860 * kMi, "1.84 GiB"},
      {131 * kGi, "131 GiB"},
      {2048 * kGi, "2.00 TiB"},
      {std::numeric_limits<std::int64_t>::max(), "8192 PiB"},
  };
  for (const auto& [bytes, text] : cases) EXPECT_EQ(size_text(bytes), text) << bytes;
}

TEST(RangesText, NamesRunsOfNumbersAndCountsWhatIsTooMuch) {
  using Numbers = std::vector<int>;
  EXPECT_EQ(ranges_text(Numbers{}), "");
  EXPECT_EQ(ranges_text(Numbers{4}), "4");
  EXPECT_EQ(ranges_text(Numbers{0, 1, 2, 5, 7, 8}), "0-2, 5, 7-8");
  EXPECT_EQ(ranges_text(std::vector<std::int64_t>{0, 1, 2, 5}, ","), "0-2,5");
  EXPECT_EQ(ranges_text(Numbers{0, 2, 4, 6, 7}, ", ", 2), "0, 2 and 3 more");
  EXPECT_EQ(ranges_text(Numbers{0, 2, 3}, ", ", 2), "0, 2-3") << "as many as are shown";
}

}  // namespace
}  // namespace tessera::byte_text_test
