#include "train/data/document_rows.h"

#include <algorithm>
#include <bit>
#include <map>
#include <utility>

#include "base/mapped_file.h"
#include "tessera/error.h"

namespace tessera::train {
namespace {

static_assert(std::endian::native == std::endian::little, "ends are read as they lie");

using Pieces = std::vector<DocumentPiece>;

/// Rows under way, by the room that is left in them and, of as much room, by when they were opened.
class OpenRows {
 public:
  explicit OpenRows(std::int64_t row_tokens) : row_tokens_(row_tokens) {}

  /// Where a new row needs the place of another, that one's pieces; else nothing.
  Pieces add(DocumentPiece piece) {
    Pieces closed;
    auto at = rows_.lower_bound({piece.count, 0});
    std::pair<Room, Pieces> row{{row_tokens_, opened_}, {}};
    if (at != rows_.end()) {
      row = {at->first, std::move(at->second)};
      rows_.erase(at);
    } else {
      ++opened_;
      if (rows_.size() == DocumentRows::kOpenRows) closed = take_fullest();
    }
    row.first.left -= piece.count;
    row.second.push_back(piece);
    rows_.insert(std::move(row));
    return closed;
  }

  bool empty() const { return rows_.empty(); }

  Pieces take_fullest() {
    Pieces pieces = std::move(rows_.begin()->second);
    rows_.erase(rows_.begin());
    return pieces;
  }

 private:
  struct Room {
    std::int64_t left;
    std::int64_t opened;
    auto operator<=>(const Room&) const = default;
  };

  std::int64_t row_tokens_;
  std::int64_t opened_ = 0;
  std::map<Room, Pieces> rows_;
};

}  // namespace

std::vector<std::int64_t> read_document_ends(const std::filesystem::path& path,
                                             std::int64_t num_tokens) {
  constexpr std::int64_t kEndBytes = sizeof(std::int64_t);
  const InputFile file(path);
  TESSERA_CHECK(file.size_bytes() > 0, ErrorKind::kFormat, path.native(),
                ": found no document for ", num_tokens, " tokens, expected at least one end");
  TESSERA_CHECK(file.size_bytes() % kEndBytes == 0, ErrorKind::kFormat, path.native(), ": found ",
                file.size_bytes(), " bytes, expected ", kEndBytes, " for each document");
  std::vector<std::int64_t> ends(static_cast<std::size_t>(file.size_bytes() / kEndBytes));
  file.read_range(0, std::as_writable_bytes(std::span(ends)));
  std::int64_t before = 0;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    TESSERA_CHECK(ends[i] > before && ends[i] <= num_tokens, ErrorKind::kFormat, path.native(),
                  ": found the end ", static_cast<std::uint64_t>(ends[i]), " of document ", i,
                  " after ", before, ", expected a larger one, up to the ", num_tokens,
                  " tokens next to it");
    before = ends[i];
  }
  TESSERA_CHECK(before == num_tokens, ErrorKind::kFormat, path.native(),
                ": found the last document's end ", before, ", expected ", num_tokens,
                ", the tokens next to it");
  return ends;
}

DocumentRows::DocumentRows(std::span<const std::int64_t> ends, std::int64_t row_tokens) {
  TESSERA_INVARIANT(row_tokens >= 1, "rows without a token");
  documents_ = static_cast<std::int64_t>(ends.size());
  OpenRows open(row_tokens);
  const auto close = [&](const Pieces& pieces) {
    if (pieces.empty()) return;
    pieces_.insert(pieces_.end(), pieces.begin(), pieces.end());
    row_ends_.push_back(static_cast<std::int64_t>(pieces_.size()));
    empty_places_ += row_tokens;
    for (const DocumentPiece& piece : pieces) empty_places_ -= piece.count;
  };
  std::int64_t begin = 0;
  for (const std::int64_t end : ends) {
    TESSERA_INVARIANT(end > begin, "a document without a token");
    if (end - begin > row_tokens) ++cut_documents_;
    while (begin < end) {
      const std::int64_t count = std::min(row_tokens, end - begin);
      close(open.add({begin, count}));
      begin += count;
    }
  }
  while (!open.empty()) close(open.take_fullest());
}

std::span<const DocumentPiece> DocumentRows::row(std::int64_t row) const {
  TESSERA_INVARIANT(row >= 0 && row < rows(), "no such row of documents");
  const auto at = static_cast<std::size_t>(row);
  const auto first = static_cast<std::size_t>(at == 0 ? 0 : row_ends_[at - 1]);
  return std::span(pieces_).subspan(first, static_cast<std::size_t>(row_ends_[at]) - first);
}

}  // namespace tessera::train
