// The memory that a step takes on a rank, counted in dry steps for any number of ranks: the table
// in `inspect --contract`, as a value.
//
// The table is of rank 0, whose parts are the largest but for the gaps between parameters, or by
// given loads of the rank whose experts are busiest. Not counted: the program and libtorch, and
// messages on their way between processes. docs/performance.md says what the lines depend on;
// tests/unit/train/memory_table_test.cpp counts the bytes of real runs. Next: dry_step.h.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "layout/parallel_dims.h"
#include "tessera/kernels_of.h"
#include "tessera/recompute_mode.h"
#include "train/config/config.h"
#include "train/dry/dry_step.h"
#include "train/hf/model_source.h"

namespace tessera::train {

/// Memory that does not depend on the batch, in bytes of one rank.
struct RankMemory {
  std::int64_t parameters = 0;  ///< the shards as they are stored, frozen ones too
  std::int64_t gradients = 0;   ///< what is summed and what the optimizer reads
  std::int64_t moments = 0;
  std::int64_t master = 0;     ///< next to 16-bit shards
  std::int64_t unsharded = 0;  ///< the most gathered parameters at once
  std::int64_t reductions =
      0;  ///< all other blocks of the pool: gradients on their way, blocks on hand
  std::int64_t total() const {
    return parameters + gradients + moments + master + unsharded + reductions;
  }
  bool operator==(const RankMemory&) const = default;
};
RankMemory rank_memory(const DryStep& step);

/// Activations, their gradients, raw gradients of parameters, memory of an operation.
struct ActivationBytes {
  std::int64_t kept = 0;  ///< by autograd, when a forward has ended
  std::int64_t peak = 0;  ///< the most of a step
};
/// `held`: what the table counts apart.
ActivationBytes activation_bytes(const DryStep& step, const RankMemory& held);

/// The line of a table that names the kernels of its forecast.
std::string kernels_line(KernelsOf device);

struct MemoryTable {
  RankMemory held = {};
  std::map<RecomputeMode, ActivationBytes> activations = {};  ///< empty without training.seq_len
  RecomputeMode mode = RecomputeMode::kNone;                  ///< what the configuration asks for
  std::int64_t rows = 1;                                      ///< of a micro-batch
  std::int64_t positions = 0;
  KernelsOf computes_on = KernelsOf::kCpu;
  std::string images = {};  ///< images_text()
  std::int64_t total(RecomputeMode of) const {
    const auto found = activations.find(of);
    return held.total() + (found == activations.end() ? 0 : found->second.peak);
  }
};

/// The configuration that a rank with most rows steps: a world that the batch does not divide over
/// is refused by `train` alone. Errors: kConfig for rows that no memory holds.
Config stepped_config(const Config& config, const ParallelDims& dims);
/// The same with each layer recomputed in `mode`, without a plan that would choose.
Config stepped_config(const Config& config, const ParallelDims& dims, RecomputeMode mode);

/// `step`: of the busiest_rank() of rank 0 in stepped_config(); the other modes of recomputation
/// are stepped here.
MemoryTable memory_table(const Config& config, const ModelSource& source, const ParallelDims& dims,
                         const DryStep& step, const ExpertLoads& loads = {});

/// "  gathers                   1.5 GiB  parameters", bytes as size_text().
std::string table_line(std::string_view what, std::int64_t bytes, std::string_view why);
/// The line of a table that does not know them.
inline constexpr auto kActivationsUnknown =
    "  activations: set training.seq_len to know what they take\n";
/// A line a row, bytes as size_text().
std::string to_string(const MemoryTable& table);

}  // namespace tessera::train
