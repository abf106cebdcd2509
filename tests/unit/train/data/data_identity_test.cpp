// Which data is the same data.
#include "train/data/data_identity.h"

#include "support/temporary_folder.h"
#include "train/config/config_resolve.h"
#include "train/data/data_files.h"

namespace tessera::train::data_identity_test {
namespace {

Hash128 hash_of(const std::vector<std::string>& path) {
  return data_identity({.path = path, .source = {}}, 8, 4).xxh3_128;
}

TEST(DataIdentity, IsTheContentNotThePlace) {
  const TemporaryFolder folder;
  const auto a = folder.write("a/1.txt", "one").string();
  folder.write("a/2.txt", "two");
  folder.write("a/notes.md", "not read");
  folder.write("b/1.txt", "one");
  folder.write("b/2.txt", "two");
  folder.write("c/1.txt", "onet");  // the same text, cut elsewhere
  folder.write("c/2.txt", "wo");
  const auto in = [&](const char* name) { return (folder / name).string(); };
  const auto found = data_identity({.path = {in("a")}, .source = {}}, 8, 4);
  EXPECT_EQ(found.bytes, 6);
  EXPECT_EQ(found.seq_len, 8);
  EXPECT_EQ(found.global_batch_size, 4);
  EXPECT_EQ(hash_of({in("b")}), found.xxh3_128);
  EXPECT_EQ(hash_of({in("a/1.txt"), in("a/2.txt")}), found.xxh3_128);
  EXPECT_NE(hash_of({in("c")}), found.xxh3_128);
  EXPECT_NE(hash_of({in("a/2.txt"), in("a/1.txt")}), found.xxh3_128);
  EXPECT_NE(hash_of({in("a/1.txt")}), found.xxh3_128);
}

TEST(DataIdentity, OfTokensCountsTheirDtypeAndMask) {
  const TemporaryFolder folder;
  const auto bin = folder.write("t.bin", "12345678").string();
  const std::string json = R"({"dtype": "uint16", "num_tokens": 4, "vocab_size": 9})";
  folder.write("t.json", json);
  const auto plain = hash_of({bin});
  folder.write("t.json", R"({"vocab_size": 99, "dtype": "uint16", "num_tokens": 4, "made_by": 1})");
  EXPECT_EQ(hash_of({bin}), plain) << "the same tokens, described otherwise";
  folder.write("t.json", R"({"dtype": "uint32", "num_tokens": 2, "vocab_size": 9})");
  EXPECT_NE(hash_of({bin}), plain);
  folder.write("t.json", json);
  folder.write("t.mask.bin", std::string_view("\1\1\1\0", 4));
  EXPECT_NE(hash_of({bin}), plain);
}

TEST(DataIdentity, OfALargeFileSeesItsLengthItsEndsAndItsSamples) {
  const TemporaryFolder folder;
  const auto path = folder.write("large.txt", "begin").string();
  const auto size = kHashedWholeBytes + 1000;
  std::filesystem::resize_file(path, static_cast<std::uintmax_t>(size));  // holes: no bytes on disk
  const auto whole = hash_of({path});
  const auto changed_at = [&](std::int64_t at) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    const char before = static_cast<char>(file.seekg(at).get());
    file.seekp(at).put('x').flush();
    const auto changed = hash_of({path});
    file.seekp(at).put(before).flush();
    return changed;
  };
  const auto middle = (size - kSampleBytes) / (kSamples - 1) * 31 / kSampleBytes * kSampleBytes;
  for (const std::int64_t at :
       {std::int64_t{0}, middle, middle + kSampleBytes - 1, size - kSampleBytes, size - 1}) {
    EXPECT_NE(changed_at(at), whole) << at;
  }
  EXPECT_EQ(hash_of({path}), whole);
  std::filesystem::resize_file(path, static_cast<std::uintmax_t>(size + 1));
  EXPECT_NE(hash_of({path}), whole);
}

TEST(DataIdentity, OfSourcesCountsTheirWeightsAndTheirOrder) {
  const TemporaryFolder folder;
  const auto a = folder.write("a.txt", "aaa").string();
  const auto b = folder.write("b.txt", "bbb").string();
  const auto of = [](const std::vector<DataSource>& sources) {
    return data_identity({.path = {}, .source = sources}, 8, 4);
  };
  const auto found = of({{{a}, 1.0}, {{b}, 2.0}});
  EXPECT_EQ(found.bytes, 6);
  EXPECT_EQ(found.path, (std::vector<std::string>{a, b}));
  EXPECT_NE(of({{{a}, 1.0}, {{b}, 3.0}}).xxh3_128, found.xxh3_128);
  EXPECT_NE(of({{{b}, 1.0}, {{a}, 2.0}}).xxh3_128, found.xxh3_128);
  EXPECT_NE(of({{{a, b}, 1.0}}).xxh3_128, found.xxh3_128);
  EXPECT_NE(hash_of({a, b}), found.xxh3_128);
  folder.write("b.txt", "bbc");
  EXPECT_NE(of({{{a}, 1.0}, {{b}, 2.0}}).xxh3_128, found.xxh3_128);
}

// Naive: sizes and hashes of data that is the same to its user.
TEST(DataIdentity, TheKeyThatMadeItOtherDataIsFound) {
  const TemporaryFolder folder;
  const auto a = folder.write("a.txt", "one").string(), b = folder.write("b.txt", "two").string();
  const auto changed = [](const DataConfig& now, const DataConfig& before,
                          const std::optional<DataConfig>& known) {
    return key_that_changed(now, known, data_identity(before, 8, 4)).value_or("nothing");
  };
  const DataConfig plain{.path = {a}, .source = {}};
  DataConfig packed = plain;
  packed.packing = Packing::kDocuments;
  EXPECT_EQ(changed(plain, packed, {}),
            "data.packing: found 'stream' (chosen by what the data has), expected 'documents'");
  EXPECT_EQ(changed(packed, plain, {}), "data.packing: found 'documents', expected 'stream'");
  const auto of = [](const std::vector<DataSource>& sources) {
    return DataConfig{.path = {}, .source = sources};
  };
  const auto both = of({{{a}, 1.0}, {{b}, 3.0}});
  const auto other = of({{{a}, 1.0}, {{b}, 2.0}});
  EXPECT_EQ(changed(other, both, both), "data.source[2].weight: found 2, expected 3");
  EXPECT_EQ(changed(other, both, {}), "nothing") << "the weights are not known";
  EXPECT_EQ(changed(of({{{a}, 1.0}}), both, both), "data.source: found 1 sources, expected 2");
  EXPECT_EQ(changed(plain, both, both), "data.source: found 0 sources, expected 2");
  EXPECT_THAT(changed(of({{{b}, 3.0}, {{a}, 1.0}}), both, both),
              ::testing::MatchesRegex("data.source.1..path: found .*b.txt.*, expected .*a.txt.*"));
  // Naive: the first path that differs, though that file only moved.
  const auto moved = folder.write("moved.txt", "one").string();
  const auto longer = folder.write("c.txt", "three").string();
  const auto same_size = folder.write("d.txt", "TWO").string();
  EXPECT_THAT(changed(of({{{moved}, 1.0}, {{longer}, 3.0}}), both, both),
              ::testing::MatchesRegex(
                  "data.source.2..path: found 5 bytes in .*c.txt', expected 3 as in .*b.txt'"));
  EXPECT_THAT(changed(of({{{moved}, 1.0}, {{same_size}, 3.0}}), both, both),
              ::testing::MatchesRegex("data.source.2..path: found other content in the 3 bytes of "
                                      ".*d.txt', expected that of .*b.txt'"));
  EXPECT_EQ(changed(of({{{moved}, 1.0}, {{b}, 2.0}}), both, both),
            "data.source[2].weight: found 2, expected 3");
  folder.write("b.txt", "others");
  const CheckpointData before{{a}, 6, {1, 2}, 8, 4};
  EXPECT_FALSE(key_that_changed(both, both, before)) << "the files changed, and no key";
}

TEST(DataIdentity, OtherRowsAreRefusedWithTheirKey) {
  const CheckpointData saved{{"a.txt"}, 10, {1, 2}, 8, 4};
  EXPECT_NO_THROW(require_same_data({{"moved.txt"}, 10, {1, 2}, 8, 4}, saved, "step-3"));
  const auto refused = [&](const CheckpointData& found) {
    return error_of(ErrorKind::kConfig, [&] { require_same_data(found, saved, "step-3"); });
  };
  EXPECT_THAT(refused({{"a.txt"}, 10, {1, 2}, 9, 4}), Says("seq_len: found 9, expected 8"));
  EXPECT_THAT(refused({{"a.txt"}, 10, {1, 2}, 8, 6}),
              Says("global_batch_size: found 6, expected 4"));
  EXPECT_THAT(refused({{"a.txt"}, 11, {1, 2}, 8, 4}),
              Says("data.path: found 11 bytes in 'a.txt', expected 10 of the checkpoint step-3"));
  EXPECT_THAT(refused({{"b.txt"}, 11, {1, 2}, 8, 4}),
              Says("found 11 bytes in 'b.txt', expected 10 (then 'a.txt') of the checkpoint"));
  EXPECT_THAT(refused({{"a.txt"}, 10, {1, 3}, 8, 4}),
              Says("data.path: found other content in the 10 bytes of 'a.txt'", "step-3"));
}

// Paths and patterns, and the files that they mean.
TEST(DataFiles, APatternIsItsMatchesInTheOrderOfTheirNames) {
  const TemporaryFolder folder;
  for (const std::string name : {"s_2.bin", "s_10.bin", "s_1.bin", "s_1.mask.bin", "s_1.labels.bin",
                                 "s_1.docs.bin", "s_1.json", "t.json", "Z.bin"}) {
    folder.write(name, "x");
  }
  const auto in = [&](const std::string& name) { return (folder / name).string(); };
  EXPECT_THAT(files_of({in("s_*.bin")}, "data.path"),
              ElementsAre(in("s_1.bin"), in("s_10.bin"), in("s_2.bin")));
  EXPECT_THAT(files_of({in("s_?.bin"), in("t.json")}, "data.path"),
              ElementsAre(in("s_1.bin"), in("s_2.bin"), in("t.json")));
  EXPECT_THAT(files_of({in("*")}, "data.path"),
              ElementsAre(in("Z.bin"), in("s_1.bin"), in("s_10.bin"), in("s_2.bin"), in("t.json")))
      << "what describes a NAME.bin is no data";
  EXPECT_THAT(files_of({in("s_[12].bin")}, "data.path"), ElementsAre(in("s_1.bin"), in("s_2.bin")));
}

TEST(DataFiles, ANameThatIsThereIsNoPattern) {
  const TemporaryFolder folder;
  const auto named = folder.write("a[1].txt", "x").string();
  folder.write("a1.txt", "x");
  EXPECT_THAT(files_of({named}, "data.path"), ElementsAre(named));
}

TEST(DataFiles, APatternWithoutAMatchIsRefused) {
  const TemporaryFolder folder;
  Config config;
  config.data.source = {{{"absent.txt"}, 1.0}, {{(folder / "*.bin").string()}, 1.0}};
  EXPECT_REFUSED(kIo, with_files(config), "data.source[2].path: found no file that matches",
                 "*.bin");
  config.data.source.pop_back();
  config.validation.path = {(folder / "held?").string()};
  EXPECT_REFUSED(kIo, with_files(config), "validation.path: found no file");
}

// Not silently without its files: a folder without permission too, which root would read.
TEST(DataFiles, AFolderThatCannotBeListedIsRefused) {
  const TemporaryFolder folder;
  std::filesystem::create_symlink("loop", folder / "loop");
  const auto pattern = (folder / "loop/*.bin").string();
  EXPECT_REFUSED(kIo, files_of({pattern}, "data.path"), "data.path: cannot list", "loop/*.bin",
                 "symbolic links");
  folder.write("file", "x");
  for (const std::string name : {"nowhere/*", "file/*"}) {
    const auto absent = (folder / name).string();
    EXPECT_REFUSED(kIo, files_of({absent}, "data.path"), "found no file that matches");
  }
}

// Naive: parts of plain rows, or of T that they do not divide.
TEST(ContextParts, FollowFromPackedRows) {
  const TemporaryFolder folder;
  Config config;
  config.training.seq_len = 32;
  config.parallelism.context_parallel_degree = 2;
  config.data.path = {folder.write("t.bin", "12345678").string()};
  const auto found = [&] { return context_parts(with_context_parts(config).parallelism); };
  EXPECT_EQ(found(), 4);
  folder.write("t.mask.bin", "1111");
  folder.write("t.docs.bin", "12345678");
  EXPECT_EQ(found(), 16);
  config.data.path = {(folder / "*.bin").string()};
  EXPECT_EQ(found(), 16);
  config.data.packing = Packing::kStream;
  EXPECT_EQ(found(), 4);
  config.data = {.path = {}, .source = {{.path = {(folder / "t.bin").string()}}}};
  config.training.seq_len = 24;
  EXPECT_EQ(found(), 12);
  config.parallelism.context_parallel_parts = 8;
  EXPECT_EQ(found(), 8);
  config.parallelism = {};
  EXPECT_EQ(found(), 1);
}

}  // namespace
}  // namespace tessera::train::data_identity_test
