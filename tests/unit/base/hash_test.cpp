#include "base/hash.h"

#include <gtest/gtest.h>

#include <set>

namespace tessera {
namespace {

TEST(Hash, IsXxh3SoThatItNeverChanges) {
  EXPECT_EQ(hash_bytes(""), 0x2D06800538D394C2ULL);  // XXH3's published answer for no input
  EXPECT_EQ(hash_bytes("tessera"), 0xBF456A4D41446D60ULL);
  EXPECT_NE(hash_bytes("", 1), hash_bytes(""));
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

}  // namespace
}  // namespace tessera
