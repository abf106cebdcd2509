// Weights of a sharded model: read from a Hugging Face folder or drawn, each rank only the ranges
// that it owns.
#pragma once

#include <cstdint>
#include <vector>

#include "io/hf_folder.h"
#include "models/parameter_table.h"
#include "tessera/shard.h"

namespace tessera::train {

/// That the folder holds the tensors of the table and no others. Errors: kFormat for a tensor that
/// is missing, has another shape, or that the model does not have.
void check_tensors(const HfFolder& folder, const std::vector<models::ParameterSpec>& table);

/// Copies the owned range of every parameter out of the mapped files and gives the pages back; the
/// folder passed check_tensors. Not collective.
void load_weights(const ShardedBase& model, const HfFolder& folder);

/// Element i of parameter p depends on (seed, p, i) only: drawn in fp32, then cast. Not collective.
void draw_weights(const ShardedBase& model, const std::vector<models::ParameterSpec>& table,
                  std::uint64_t seed);

}  // namespace tessera::train
