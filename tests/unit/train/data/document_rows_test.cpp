// The packing of documents, over random lengths.
#include "train/data/document_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>

#include "unit/io/temporary_folder.h"

namespace tessera::train::document_rows_test {
namespace {

using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;

struct Documents {
  std::vector<std::int64_t> ends;
  std::int64_t row_tokens = 1;
};

Documents drawn_documents() {
  Documents drawn;
  drawn.row_tokens = *rc::gen::inRange<std::int64_t>(1, 70);
  const auto count = *rc::gen::inRange(1, 400);
  const auto longest = *rc::gen::element<std::int64_t>(3, drawn.row_tokens + 1, 200);
  std::int64_t end = 0;
  for (int i = 0; i < count; ++i) {
    drawn.ends.push_back(end += *rc::gen::inRange<std::int64_t>(1, longest + 1));
  }
  return drawn;
}

/// Of all rows, in the order of the data.
std::vector<DocumentPiece> pieces_of(const DocumentRows& rows) {
  std::vector<DocumentPiece> pieces;
  for (std::int64_t i = 0; i < rows.rows(); ++i) {
    pieces.insert(pieces.end(), rows.row(i).begin(), rows.row(i).end());
  }
  std::ranges::sort(pieces, {}, &DocumentPiece::begin);
  return pieces;
}

RC_GTEST_PROP(DocumentRows, EveryDocumentIsThereOnceAndWholeUnlessItIsLongerThanARow, ()) {
  const auto [ends, row_tokens] = drawn_documents();
  const DocumentRows rows(ends, row_tokens);
  std::vector<DocumentPiece> expected;
  std::int64_t begin = 0;
  std::int64_t longer = 0;
  for (const std::int64_t end : ends) {
    longer += end - begin > row_tokens ? 1 : 0;
    for (; end - begin > row_tokens; begin += row_tokens) expected.push_back({begin, row_tokens});
    expected.push_back({begin, end - begin});
    begin = end;
  }
  RC_ASSERT(pieces_of(rows) == expected);
  RC_ASSERT(rows.cut_documents() == longer);
}

RC_GTEST_PROP(DocumentRows, RowsHoldWhatTheyCanAndAllButOneAreMoreThanHalfFull, ()) {
  const auto [ends, row_tokens] = drawn_documents();
  const DocumentRows rows(ends, row_tokens);
  std::int64_t half_empty = 0;
  std::int64_t held = 0;
  for (std::int64_t i = 0; i < rows.rows(); ++i) {
    std::int64_t tokens = 0;
    std::int64_t before = -1;
    for (const DocumentPiece& piece : rows.row(i)) {
      RC_ASSERT(piece.begin > before);
      before = piece.begin;
      tokens += piece.count;
    }
    RC_ASSERT(tokens >= 1 && tokens <= row_tokens);
    half_empty += 2 * tokens <= row_tokens ? 1 : 0;
    held += tokens;
  }
  RC_ASSERT(half_empty <= 1);
  RC_ASSERT(held == ends.back());
  RC_ASSERT(rows.empty_places() == rows.rows() * row_tokens - held);
}

RC_GTEST_PROP(DocumentRows, TheSameDocumentsMakeTheSameRows, ()) {
  const auto [ends, row_tokens] = drawn_documents();
  const DocumentRows one(ends, row_tokens);
  const DocumentRows other(ends, row_tokens);
  RC_ASSERT(one.rows() == other.rows());
  for (std::int64_t i = 0; i < one.rows(); ++i) {
    RC_ASSERT(std::ranges::equal(one.row(i), other.row(i)));
  }
}

TEST(DocumentRows, ADocumentGoesWhereTheLeastRoomIsLeft) {
  // 6 and 5 open a row each; 3 goes beside 6, where 1 is left, 4 beside 5.
  const std::vector<std::int64_t> ends{6, 11, 14, 18};
  const DocumentRows rows(ends, 10);
  ASSERT_EQ(rows.rows(), 2);
  EXPECT_THAT(rows.row(0), ElementsAre(DocumentPiece{0, 6}, DocumentPiece{11, 3}));
  EXPECT_THAT(rows.row(1), ElementsAre(DocumentPiece{6, 5}, DocumentPiece{14, 4}));
  EXPECT_EQ(rows.empty_places(), 2);
}

TEST(DocumentEnds, AreReadAndHaveToRiseToTheNumberOfTokens) {
  const testing::TemporaryFolder folder;
  const auto write = [&](const std::vector<std::int64_t>& ends) {
    return folder.write("a.docs.bin",
                        {reinterpret_cast<const char*>(ends.data()), ends.size() * 8});
  };
  EXPECT_THAT(read_document_ends(write({3, 4, 9}), 9), ElementsAre(3, 4, 9));
  const auto refusal = [&](const std::filesystem::path& path) {
    return error_of(ErrorKind::kFormat, [&] { read_document_ends(path, 9); });
  };
  EXPECT_THAT(refusal(write({3, 3, 9})), HasSubstr("found the end 3 of document 1 after 3"));
  EXPECT_THAT(refusal(write({0, 9})), HasSubstr("the end 0 of document 0"));
  EXPECT_THAT(refusal(write({3, 10})), HasSubstr("up to the 9 tokens"));
  EXPECT_THAT(refusal(write({3, -1})),
              HasSubstr("found the end 18446744073709551615 of document 1"));
  EXPECT_THAT(refusal(write({3, 8})), HasSubstr("the last document's end 8, expected 9"));
  EXPECT_THAT(refusal(folder.write("a.docs.bin", "1234567")), HasSubstr("found 7 bytes"));
  EXPECT_THAT(refusal(folder.write("a.docs.bin", "")), HasSubstr("found no document for 9 tokens"));
}

}  // namespace
}  // namespace tessera::train::document_rows_test
