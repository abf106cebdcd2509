// The files of a source as one row of tokens, and where documents end in it. Pure. Next:
// ../../io/token_source.h, document_rows.h.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "io/token_source.h"
#include "train/config/config_resolve.h"

namespace tessera::train {

struct SourceTokens {
  std::unique_ptr<TokenSource> tokens;
  /// Rising. Of all documents, the last one num_tokens, where that was asked; else of some.
  std::vector<std::int64_t> document_ends;
};

/// `source` has no patterns. has_documents: of NAME.bin by NAME.docs.bin, of text by its files.
/// Reads no token. Errors: kIo for what cannot be read, kConfig for text where the model has a
/// tokenizer of its own (`reads_bytes` is false), kFormat for what is malformed or has no borders.
SourceTokens open_source_tokens(const NamedSource& source, bool reads_bytes, bool has_documents);

}  // namespace tessera::train
