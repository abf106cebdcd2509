#include "base/hash.h"

#include "support/test.h"

namespace tessera::hash_test {
namespace {

TEST(Hash, IsXxh3SoThatItNeverChanges) {
  EXPECT_EQ(hash_bytes(""), 0x2D06800538D394C2ULL);  // XXH3's published answer for no input
  EXPECT_EQ(hash_bytes("tessera"), 0xBF456A4D41446D60ULL);
  EXPECT_NE(hash_bytes("", 1), hash_bytes(""));
}

TEST(Hash128, IsWhatXxh128sumPrintsAndReadsItBack) {
  const auto nothing = Hash128Stream().digest();
  EXPECT_EQ(to_string(nothing), "99aa06d3014798d86001c324468d497f");  // published
  EXPECT_EQ(parse_hash128(to_string(nothing)), nothing);
  for (const char* text :
       {"", "99aa06d3014798d86001c324468d497", "99AA06D3014798D86001C324468D497F",
        "99aa06d3014798d86001c324468d497g", "99aa06d3014798d86001c324468d497f0"}) {
    EXPECT_EQ(parse_hash128(text), std::nullopt) << text;
  }
}

TEST(Hash128, PartsGiveTheHashOfTheWhole) {
  std::string text(5000, 'x');
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 31);
  const auto whole = Hash128Stream().add(text).digest();
  for (const std::size_t part : {1U, 7U, 240U, 1024U, 4999U}) {
    Hash128Stream stream;
    for (std::size_t at = 0; at < text.size(); at += part) {
      stream.add(std::string_view(text).substr(at, part));
    }
    EXPECT_EQ(stream.digest(), whole) << part;
  }
  text[2500] = static_cast<char>(text[2500] ^ 1);
  EXPECT_NE(Hash128Stream().add(text).digest(), whole);
}

TEST(Hasher, FieldsDoNotRunIntoEachOther) {
  const auto two = [](std::string_view a, std::string_view b) {
    return Hasher().add(a).add(b).digest();
  };
  EXPECT_NE(two("ab", "c"), two("a", "bc"));
  EXPECT_NE(two("", "a"), two("a", ""));
  EXPECT_EQ(two("a", "b"), two("a", "b"));
}

TEST(Hasher, EveryFieldCounts) {
  std::set<std::uint64_t> seen;
  seen.insert(Hasher().digest());
  seen.insert(Hasher().add(std::int64_t{1}).digest());
  seen.insert(Hasher().add(std::int64_t{-1}).digest());
  seen.insert(Hasher().add(std::int64_t{0}).digest());
  seen.insert(Hasher().add(1.0).digest());
  seen.insert(Hasher().add(std::string_view("1")).digest());
  EXPECT_EQ(seen.size(), 6U);
}

TEST(Crc32c, IsThatOfRfc3720) {
  // Appendix B.4 of the RFC, and the usual check value of the nine digits.
  std::string ascending;
  for (int i = 0; i < 32; ++i) ascending += static_cast<char>(i);
  const std::string descending(ascending.rbegin(), ascending.rend());
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAU);
  EXPECT_EQ(crc32c(std::string(32, '\xFF')), 0x62A8AB43U);
  EXPECT_EQ(crc32c(ascending), 0x46DD794EU);
  EXPECT_EQ(crc32c(descending), 0x113FDB5CU);
  EXPECT_EQ(crc32c("123456789"), 0xE3069283U);
  EXPECT_EQ(crc32c(""), 0U);
}

}  // namespace
}  // namespace tessera::hash_test
