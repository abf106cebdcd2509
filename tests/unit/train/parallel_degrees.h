// The degrees that a case of a test names, in its config.
#pragma once

#include "train/config/config.h"

namespace tessera::train {

/// `of` has replicate, shard, tp, ep, etp, sequence and router; it may have cp and its form, by the
/// name context_form or form.
template <class Degrees>
void set_parallelism(Config& config, const Degrees& of) {
  auto& parallelism = config.parallelism;
  parallelism.data_parallel_replicate_degree = of.replicate;
  parallelism.data_parallel_shard_degree = of.shard;
  parallelism.tensor_parallel_degree = of.tp;
  parallelism.expert_parallel_degree = of.ep;
  parallelism.expert_tensor_parallel_degree = of.etp;
  parallelism.sequence_parallel = of.sequence;
  parallelism.moe_router = of.router;
  if constexpr (requires { of.cp; }) {
    parallelism.context_parallel_degree = of.cp;
    if constexpr (requires { of.context_form; }) {
      parallelism.context_parallel_form = of.context_form;
    } else {
      parallelism.context_parallel_form = of.form;
    }
  }
}

inline void set_parallelism(Config& config, const ParallelDims& dims) {
  struct {
    int replicate, shard, tp, ep, etp;
    bool sequence;
    RouterTokens router;
  } const of{dims.dp_replicate, dims.dp_shard, dims.tp,
             dims.ep,           dims.etp,      dims.sequence == SequenceParallel::kYes,
             dims.router};
  set_parallelism(config, of);
  config.parallelism.context_parallel_degree = dims.cp;
  config.parallelism.context_parallel_form = dims.context_form;
  config.parallelism.context_parallel_parts = dims.context_parts;
}

}  // namespace tessera::train
