// What a step takes of a rank's memory, worked out from contracts, plan and configuration for any
// number of ranks: the table in `inspect --contract`, as a value.
//
// Pure: nobody is started and nothing is allocated. Not counted: the program and libtorch, the
// batch, messages on their way between processes, and while a backward computes the gradients of
// activations. docs/performance.md has the formulas; tests/unit/train/memory_table_test.cpp counts
// the bytes of real runs. Next: ../models/keeps/kept_activations.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "layout/model_plan.h"
#include "layout/parallel_dims.h"
#include "models/keeps/kept_activations.h"
#include "models/model_spec.h"
#include "tessera/mesh_shape.h"
#include "tessera/model_contract.h"
#include "train/config/config.h"

namespace tessera::train {

/// What is there whatever the batch is, in bytes of one rank.
struct RankMemory {
  std::int64_t parameters = 0;  ///< the shards as they are stored, frozen ones too
  std::int64_t gradients = 0;   ///< what is summed and what the optimizer reads
  std::int64_t moments = 0;
  std::int64_t master = 0;  ///< beside 16-bit shards
  /// The most unsharded parameters at once: the root's, and those of a unit and of the one that
  /// follows it; all where nothing is given back after forward.
  std::int64_t unsharded = 0;
  /// The most that gradients take on their way from backward to the shards.
  std::int64_t reductions = 0;
  /// The largest that a layer gives for one parameter, in its compute dtype, until it is added.
  std::int64_t raw_gradient = 0;
  std::int64_t total() const {
    return parameters + gradients + moments + master + unsharded + reductions + raw_gradient;
  }
  bool operator==(const RankMemory&) const = default;
};

/// Whether units give their parameters back after forward.
enum class Reshard : std::uint8_t { kYes, kNo };

/// What it follows from, beside contracts and plan.
struct RankMemoryOptions {
  int states = 2;  ///< tensors that the optimizer keeps of each parameter
  Reshard reshard = Reshard::kYes;
  bool scales_loss = false;
  /// Several micro-batches without a reduction between them: gradients wait unsharded.
  bool defers_reductions = false;
  std::int64_t in_flight_bytes = std::int64_t{32} << 20;  ///< as ShardOptions has it on the CPU
};

RankMemoryOptions rank_memory_options(const Config& config, const ParallelDims& dims,
                                      const ModelContract& contract);

/// `contracts` and `plan` as resolve_model and plan_model give them for the mesh. Ranks differ by
/// the gaps between parameters alone; without a `rank` it is no less than any needs.
RankMemory rank_memory(const std::vector<GradContract>& contracts, const layout::ModelPlan& plan,
                       const RankMemoryOptions& options, std::optional<int> rank = std::nullopt);

/// One micro-batch of a rank with most rows, as a forward; training.seq_len is known. References
/// its arguments, which have to outlive it.
models::ForwardCase forward_case(const Config& config, const models::ModelSpec& spec,
                                 const ParallelDims& dims, const ModelContract& contract,
                                 double aux_loss_coef);

/// The device of a run. Forecasts are of CPU kernels on either.
enum class ComputesOn : std::uint8_t { kCpu, kCuda };
/// The line of a table that names the kernels of its forecast.
std::string kernels_line(ComputesOn device);

struct MemoryTable {
  RankMemory held = {};
  /// None where training.seq_len is not known yet.
  std::optional<models::KeptActivations> activations = std::nullopt;
  RecomputeMode mode = RecomputeMode::kNone;  ///< what the configuration asks for
  std::int64_t rows = 1;                      ///< of a micro-batch
  std::int64_t positions = 0;
  std::int64_t micro_batches = 1;
  ComputesOn computes_on = ComputesOn::kCpu;
  std::int64_t total(RecomputeMode of) const {
    return held.total() + (activations ? activations->in(of).peak : 0);
  }
};

/// `aux_loss_coef` as expert_balance.h has it.
MemoryTable memory_table(const Config& config, const models::ModelSpec& spec,
                         const ParallelDims& dims, const ModelContract& contract,
                         const layout::ModelPlan& plan, double aux_loss_coef);

/// "  gathers                   1.5 GiB  parameters", bytes as size_text().
std::string table_line(std::string_view what, std::int64_t bytes, std::string_view why);
/// The line of a table that does not know them.
inline constexpr auto kActivationsUnknown =
    "  activations: set training.seq_len to know what they take\n";
/// A line a row, bytes as size_text().
std::string to_string(const MemoryTable& table);

}  // namespace tessera::train
