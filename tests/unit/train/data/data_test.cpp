#include "train/data/data.h"

#include <ATen/ops/cat.h>

#include "comm/thread_ranks.h"
#include "support/temporary_folder.h"
#include "unit/train/data/batch_request.h"

namespace tessera::train::data_test {
namespace {

// 16-bit ids 0, 1, 2, ... with the description next to them.
std::filesystem::path write_counting_tokens(const TemporaryFolder& folder, int count) {
  std::string bytes;
  for (int i = 0; i < count; ++i) {
    bytes += static_cast<char>(i & 255);
    bytes += static_cast<char>(i >> 8);
  }
  folder.write("t.json", R"({"dtype": "uint16", "vocab_size": 300, "num_tokens": )" +
                             std::to_string(count) + "}");
  return folder.write("t.bin", bytes);
}

TEST(TokenBatches, TargetsAreTheNextTokensOfTheSameRow) {
  const TemporaryFolder folder;
  BatchRequest request =
      request_for(write_counting_tokens(folder, 23), 4);  // 4 rows of 5, 3 dropped
  request.training.local_batch_size = 2;
  request.data_ranks = 2;
  const auto batches = open_batches(request);
  EXPECT_EQ(batches->rows_in_step(), 4);
  EXPECT_EQ(batches->row_tokens(), 4);
  const MicroBatch batch = batches->load(1, {0, 4});
  EXPECT_EQ(batch.unmasked_targets(), 16);
  EXPECT_EQ(values(batch.targets), values(batch.input_ids + 1));
  Ids firsts = values(batch.input_ids.select(1, 0));
  std::sort(firsts.begin(), firsts.end());
  EXPECT_EQ(firsts, (Ids{0, 5, 10, 15}));  // rows do not overlap, all appear in the epoch
}

TEST(TokenBatches, PartsOfAStepMakeTheWhole) {
  const TemporaryFolder folder;
  BatchRequest request = request_for(write_counting_tokens(folder, 200), 9);
  request.training.global_batch_size = 6;
  const auto batches = open_batches(request);
  const MicroBatch whole = batches->load(3, {0, 6});
  const MicroBatch first = batches->load(3, {0, 2});
  const MicroBatch rest = batches->load(3, {2, 6});
  EXPECT_EQ(values(at::cat({first.input_ids, rest.input_ids})), values(whole.input_ids));
}

TEST(TokenBatches, AnEmptyRangeGivesNoRowsOfTheRightWidth) {
  const TemporaryFolder folder;
  BatchRequest request = request_for(write_counting_tokens(folder, 50), 9);
  const MicroBatch batch = open_batches(request)->load(1, {1, 1});
  EXPECT_EQ(batch.input_ids.sizes(), (at::IntArrayRef{0, 9}));
  EXPECT_EQ(batch.targets.sizes(), (at::IntArrayRef{0, 9}));
  EXPECT_EQ(batch.unmasked_targets(), 0);
}

TEST(TokenBatches, MaskedTokensAreNoTargets) {
  const TemporaryFolder folder;
  const auto path = write_counting_tokens(folder, 5);
  folder.write("t.mask.bin", std::string{1, 0, 1, 0, 1});
  BatchRequest request = request_for(path, 4);
  request.steps = 1;
  const auto batches = open_batches(request);
  EXPECT_EQ(values(batches->load(1, {0, 1}).targets), (Ids{-100, 2, -100, 4}));
  EXPECT_NO_THROW(batches->check_labels(1));
  folder.write("t.mask.bin", std::string(5, '\0'));
  std::filesystem::remove(folder / "t.labels.bin");
  const auto none = open_batches(request);
  EXPECT_REFUSED(kFormat, none->check_labels(1), "no unmasked target");
}

std::string ends_of(std::initializer_list<std::uint64_t> ends) {
  return {reinterpret_cast<const char*>(std::data(ends)), 8 * ends.size()};
}

struct PackedRow {
  Ids inputs, targets, starts;
  auto operator<=>(const PackedRow&) const = default;
};

/// The rows of step 1, which is a pass, in the order of their inputs.
std::vector<PackedRow> rows_of_pass(BatchRequest request, std::int64_t rows) {
  request.training.global_batch_size = rows;
  const auto batches = open_batches(request);
  EXPECT_EQ(batches->rows_in_pass(), rows);
  const MicroBatch batch = batches->load(1, {0, rows});
  std::vector<PackedRow> found;
  for (std::int64_t i = 0; i < rows; ++i) {
    found.push_back({values(batch.input_ids[i]), values(batch.targets[i]),
                     batch.documents.are_packed() ? values(batch.documents.starts[i]) : Ids{}});
  }
  std::ranges::sort(found);
  return found;
}

TEST(TokenBatches, RowsOfDocumentsHoldThemWholeAndApart) {
  const TemporaryFolder folder;
  BatchRequest request = request_for(write_counting_tokens(folder, 12));
  folder.write("t.docs.bin", ends_of({3, 5, 12}));
  request.training.seq_len = 4;
  request.packing = Packing::kDocuments;
  constexpr std::int64_t kNone = -100;
  const std::vector<PackedRow> expected{
      {{0, 1, 2, 3}, {1, 2, kNone, 4}, {0, 0, 0, 3}},  // two documents
      {{5, 6, 7, 8}, {6, 7, 8, 9}, {0, 0, 0, 0}},      // what a row holds of the third
      {{10, 11, 10, 11}, {11, kNone, kNone, kNone}, {0, 0, 2, 2}}};  // its rest, and no targets
  EXPECT_EQ(rows_of_pass(request, 3), expected);
  request.training.global_batch_size = 3;
  const MicroBatch batch = open_batches(request)->load(1, {0, 3});
  for (std::int64_t row = 0; row < 3; ++row) {
    const bool is_last = values(batch.input_ids[row]).front() == 10;
    EXPECT_EQ(values(batch.fillers.value()[row].to(at::kLong)),
              is_last ? (Ids{0, 0, 1, 1}) : Ids(4, 0));
  }
  EXPECT_THAT(open_batches(request)->as_text().at(0),
              Says("3 documents in 3 rows of 5 tokens, 1 longer than a row and cut, 20% of"));
}

// A document's last token is an input inside a row and none at its end: alone, it leaves the same
// inputs to the document in both places.
TEST(TokenBatches, WhereLengthsCountALastTokenStandsAlone) {
  const TemporaryFolder folder;
  BatchRequest request = request_for(write_counting_tokens(folder, 12));
  folder.write("t.docs.bin", ends_of({3, 5, 12}));
  request.training.seq_len = 4;
  request.packing = Packing::kDocuments;
  request.vocabulary.lengths_count = true;
  constexpr std::int64_t kNone = -100;
  const std::vector<PackedRow> expected{
      {{0, 1, 2, 3}, {1, 2, kNone, 4}, {0, 0, 2, 3}},
      {{5, 6, 7, 8}, {6, 7, 8, 9}, {0, 0, 0, 0}},
      {{10, 11, 10, 11}, {11, kNone, kNone, kNone}, {0, 1, 2, 2}}};
  EXPECT_EQ(rows_of_pass(request, 3), expected);
}

TEST(TokenBatches, DocumentsArePackedByDefaultWhereAMaskAndBordersAre) {
  const TemporaryFolder folder;
  BatchRequest request = request_for(write_counting_tokens(folder, 10), 4);
  const auto packs = [&] { return open_batches(request)->load(1, {0, 1}).documents.are_packed(); };
  EXPECT_FALSE(packs());
  folder.write("t.mask.bin", std::string(10, '\1'));
  EXPECT_FALSE(packs());
  EXPECT_THAT(open_batches(request)->as_text().at(0), Says("t.docs.bin' is not there"));
  folder.write("t.docs.bin", ends_of({4, 10}));
  EXPECT_TRUE(packs());
  request.packing = Packing::kStream;
  EXPECT_FALSE(packs());
  request.packing.reset();
  std::filesystem::remove(folder / "t.mask.bin");
  EXPECT_FALSE(packs());
}

TEST(TokenBatches, WhatKeepsDocumentsFromBeingPackedIsNamed) {
  const TemporaryFolder folder;
  BatchRequest request = request_for(write_counting_tokens(folder, 10), 4);
  request.path.push_back(folder.write("page.txt", "a page").string());
  folder.write("t.mask.bin", std::string(10, '\1'));
  folder.write("t.docs.bin", ends_of({4, 10}));
  EXPECT_THAT(open_batches(request)->as_text().at(0), Says("page.txt' is text"));
  std::filesystem::remove(folder / "t.docs.bin");
  request.packing = Packing::kDocuments;
  EXPECT_REFUSED(kFormat, open_batches(request), "data.packing = documents: found no");
  request.packing_is_a_must = false;  // of a validation
  const auto rows = open_batches(request);
  EXPECT_FALSE(rows->load(1, {0, 1}).documents.are_packed());
  EXPECT_THAT(rows->as_text().at(0), Says("out of one stream in"));
  EXPECT_THAT(rows->as_text().at(0), Says("t.docs.bin' is not there"));
  folder.write("t.docs.bin", ends_of({4, 10}));
  EXPECT_TRUE(open_batches(request)->load(1, {0, 1}).documents.are_packed());
}

TEST(TokenBatches, DocumentsOfOneTokenHaveNoTarget) {
  const TemporaryFolder folder;
  BatchRequest request = request_for(write_counting_tokens(folder, 3), 4);
  request.packing = Packing::kDocuments;
  folder.write("t.docs.bin", ends_of({1, 2, 3}));
  const auto rows = open_batches(request);
  EXPECT_REFUSED(kFormat, rows->check_labels(1), "expected a document of two tokens at least");
}

TEST(TokenBatches, PackedOrCompressedFilesAreNoText) {
  const TemporaryFolder folder;
  BatchRequest request =
      request_for(folder.write("a.parquet", "PAR1 and more bytes than a row"), 4);
  const auto refusal = [&] { return error_of(ErrorKind::kFormat, [&] { open_batches(request); }); };
  EXPECT_THAT(refusal(), Says("a.parquet': found a parquet file", "tools/tokenize.py"));
  request.path = {folder.write("a.gz", "\x1f\x8b and more bytes than a row").string()};
  EXPECT_THAT(refusal(), Says("found a gzip file"));
  request.path = {folder.write("a.txt", "PAR, which is text").string()};
  EXPECT_NO_THROW(open_batches(request));
}

// Each rank has its own copy of the files. Naive: rows of another order on one of them.
TEST(SameAtAll, ARankThatHasOtherFilesIsNamedByAllRanks) {
  const TemporaryFolder folder;
  struct Case {
    std::string name;
    std::string content;  ///< on rank 1; "" has none
    std::string found, expected;
  };
  for (const Case& one :
       {Case{"t.mask.bin", "", "t.bin' of 10 uint16 tokens without a mask", "with a mask"},
        Case{"t.docs.bin", "", "packing = stream, 2 rows", "packing = documents, 2 documents"},
        Case{"t.docs.bin", ends_of({5, 10}), "2 documents whose ends", "packing = documents, 2"},
        Case{"u.txt", "longer text", "u.txt' of 11 bytes", "u.txt' of 4 bytes"}}) {
    for (const std::string rank : {"0", "1"}) {
      const auto here = [&](const std::string& name) { return rank + "/" + name; };
      std::string bytes;
      for (int i = 0; i < 10; ++i) bytes += {static_cast<char>(i), '\0'};
      folder.write(here("t.bin"), bytes);
      folder.write(here("t.json"), R"({"dtype": "uint16", "vocab_size": 300, "num_tokens": 10})");
      folder.write(here("t.mask.bin"), std::string(10, '\1'));
      folder.write(here("t.docs.bin"), ends_of({4, 10}));
      folder.write(here("u.txt"), "text");
    }
    if (one.content.empty()) std::filesystem::remove(folder / "1" / one.name);
    if (!one.content.empty()) folder.write("1/" + one.name, one.content);
    std::vector<std::string> errors(2);
    comm::ThreadRanks ranks(2, ThreadBackend::kInProcess);
    ranks.run([&](World& world) {
      const auto mine = folder / std::to_string(world.rank());
      BatchRequest request = request_for(mine / "t.bin");
      if (one.name == "u.txt") request.path.push_back((mine / "u.txt").string());
      request.training.seq_len = 4;
      const auto rows = open_batches(request);
      errors[static_cast<std::size_t>(world.rank())] =
          error_of(ErrorKind::kFormat, [&] { require_same_at_all(*rows, "data.path", world); });
    });
    EXPECT_EQ(errors[0], errors[1]);
    EXPECT_THAT(errors[0], Says("data.path: found ")) << one.name;
    EXPECT_THAT(errors[0], Says(one.found, "on rank 1, expected ", one.expected));
  }
}

TEST(SameAtAll, TheSameFilesElsewherePass) {
  const TemporaryFolder folder;
  folder.write("0/a.txt", "a page");
  folder.write("1/a.txt", "a page");
  comm::ThreadRanks ranks(2, ThreadBackend::kInProcess);
  ranks.run([&](World& world) {
    BatchRequest request = request_for(folder / std::to_string(world.rank()) / "a.txt");
    request.training.seq_len = 4;
    EXPECT_NO_THROW(require_same_at_all(*open_batches(request), "data.path", world));
  });
}

TEST(TokenBatches, EachTextIsADocument) {
  const TemporaryFolder folder;
  folder.write("a.txt", "ab");
  folder.write("b.txt", "c");
  BatchRequest request = request_for(folder.path(), 5);
  request.packing = Packing::kDocuments;
  EXPECT_EQ(rows_of_pass(request, 1),
            (std::vector<PackedRow>{
                {{97, 98, 256, 99, 256}, {98, 256, -100, 256, -100}, {0, 0, 0, 3, 3}}}));
}

TEST(TokenBatches, DocumentsWithoutBordersAreRefused) {
  const TemporaryFolder folder;
  BatchRequest request = request_for(write_counting_tokens(folder, 10), 4);
  request.packing = Packing::kDocuments;
  EXPECT_REFUSED(kFormat, open_batches(request), "t.docs.bin' next to ");
  folder.write("t.docs.bin", ends_of({4, 9}));
  EXPECT_REFUSED(kFormat, open_batches(request), "expected 10, the tokens next to it");
}

// Only the first token of a row is kept: no position predicts it.
TEST(TokenBatches, AMaskThatKeepsNoTargetOfAnyRowIsRefused) {
  const TemporaryFolder folder;
  BatchRequest request = request_for(write_counting_tokens(folder, 11));
  folder.write("t.mask.bin", std::string{1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1});
  request.training.seq_len = 4;
  const auto batches = open_batches(request);
  EXPECT_REFUSED(kFormat, batches->check_labels(100),
                 "no unmasked target in the rows of steps 1 to 100");
}

TEST(TokenBatches, ARunNeedsOneStepWithATarget) {
  const TemporaryFolder folder;
  BatchRequest request = request_for(write_counting_tokens(folder, 10));
  folder.write("t.mask.bin", std::string{1, 1, 1, 1, 1, 0, 0, 0, 0, 0});
  request.training.seq_len = 4;
  request.training.global_batch_size = 1;
  const auto batches = open_batches(request);
  // One epoch: a step has the one row, the next the other.
  const bool first = batches->load(1, {0, 1}).unmasked_targets() > 0;
  EXPECT_NE(first, batches->load(2, {0, 1}).unmasked_targets() > 0);
  EXPECT_NO_THROW(batches->check_labels(2));
  if (first) {
    EXPECT_NO_THROW(batches->check_labels(1));
  } else {
    EXPECT_REFUSED(kFormat, batches->check_labels(1));
  }
}

TEST(TokenBatches, ReadsTextAsBytes) {
  const TemporaryFolder folder;
  BatchRequest request = request_for(folder.write("a.txt", "abcd"), 4);
  const MicroBatch batch = open_batches(request)->load(1, {0, 1});
  EXPECT_EQ(values(batch.input_ids), (Ids{'a', 'b', 'c', 'd'}));
  EXPECT_EQ(values(batch.targets), (Ids{'b', 'c', 'd', 256}));
}

TEST(TokenBatches, ReadsAListOfFilesAndFoldersInItsOrder) {
  const TemporaryFolder folder;
  folder.write("books/b.txt", "b");
  folder.write("books/a.txt", "a");
  folder.write("books/notes.md", "x");
  BatchRequest request = request_for(folder.write("z.txt", "z"));
  request.path.push_back((folder / "books").string());
  request.training.seq_len = 5;
  EXPECT_EQ(values(open_batches(request)->load(1, {0, 1}).input_ids),
            (Ids{'z', 256, 'a', 256, 'b'}));
}

TEST(TokenBatches, RowsOfTextComeInTheOrderOfTheSeedOverTheBordersOfDocuments) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 89; ++i) text += static_cast<char>(' ' + i);
  folder.write("books/a.txt", text.substr(0, 30));
  folder.write("books/b.txt", text.substr(30, 40));
  folder.write("books/c.txt", text.substr(70, 19));  // 92 tokens with the ends: 18 rows of 5
  BatchRequest request = request_for(folder / "books", 4);
  request.training.global_batch_size = 18;
  const auto epoch = [&](std::uint64_t seed, std::int64_t step) {
    request.seed = seed;
    return open_batches(request)->load(step, {0, 18});
  };
  const MicroBatch one = epoch(1, 1);
  EXPECT_TRUE(one.input_ids.equal(epoch(1, 1).input_ids));
  EXPECT_FALSE(one.input_ids.equal(epoch(2, 1).input_ids));
  EXPECT_FALSE(one.input_ids.equal(epoch(1, 2).input_ids)) << "another epoch, another order";
  // The same rows in every order: those of the documents one after the other, with their ends.
  Ids whole;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (i == 30 || i == 70) whole.push_back(256);
    whole.push_back(text[i]);
  }
  whole.push_back(256);
  std::vector<Ids> expected;
  for (std::size_t row = 0; row < 18; ++row) {
    expected.emplace_back(whole.begin() + static_cast<std::ptrdiff_t>(5 * row),
                          whole.begin() + static_cast<std::ptrdiff_t>(5 * row + 5));
  }
  for (const MicroBatch& batch : {one, epoch(2, 1), epoch(1, 2)}) {
    std::vector<Ids> rows;
    for (std::int64_t row = 0; row < 18; ++row) {
      rows.push_back(values(batch.input_ids[row]));
      rows.back().push_back(batch.targets[row][3].item<std::int64_t>());
    }
    std::ranges::sort(rows);
    std::vector<Ids> sorted = expected;
    std::ranges::sort(sorted);
    EXPECT_EQ(rows, sorted);
  }
}

