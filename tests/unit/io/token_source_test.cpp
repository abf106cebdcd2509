#include "io/token_source.h"

#include "support/temporary_folder.h"

namespace tessera::token_source_test {
namespace {

template <class Id>
std::string raw(const std::vector<Id>& ids) {
  return {reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(Id)};
}

std::string info(const std::string& dtype, std::int64_t num_tokens) {
  return R"({"dtype":")" + dtype + R"(","num_tokens":)" + std::to_string(num_tokens) +
         R"(,"vocab_size":70000,"tokenizer":"x"})";
}

std::vector<std::int64_t> ids(const TokenSource& source, std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> out(static_cast<std::size_t>(end - begin));
  source.copy(begin, out);
  return out;
}

TEST(TokenFile, BothDtypesAreRead) {
  const TemporaryFolder folder;
  folder.write("a.json", info("uint16", 4));
  const TokenFile narrow(folder.write("a.bin", raw<std::uint16_t>({1, 65535, 0, 7})));
  EXPECT_EQ(narrow.num_tokens(), 4);
  EXPECT_EQ(narrow.info().vocab_size, 70000);
  EXPECT_THAT(ids(narrow, 0, 4), ElementsAre(1, 65535, 0, 7));
  EXPECT_EQ(narrow.token(3), 7);
  EXPECT_FALSE(narrow.has_mask());
  std::vector<std::uint8_t> kept(2);
  narrow.copy_mask(1, kept);
  EXPECT_THAT(kept, ElementsAre(1, 1));
  folder.write("b.json", info("uint32", 3));
  const TokenFile wide(folder.write("b.bin", raw<std::uint32_t>({4294967295U, 65536, 2})));
  EXPECT_THAT(ids(wide, 0, 3), ElementsAre(4294967295, 65536, 2));
  EXPECT_THAT(ids(wide, 1, 3), ElementsAre(65536, 2));
  EXPECT_TRUE(ids(wide, 3, 3).empty());
}

TEST(TokenFile, MaskNextToItIsRead) {
  const TemporaryFolder folder;
  folder.write("a.json", info("uint16", 4));
  folder.write("a.mask.bin", std::string("\0\1\2\0", 4));
  const TokenFile file(folder.write("a.bin", raw<std::uint16_t>({1, 2, 3, 4})));
  ASSERT_TRUE(file.has_mask());
  std::vector<std::uint8_t> kept(3);
  file.copy_mask(1, kept);
  EXPECT_THAT(kept, ElementsAre(1, 1, 0));
  EXPECT_REFUSED(kUsage, file.copy_mask(2, kept));
}

TEST(TokenFile, RangesOutsideAreRefused) {
  const TemporaryFolder folder;
  folder.write("a.json", info("uint16", 4));
  const TokenFile file(folder.write("a.bin", raw<std::uint16_t>({1, 2, 3, 4})));
  EXPECT_REFUSED(kUsage, ids(file, -1, 1));
  EXPECT_REFUSED(kUsage, ids(file, 3, 5));
  EXPECT_REFUSED(kUsage, ids(file, 5, 5));
  EXPECT_REFUSED(kUsage, file.token(4));
}

TEST(TokenFile, SizesThatDisagreeAreRefused) {
  const TemporaryFolder folder;
  const auto bin = folder.write("a.bin", raw<std::uint16_t>({1, 2, 3, 4}));
  const auto refusal = [&] { return error_of(ErrorKind::kFormat, [&] { TokenFile{bin}; }); };
  folder.write("a.json", info("uint16", 5));
  EXPECT_THAT(refusal(), Says("a.bin", "found 8 bytes, expected 10"));
  folder.write("a.json", info("uint32", 4));
  EXPECT_THAT(refusal(), Says("expected 16"));
  folder.write("a.json", info("uint16", 3));
  EXPECT_THAT(refusal(), Says("expected 6"));
  folder.write("a.json", info("uint16", (std::int64_t{1} << 60U) - 1));
  refusal();
  folder.write("a.json", info("uint16", 4));
  folder.write("a.mask.bin", "123");
  EXPECT_THAT(refusal(), Says("a.mask.bin", "found 3 bytes"));
}

TEST(TokenFile, MissingFilesAreIoErrors) {
  const TemporaryFolder folder;
  EXPECT_REFUSED(kIo, TokenFile(folder / "a.bin"), "a.bin");
  folder.write("a.bin", "");
  EXPECT_REFUSED(kIo, TokenFile(folder / "a.bin"), "a.json");
  folder.write("a.json", info("uint16", 1));
  EXPECT_REFUSED(kFormat, TokenFile(folder / "a.bin"));
}

TEST(TokenFileInfo, MalformedDescriptionsAreRefused) {
  for (const std::string text :
       {"", "{}", "[]", "{", R"({"dtype":"uint16"})", R"({"dtype":"uint16","num_tokens":1})",
        R"({"dtype":"int32","num_tokens":1,"vocab_size":1})",
        R"({"dtype":16,"num_tokens":1,"vocab_size":1})",
        R"({"dtype":"uint16","num_tokens":0,"vocab_size":1})",
        R"({"dtype":"uint16","num_tokens":-1,"vocab_size":1})",
        R"({"dtype":"uint16","num_tokens":1.0,"vocab_size":1})",
        R"({"dtype":"uint16","num_tokens":"1","vocab_size":1})",
        R"({"dtype":"uint16","num_tokens":1,"vocab_size":null})",
        R"({"dtype":"uint16","num_tokens":1152921504606846976,"vocab_size":1})",
        R"({"dtype":"uint16","num_tokens":18446744073709551616,"vocab_size":1})",
        R"({"dtype":"uint16","num_tokens":1,"num_tokens":2,"vocab_size":1})"}) {
    SCOPED_TRACE(text);
    EXPECT_REFUSED(kFormat, parse_token_file_info(text, "a.json"), "a.json");
  }
}

TEST(TokenFile, FirstIdOutsideTheVocabularyIsNamedWithItsPosition) {
  const TemporaryFolder folder;
  folder.write("a.json", info("uint16", 6));
  const TokenFile file(folder.write("a.bin", raw<std::uint16_t>({5, 5, 300, 5, 400, 5})));
  const auto check = [&](std::int64_t begin, std::int64_t vocab_size) {
    check_ids(file, begin, ids(file, begin, 6), vocab_size);
  };
  EXPECT_REFUSED(kFormat, check(1, 300), "a.bin: found the token id 300 at position 2",
                 "vocabulary of 300");
  EXPECT_REFUSED(kFormat, check(1, 301), "id 400 at position 4");
  EXPECT_NO_THROW(check(5, 300));
  EXPECT_NO_THROW(check(0, 401));
}

/// As llm.c writes them: 256 int32 and the tokens.
template <class Id>
std::string shard(std::int32_t magic, std::int32_t version, std::int32_t count,
                  const std::vector<Id>& tokens) {
  std::vector<std::int32_t> header(256, 0);
  header[0] = magic;
  header[1] = version;
  header[2] = count;
  return raw(header) + raw(tokens);
}

TEST(TokenFile, ShardsOfBothKindsAreRead) {
  const TemporaryFolder folder;
  const TokenFile narrow(
      folder.write("a.bin", shard<std::uint16_t>(20240520, 1, 3, {50256, 1, 65535})));
  EXPECT_EQ(narrow.num_tokens(), 3);
  EXPECT_THAT(ids(narrow, 0, 3), ElementsAre(50256, 1, 65535));
  folder.write("a.mask.bin", std::string("\1\0\1", 3));
  EXPECT_TRUE(TokenFile(folder / "a.bin").has_mask());
  const TokenFile wide(folder.write("b.bin", shard<std::uint32_t>(20240801, 7, 2, {128000, 9})));
  EXPECT_THAT(ids(wide, 0, 2), ElementsAre(128000, 9));
  // A description next to it says that these are tokens from the first byte on.
  folder.write("b.json", info("uint32", 258));
  EXPECT_EQ(TokenFile(folder / "b.bin").token(0), 20240801);
}

TEST(TokenFile, TornShardsAreRefused) {
  const TemporaryFolder folder;
  const auto refusal = [&](const std::string& bytes) {
    const auto path = folder.write("a.bin", bytes);
    return error_of(ErrorKind::kFormat, [&] { TokenFile{path}; });
  };
  const auto good = shard<std::uint16_t>(20240520, 1, 3, {1, 2, 3});
  EXPECT_THAT(refusal(good.substr(0, good.size() - 1)),
              Says("a.bin: found 1029 bytes, expected 1030", "its header"));
  EXPECT_THAT(refusal(good.substr(0, 100)), Says("expected a header of 1024"));
  EXPECT_THAT(refusal(shard<std::uint16_t>(20240520, 2, 1, {1})), Says("found version 2"));
  EXPECT_THAT(refusal(shard<std::uint16_t>(20240520, 1, 0, {})), Says("a shard of 0 tokens"));
  EXPECT_THAT(refusal(shard<std::uint16_t>(20240520, 1, -4, {})), Says("of -4 tokens"));
  EXPECT_THAT(refusal(shard<std::uint32_t>(20240801, 7, 3, {1, 2})), Says("expected 1036"));
}

TEST(TextCorpus, BytesAndAnEndAfterEachFile) {
  const TemporaryFolder folder;
  folder.write("b.txt", "\xC3\xA9");
  folder.write("a.txt", "hi");
  folder.write("c.md", "not text");
  folder.write("d.txt/inside.txt", "not entered");
  const TextCorpus corpus(folder.path());
  EXPECT_EQ(corpus.files().size(), 2U);
  ASSERT_EQ(corpus.num_tokens(), 6);
  EXPECT_THAT(ids(corpus, 0, 6), ElementsAre('h', 'i', 256, 0xC3, 0xA9, 256));
}

TEST(TextCorpus, EveryRangeIsThatPartOfTheWhole) {
  const TemporaryFolder folder;
  const std::vector<std::filesystem::path> files{folder.write("1", "abc"), folder.write("2", ""),
                                                 folder.write("3", "d"), folder.write("4", "")};
  const TextCorpus corpus(files);
  const std::vector<std::int64_t> whole{'a', 'b', 'c', 256, 256, 'd', 256, 256};
  ASSERT_EQ(corpus.num_tokens(), static_cast<std::int64_t>(whole.size()));
  for (std::int64_t begin = 0; begin <= corpus.num_tokens(); ++begin) {
    for (std::int64_t end = begin; end <= corpus.num_tokens(); ++end) {
      EXPECT_EQ(ids(corpus, begin, end),
                std::vector<std::int64_t>(whole.begin() + begin, whole.begin() + end));
    }
  }
  EXPECT_REFUSED(kUsage, ids(corpus, 7, 9));
  EXPECT_REFUSED(kUsage, ids(corpus, -1, 0));
}

TEST(TextCorpus, FilesKeepTheirGivenOrder) {
  const TemporaryFolder folder;
  const TextCorpus corpus(std::vector{folder.write("b", "b"), folder.write("a", "a")});
  EXPECT_THAT(ids(corpus, 0, 4), ElementsAre('b', 256, 'a', 256));
  EXPECT_THAT(corpus.name(), Says("and 1 more"));
}

TEST(TextCorpus, EmptyDataIsRefusedByName) {
  const TemporaryFolder folder;
  const auto refusal = [&](const std::filesystem::path& path) {
    return error_of(ErrorKind::kFormat, [&] { TextCorpus{path}; });
  };
  EXPECT_THAT(refusal(folder.path()), Says(folder.path().native()));
  EXPECT_THAT(refusal(folder.write("empty.txt", "")), Says("empty.txt"));
  EXPECT_THAT(refusal(folder.path()), Says("found no byte of text"));
  EXPECT_REFUSED(kFormat, TextCorpus(std::vector<std::filesystem::path>{}));
  EXPECT_REFUSED(kIo, TextCorpus(folder / "none.txt"), "none.txt");
}

TEST(TextCorpus, VocabularyTooSmallForBytesIsRefused) {
  const TemporaryFolder folder;
  const TextCorpus corpus(folder.write("a.txt", "a"));
  EXPECT_NO_THROW(corpus.check_vocabulary(257));
  EXPECT_REFUSED(kFormat, corpus.check_vocabulary(256), "at least 257", "tools/tokenize.py");
}

TEST(TextCorpus, ATokenIsPlacedInItsFile) {
  const TemporaryFolder folder;
  const TextCorpus corpus(std::vector{folder.write("b", "bcd"), folder.write("a", "a")});
  EXPECT_EQ(corpus.place(0).position, 0);
  EXPECT_EQ(corpus.place(3).position, 3) << "its end";
  EXPECT_THAT(corpus.place(4).name, EndsWith("/a"));
  EXPECT_EQ(corpus.place(5).position, 1);
}

TEST(JoinedTokens, AreTheirPartsOneAfterTheOther) {
  const TemporaryFolder folder;
  folder.write("a.json", info("uint16", 3));
  folder.write("a.bin", raw<std::uint16_t>({1, 2, 3}));
  folder.write("a.mask.bin", std::string("\0\0\1", 3));
  folder.write("b.bin", shard<std::uint32_t>(20240801, 7, 2, {70000, 70001}));
  std::vector<std::unique_ptr<TokenSource>> parts;
  parts.push_back(std::make_unique<TokenFile>(folder / "a.bin"));
  parts.push_back(std::make_unique<TextCorpus>(folder.write("c.txt", "xy")));
  parts.push_back(std::make_unique<TokenFile>(folder / "b.bin"));
  JoinedTokens joined(std::move(parts));
  const std::vector<std::int64_t> whole{1, 2, 3, 'x', 'y', 256, 70000, 70001};
  const std::vector<std::uint8_t> kept{0, 0, 1, 1, 1, 1, 1, 1};
  ASSERT_EQ(joined.num_tokens(), 8);
  ASSERT_TRUE(joined.has_mask());
  for (std::int64_t begin = 0; begin <= 8; ++begin) {
    for (std::int64_t end = begin; end <= 8; ++end) {
      EXPECT_EQ(ids(joined, begin, end),
                std::vector<std::int64_t>(whole.begin() + begin, whole.begin() + end));
      std::vector<std::uint8_t> mask(static_cast<std::size_t>(end - begin));
      joined.copy_mask(begin, mask);
      EXPECT_EQ(mask, std::vector<std::uint8_t>(kept.begin() + begin, kept.begin() + end));
      EXPECT_EQ(joined.has_target(begin, end), std::ranges::count(mask, 1) > 0);
    }
  }
  EXPECT_THAT(joined.place(7).name, Says("b.bin"));
  EXPECT_EQ(joined.place(7).position, 1);
  EXPECT_REFUSED(kFormat, check_ids(joined, 5, ids(joined, 5, 8), 70001),
                 "b.bin: found the token id 70001 at position 1");
  EXPECT_REFUSED(kFormat, joined.check_vocabulary(256), "c.txt");
  EXPECT_REFUSED(kUsage, ids(joined, 7, 9));
}

TEST(TokenSource, ReadingAllOfAFileKeepsLittleOfItResident) {
  // 32 MiB of text: read row by row, at most a few windows may stay mapped.
  const TemporaryFolder folder;
  constexpr std::int64_t kBytes = 32 << 20;
  const TextCorpus corpus(folder.write("a.txt", std::string(kBytes, 'x')));
  const auto resident_kib = [] {
    std::ifstream status("/proc/self/status");
    std::string line;
    while (std::getline(status, line)) {
      if (line.rfind("RssFile:", 0) == 0) return std::stoll(line.substr(8));
    }
    return -1LL;
  };
  const long long before = resident_kib();
  if (before < 0) GTEST_SKIP() << "this system does not tell RssFile";
  std::vector<std::int64_t> row(1 << 16);
  std::int64_t sum = 0;
  for (std::int64_t begin = 0; begin < kBytes; begin += 1 << 16) {
    corpus.copy(begin, row);
    sum += row.front();
  }
  EXPECT_EQ(sum, 'x' * (kBytes >> 16));
  EXPECT_LT(resident_kib() - before, 4 * 1024);
}

}  // namespace
}  // namespace tessera::token_source_test
