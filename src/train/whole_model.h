// A model that is not sharded, for one process that only runs it forward.
//
// Every parameter is in the compute dtype of its contract, so that what comes out is what any
// layout computes. No handle on a world of one: that keeps shards in the storage dtype beside what
// is computed with, in bfloat16 of a float32 folder three times these bytes. Next: generate.h.
#pragma once

#include <memory>
#include <vector>

#include "models/decoder.h"
#include "tessera/contract.h"
#include "train/parallelize.h"

namespace tessera::train {

/// `source` has a folder; `contracts` are resolve_model's. The parameters require no gradient.
/// A checkpoint's files are verified before. Errors: kFormat naming the file; kIo.
std::shared_ptr<models::Decoder> load_whole_model(const ModelSource& source,
                                                  const std::vector<GradContract>& contracts);

}  // namespace tessera::train
