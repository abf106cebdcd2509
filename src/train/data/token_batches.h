// Batches of rows of tokens, out of one source or several: each row whole documents, or a range of
// seq_len + 1 tokens.
//
// Which tokens a row has follows from the row's number alone (sampler.h, document_rows.h), which
// rows a step has from its number (source_draw.h). Next: source_tokens.h.
#pragma once

#include <memory>

#include "train/data/data.h"

namespace tessera::train {

/// Opens text and NAME.bin. Errors: as open_batches.
std::unique_ptr<BatchSource> open_token_batches(const BatchRequest& request);

}  // namespace tessera::train
