// A batch as the layers of a context region take it: the positions of this rank, with documents that
// stay those of whole rows.
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

/// The cut of the batch's rows over the ranks: the one that it brings, else head and tail. Null where
/// the region does not cut rows. Errors: kFormat for rows that cannot be cut, or another cut than the
/// region's ranks have.
std::shared_ptr<const nn::ContextRows> context_rows(const ModelInputs& batch,
                                                    const nn::ContextRegion& region);

/// ids, targets, routing and fillers of own positions; `rows` may be null. Token types and images
/// stay as they are. Errors: kFormat for routing of another number of tokens.
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