TEST(TokenBatches, RefusesTextForAModelWithATokenizer) {
  const TemporaryFolder folder;
  BatchRequest request = request_for(folder.write("a.txt", "abcd"), 4);
  request.vocabulary.reads_bytes = false;
  EXPECT_REFUSED(kConfig, open_batches(request), "tools/tokenize.py");
}

TEST(TokenBatches, RefusesDataWithoutOneRow) {
  const TemporaryFolder folder;
  BatchRequest request = request_for(folder.write("a.txt", "abcd"), 5);
  request.key = "validation.path";
  const std::string message = error_of(ErrorKind::kFormat, [&] { open_batches(request); });
  EXPECT_THAT(message, Says("validation.path: found 5 tokens", "at least one row of 6"));
}

TEST(TokenBatches, RefusesIdsOutsideTheVocabulary) {
  const TemporaryFolder folder;
  BatchRequest request = request_for(write_counting_tokens(folder, 100), 4);
  request.training.global_batch_size = 20;
  request.vocabulary.size = 99;
  const auto batches = open_batches(request);  // reads none
  EXPECT_REFUSED(kFormat, batches->load(1, {0, 20}), "t.bin: found the token id 99 at position 99");
}

TEST(TokenBatches, TextAndTokensAreReadTogether) {
  const TemporaryFolder folder;
  BatchRequest request = request_for(write_counting_tokens(folder, 3));
  request.path.push_back(folder.write("a.txt", "a").string());
  request.path.push_back(folder.write("b.txt", "b").string());
  request.path.push_back((folder / "t.bin").string());
  request.training.seq_len = 9;
  const MicroBatch batch = open_batches(request)->load(1, {0, 1});
  EXPECT_EQ(values(batch.input_ids), (Ids{0, 1, 2, 'a', 256, 'b', 256, 0, 1}));
  EXPECT_TRUE(batch.sources.empty());
}

