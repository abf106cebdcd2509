// Whole documents in rows: which of them stand together in a row, so that little of it stays empty.
// Pure.
//
// A plan follows from the documents' lengths and the row's alone: no seed, no rank. Documents are
// taken in their order, and each goes where the least room is left behind it among the rows that
// are open; kOpenRows of them are, and the fullest is closed for a new one. All rows but one are
// more than half full. A document longer than a row is cut into whole rows and a rest, which is
// packed as a document. Order and epochs of the rows are RowOrder's. Source: best fit with bounded
// space (Csirik, Johnson, "Bounded space on-line bin packing: best is better than first", SODA
// 1991).
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

namespace tessera::train {

/// Where documents end in a NAME.bin of `num_tokens`, in their order: NAME.docs.bin next to it, as
/// little-endian uint64. Errors: kIo; kFormat where they do not rise from above 0 to `num_tokens`.
std::vector<std::int64_t> read_document_ends(const std::filesystem::path& path,
                                             std::int64_t num_tokens);

/// A document, or a part of one that was cut.
struct DocumentPiece {
  std::int64_t begin = 0;  ///< token in the data
  std::int64_t count = 0;
  bool operator==(const DocumentPiece&) const = default;
};

class DocumentRows {
 public:
  static constexpr std::size_t kOpenRows = 64;

  /// ends: of the documents, rising from above 0 (read_document_ends). row_tokens: of a row, at
  /// least 1: training.seq_len + 1.
  DocumentRows(std::span<const std::int64_t> ends, std::int64_t row_tokens);

  std::int64_t rows() const { return static_cast<std::int64_t>(row_ends_.size()); }
  /// In the order of the data; together at most row_tokens. Errors: kInternal outside 0..rows() -
  /// 1.
  std::span<const DocumentPiece> row(std::int64_t row) const;

  std::int64_t documents() const { return documents_; }
  /// Documents longer than a row.
  std::int64_t cut_documents() const { return cut_documents_; }
  /// Places of all rows that hold no token.
  std::int64_t empty_places() const { return empty_places_; }

 private:
  std::vector<DocumentPiece> pieces_;   // row after row
  std::vector<std::int64_t> row_ends_;  // in pieces_
  std::int64_t documents_ = 0;
  std::int64_t cut_documents_ = 0;
  std::int64_t empty_places_ = 0;
};

}  // namespace tessera::train
