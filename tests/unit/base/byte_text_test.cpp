// Bytes of a model as text: the bytes that a terminal may show, and those that become \xNN.
#include <cctype>
#include <cstddef>
#include <iterator>
#include <limits>
#include <random>

#include "base/text/byte_size.h"
#include "base/text/count_text.h"
#include "base/text/printable.h"
#include "base/text/wildcard.h"
#include "support/test.h"

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

// Three digits in the largest unit of which there is at least one, also where they are rounded up.
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

// Sizes as people write them, and counts as they are shown.

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

struct Case {
  const char* pattern;
  const char* name;
  bool matches;
};

TEST(Wildcard, DottedPatternsMatchWholeComponents) {
  const std::vector<Case> cases = {
      {"*norm", "model.layers.0.input_layernorm.weight", true},
      {"*norm", "model.norm.weight", true},
      {"*norm", "model.norm", true},
      {"*norm", "model.norms.weight", false},
      {"norm", "model.layers.0.input_layernorm.weight", false},
      {"mlp.gate", "model.layers.0.mlp.gate.weight", true},
      {"mlp.gate", "model.layers.0.mlp.gate_proj.weight", false},
      {"mlp.gate", "model.layers.0.mlp.gate.bias", true},
      {"mlp.gate.weight", "model.layers.0.mlp.gate.weight", true},
      {"mlp.gate.bias", "model.layers.0.mlp.gate.weight", false},
      {"mlp.*.weight", "model.layers.0.mlp.gate_proj.weight", true},
      {"mlp.*.weight", "model.layers.0.mlp.experts.3.gate_proj.weight", false},
      {"wo", "word_embedding.weight", false},
      {"wo", "layers.1.attention.wo.weight", true},
      {"layers.?", "layers.1.attention.wo.weight", true},
      {"layers.?", "layers.11.attention.wo.weight", false},
      {"layers.1?", "layers.11.attention.wo.weight", true},
      {"model.vision_tower", "model.vision_tower.encoder.0.q_proj.linear.weight", true},
      {"*", "x", true},
      {"*.*", "x", false},
      {"*a*b*c*", "xxaxxbxxcxx", true},
      {"*a*b*c*", "xxaxxcxxbxx", false},
      {"Norm", "model.norm.weight", false},
      {"model.norm.weight", "model.norm.weight", true},
      {"model.norm.weight.x", "model.norm.weight", false},
      {"", "model.norm.weight", false},
      {"", "", false},
      {".norm", "model.norm.weight", false},
      {"norm.", "model.norm.weight", false},
      {"norm..weight", "model.norm.weight", false},
      {"**", "abc", true},
      {"?", "", false},
  };
  for (const Case& c : cases) {
    EXPECT_EQ(dotted_match(c.pattern, c.name), c.matches) << c.pattern << " on " << c.name;
  }
}

TEST(Wildcard, ManyStarsTakeNoExponentialTime) {
  std::string pattern;
  for (int i = 0; i < 200; ++i) pattern += "*a";
  EXPECT_FALSE(wildcard_match(pattern + "b", std::string(5000, 'a')));
  EXPECT_TRUE(wildcard_match(pattern, std::string(5000, 'a')));
}

TEST(EditDistance, OnlyPatternsHaveWildcardsAndSwaps) {
  EXPECT_EQ(edit_distance("nrom", "norm", Typed::kWord), 2U);
  EXPECT_EQ(edit_distance("nrom", "norm", Typed::kPattern), 1U);
  EXPECT_EQ(edit_distance("n?*", "NORM", Typed::kWord), 3U);
  EXPECT_EQ(edit_distance("n?*", "NORM", Typed::kPattern), 0U);
  EXPECT_EQ(edit_distance("", "norm", Typed::kWord), 4U);
}

TEST(ClosestName, FindsTheNameThatWasMeant) {
  const std::vector<std::string> names = {
      "model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight", "model.norm.weight"};
  EXPECT_EQ(closest_name("mlp.gat_proj", names), names[1]);
  EXPECT_EQ(closest_name("embed_token", names), names[0]);
  EXPECT_EQ(closest_name("*nrom", names), names[2]);
  EXPECT_EQ(closest_name("model.Norm", names), names[2]);
}

TEST(ClosestName, IsSilentWhenNothingIsClose) {
  const std::vector<std::string> names = {"model.embed_tokens.weight", "model.norm.weight"};
  EXPECT_EQ(closest_name("router", names), std::nullopt);
  EXPECT_EQ(closest_name("x", names), std::nullopt);
  EXPECT_EQ(closest_name("model.norm", {}), std::nullopt);
}

}  // namespace
}  // namespace tessera::byte_text_test