/// `count` tokens that are all `id`.
std::string write_same(const TemporaryFolder& folder, const std::string& name, int id, int count) {
  const std::vector<std::uint16_t> tokens(static_cast<std::size_t>(count),
                                          static_cast<std::uint16_t>(id));
  folder.write(name + ".json", R"({"dtype": "uint16", "vocab_size": 300, "num_tokens": )" +
                                   std::to_string(count) + "}");
  return folder
      .write(name + ".bin", {reinterpret_cast<const char*>(tokens.data()), 2 * tokens.size()})
      .string();
}

TEST(TokenBatches, SeveralSourcesAreMixedByWeight) {
  const TemporaryFolder folder;
  BatchRequest request;
  request.vocabulary = {.size = 300, .reads_bytes = true};
  request.sources = {{{write_same(folder, "a", 1, 500)}, 3.0},
                     {{write_same(folder, "b", 2, 50)}, 1.0}};
  request.training.seq_len = 4;
  request.training.global_batch_size = 64;
  const auto batches = open_batches(request);
  ASSERT_EQ(batches->sources(), 2U);
  std::int64_t from_b = 0;
  for (std::int64_t step = 1; step <= 8; ++step) {
    const MicroBatch batch = batches->load(step, {0, 64});
    ASSERT_EQ(batch.sources.size(), 64U);
    for (std::int64_t row = 0; row < 64; ++row) {
      const auto source = batch.sources[static_cast<std::size_t>(row)];
      EXPECT_EQ(batch.input_ids[row][0].item<std::int64_t>(),
                static_cast<std::int64_t>(source) + 1);
      from_b += static_cast<std::int64_t>(source);
    }
    const MicroBatch part = batches->load(step, {17, 40});
    EXPECT_TRUE(part.input_ids.equal(batch.input_ids.narrow(0, 17, 23)));
    EXPECT_DOUBLE_EQ(batches->shares(step)[1],
                     static_cast<double>(from_b) / static_cast<double>(64 * step));
  }
  EXPECT_EQ(from_b, 128) << "512 rows are two whole blocks";
  EXPECT_THAT(batches->as_text()[1], Says("source 2: 25% of the rows out of 10"));
}

