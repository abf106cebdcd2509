// The index of kept labels beside a look at every byte of the mask.
#include "io/label_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <random>

#include "io/token_source.h"
#include "unit/io/temporary_folder.h"

namespace tessera::label_index_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::TemporaryFolder;

constexpr std::int64_t kBlock = LabelIndex::kBlockTokens;

/// Runs of kept and of other tokens, some longer than a block.
std::string drawn_mask(std::mt19937& draw, std::int64_t tokens) {
  std::string mask;
  for (bool kept = draw() % 2 == 0; std::ssize(mask) < tokens; kept = !kept) {
    const auto longest = draw() % 3 == 0 ? 3 * kBlock : 50;
    mask.append(1 + draw() % static_cast<unsigned>(longest), kept ? '\1' : '\0');
  }
  mask.resize(static_cast<std::size_t>(tokens));
  return mask;
}

TEST(LabelIndex, SaysOfAnyRangeWhatItsMaskSays) {
  std::mt19937 draw(20261126);
  for (int round = 0; round < 20; ++round) {
    const TemporaryFolder folder;
    const std::int64_t tokens = 1 + static_cast<std::int64_t>(draw() % (6 * kBlock));
    const std::string bytes = drawn_mask(draw, tokens);
    const MappedFile mask(folder.write("a.mask.bin", bytes));
    const LabelIndex counted(mask);
    counted.write(folder / "a.labels.bin");
    const LabelIndex read(folder / "a.labels.bin", mask);
    EXPECT_EQ(read.kept(), std::ranges::count(bytes, '\1'));
    for (int i = 0; i < 200; ++i) {
      const auto one = static_cast<std::int64_t>(draw() % static_cast<unsigned>(tokens + 1));
      const auto other = static_cast<std::int64_t>(draw() % static_cast<unsigned>(tokens + 1));
      const auto [begin, end] = std::minmax(one, other);
      const bool any = std::count(bytes.begin() + begin, bytes.begin() + end, '\1') > 0;
      EXPECT_EQ(read.any(mask, begin, end), any) << begin << " to " << end << " of " << tokens;
      EXPECT_EQ(counted.any(mask, begin, end), any);
    }
  }
}

TEST(LabelIndex, HasItsDocumentedBytes) {
  const TemporaryFolder folder;
  std::string bytes(static_cast<std::size_t>(kBlock) + 2, '\0');
  bytes[0] = bytes[7] = '\1';
  bytes[static_cast<std::size_t>(kBlock) + 1] = '\2';  // whatever is not 0
  LabelIndex(MappedFile(folder.write("a.mask.bin", bytes))).write(folder / "a.labels.bin");
  std::ifstream file(folder / "a.labels.bin", std::ios::binary);
  std::vector<std::uint64_t> numbers(4, 99);
  file.read(reinterpret_cast<char*>(numbers.data()), 32);
  EXPECT_EQ(file.gcount(), 24);
  EXPECT_THAT(numbers, ::testing::ElementsAre(kBlock + 2, 2, 3, 99));
}

TEST(LabelIndex, OneThatDoesNotFitItsMaskIsRefused) {
  const TemporaryFolder folder;
  const MappedFile mask(folder.write("a.mask.bin", std::string(3 * kBlock, '\1')));
  const auto refusal = [&](const std::vector<std::int64_t>& numbers) {
    const auto path = folder.write(
        "a.labels.bin", {reinterpret_cast<const char*>(numbers.data()), numbers.size() * 8});
    const auto what = error_of(ErrorKind::kFormat, [&] { LabelIndex(path, mask); });
    EXPECT_THAT(what, AllOf(HasSubstr("a.labels.bin: found"), HasSubstr("the index of"),
                            HasSubstr("a.mask.bin"), HasSubstr("remove it")));
    return what;
  };
  EXPECT_THAT(refusal({3 * kBlock, kBlock, 2 * kBlock}), HasSubstr("24 bytes instead of 32"));
  EXPECT_THAT(refusal({3 * kBlock - 1, 1, 2, 3}), HasSubstr("that of 12287 tokens"));
  EXPECT_THAT(refusal({3 * kBlock, kBlock, kBlock - 1, kBlock}), HasSubstr("in block 1"));
  EXPECT_THAT(refusal({3 * kBlock, -1, 1, 2}), HasSubstr("counts from 0 to -1 in block 0"));
  EXPECT_THAT(refusal({3 * kBlock, kBlock, 3 * kBlock, 3 * kBlock}), HasSubstr("in block 1"));
  EXPECT_THAT(refusal({3 * kBlock, kBlock, kBlock + 5, 2 * kBlock + 5}),
              HasSubstr("5 kept labels in block 1 where the mask has 4096"));
}

TEST(LabelIndex, OfAFileIsMadeOnceAndTaken) {
  const TemporaryFolder folder;
  folder.write("a.json", R"({"dtype":"uint16","num_tokens":4,"vocab_size":9})");
  folder.write("a.bin", std::string(8, '\0'));
  folder.write("a.mask.bin", std::string("\0\1\0\0", 4));
  TokenFile file(folder / "a.bin");
  EXPECT_FALSE(std::filesystem::exists(folder / "a.labels.bin")) << "before somebody asks";
  EXPECT_TRUE(file.has_target(1, 2));
  EXPECT_FALSE(file.has_target(2, 4));
  EXPECT_FALSE(file.has_target(1, 1));
  error_of(ErrorKind::kUsage, [&] { file.has_target(3, 5); });
  ASSERT_EQ(std::filesystem::file_size(folder / "a.labels.bin"), 16U);
  // Another mask of the same length: what lies there is not its index.
  folder.write("a.mask.bin", std::string("\0\1\1\0", 4));
  TokenFile changed(folder / "a.bin");
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { changed.has_target(0, 4); }),
              HasSubstr("a.labels.bin: found 1 kept labels in block 0 where the mask has 2"));
}

}  // namespace
}  // namespace tessera::label_index_test
