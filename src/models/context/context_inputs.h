// A batch as the layers of a context region take it: the positions of this rank, with documents
// that stay those of whole rows.
//
// Every rank of the region is given the same whole rows, so that what is a property of a row
// (documents, images, shifted targets) is computed before the cut. Next: ../nn/context_region.h,
// context_work.h.
#pragma once

#include <optional>

#include "base/random.h"
#include "models/language_model.h"
#include "nn/context_region.h"

namespace tessera::models {

/// Returns the positions of this rank by the cut that the batch brings, else by head and tail; null
/// where the region does not cut rows. Errors: kConfig for rows that cannot be cut; kFormat for a
/// cut of rows of another length or for another number of ranks.
std::shared_ptr<const nn::ContextRows> context_rows(const ModelInputs& batch,
                                                    const nn::ContextRegion& region);

/// Returns the batch with ids, targets, routing and fillers of own positions; `rows` may be null.
/// Token types and images stay those of whole rows. Errors: kFormat for routing of another number
/// of tokens.
ModelInputs own_inputs(const ModelInputs& batch, std::shared_ptr<const nn::ContextRows> rows);

/// While it lives, dropout (base/random.h) is keyed by the places that own positions have in their
/// rows.
class ContextSamples {
 public:
  explicit ContextSamples(const nn::Documents& documents);

 private:
  std::optional<SampleScope> scope_;
};

}  // namespace tessera::models
