// Where the weights of experts lie: over the ranks that share the experts of a layer (ep), and over
// those that share the inner size of each (etp).
//
// Next: ../nn/tensor_region.h for the layers around them.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/placement.h"

namespace tessera::moe {

struct ExpertShare {
  int ep = 1;
  int etp = 1;
  int tp = 1;  ///< of the layers around; experts that are not cut over it see a part of the tokens
};

/// A weight whose inner size is dim `inner_dim` of `cut_shape`, or of the weight's own shape where
/// that is empty.
ParameterLayout expert_layout(const ExpertShare& share, int inner_dim,
                              std::vector<std::int64_t> cut_shape = {});
/// What is added to an expert's result: whole on every rank that shares the expert, added by one.
ParameterLayout expert_sum_layout(const ExpertShare& share);

}  // namespace tessera::moe