TEST(TokenBatches, EachSourceHasEpochsOfItsOwn) {
  const TemporaryFolder folder;
  BatchRequest request;
  request.vocabulary = {.size = 300, .reads_bytes = true};
  request.sources = {{{write_counting_tokens(folder, 100).string()}, 1.0},
                     {{write_same(folder, "b", 299, 500)}, 2.5}};
  request.training.seq_len = 4;
  request.training.global_batch_size = 7;
  const auto batches = open_batches(request);
  std::vector<Ids> epochs(1);
  for (std::int64_t step = 1; epochs.size() < 4; ++step) {
    const MicroBatch batch = batches->load(step, {0, 7});
    for (std::int64_t row = 0; row < 7; ++row) {
      if (batch.sources[static_cast<std::size_t>(row)] != 0) continue;
      if (epochs.back().size() == 20) epochs.emplace_back();
      epochs.back().push_back(batch.input_ids[row][0].item<std::int64_t>());
    }
  }
  EXPECT_NE(epochs[0], epochs[1]) << "another epoch, another order";
  epochs.pop_back();
  for (Ids& epoch : epochs) {
    std::ranges::sort(epoch);
    for (std::int64_t row = 0; row < 20; ++row) {
      EXPECT_EQ(epoch[static_cast<std::size_t>(row)], 5 * row);
    }
  }
}

TEST(TokenBatches, AnEmptySourceIsNamed) {
  const TemporaryFolder folder;
  BatchRequest request;
  request.vocabulary = {.size = 300, .reads_bytes = true};
  request.sources = {{{write_same(folder, "a", 1, 500)}, 3.0},
                     {{folder.write("b.txt", "abc").string()}, 1.0}};
  request.training.seq_len = 4;
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { open_batches(request); }),
              StartsWith("data.source[2].path: found 4 tokens in "));
  folder.write("b.txt", "");
  EXPECT_REFUSED(kFormat, open_batches(request), "data.source[2].path: ", "no byte of text");
}

}  // namespace
}  // namespace tessera::train::data_test
