#include "train/rank_memory.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text/printable.h"
#include "grad/enum_words.h"
#include "tessera/error.h"

namespace tessera::train {
namespace {

using layout::BucketPlan;
using layout::PlannedUnit;

std::int64_t slots_bytes(const BucketPlan& bucket) {
  return bucket.key.trainable && bucket.ranks > 1 ? bucket.numel * size_of(bucket.key.accumulate)
                                                  : 0;
}

/// One rank that computes in the storage dtype has its shard for it.
std::int64_t unsharded_bytes(const BucketPlan& bucket) {
  const bool aliases = bucket.ranks == 1 && bucket.key.storage == bucket.key.compute;
  return aliases ? 0 : layout::gathered_bytes(bucket);
}

template <class Bytes>
std::int64_t of_unit(const PlannedUnit& unit, const Bytes& bytes) {
  std::int64_t sum = 0;
  for (const BucketPlan& bucket : unit.plan.buckets) sum += bytes(bucket);
  return sum;
}

std::int64_t most_unsharded(const layout::ModelPlan& plan, Reshard reshard) {
  std::int64_t root = of_unit(plan.units.front(), unsharded_bytes);
  std::int64_t pairs = 0;
  std::int64_t all = 0;
  std::int64_t before = 0;
  for (std::size_t u = 1; u < plan.units.size(); ++u) {
    const std::int64_t bytes = of_unit(plan.units[u], unsharded_bytes);
    pairs = std::max(pairs, before + bytes);
    all += bytes;
    before = bytes;
  }
  return root + (reshard == Reshard::kYes ? pairs : all);
}

/// Slots of the root, of the unit whose backward computes, wires of those before it up to the
/// budget, and the memory that a reduction receives into.
std::int64_t most_reduced(const layout::ModelPlan& plan, const RankMemoryOptions& options) {
  const auto wire = [](const BucketPlan& bucket) {
    return bucket.ranks > 1 ? layout::reduced_bytes(bucket) : 0;
  };
  std::int64_t slots = 0, widest_slots = 0, wires = 0, widest_wire = 0, received = 0;
  for (const PlannedUnit& unit : plan.units) {
    const std::int64_t own = of_unit(unit, slots_bytes);
    const std::int64_t sent = of_unit(unit, wire);
    slots += own;
    if (&unit != &plan.units.front()) widest_slots = std::max(widest_slots, own);
    wires += sent;
    widest_wire = std::max(widest_wire, sent);
    for (const BucketPlan& bucket : unit.plan.buckets) {
      received = std::max(received, layout::sent_bytes(wire(bucket), bucket.ranks));
    }
  }
  const std::int64_t under_way = std::min(wires, std::max(options.in_flight_bytes, widest_wire));
  const std::int64_t arriving = of_unit(plan.units.front(), slots_bytes) + widest_slots;
  return (options.defers_reductions ? slots : std::min(slots, arriving + under_way)) + received;
}

using ByName = std::map<std::string_view, const GradContract*>;

ByName by_name(const std::vector<GradContract>& contracts) {
  ByName found;
  for (const GradContract& contract : contracts) found.emplace(contract.name, &contract);
  return found;
}

std::int64_t master_bytes(Master master) {
  switch (master) {
    case Master::kRemainder:
      return 2;
    case Master::kCopy:
      return 4;
    case Master::kNone:
    case Master::kStorage:
      break;
  }
  return 0;
}

/// What an optimizer keeps for the elements that a rank owns: gaps between parameters have none.
struct Kept {
  std::int64_t moments = 0;
  std::int64_t master = 0;
  std::int64_t total() const { return moments + master; }
};

/// By axes, for each place among the ranks that share buckets over them.
using KeptByPlace = std::map<std::vector<std::string>, std::vector<Kept>>;

void add_bucket(KeptByPlace& kept, const PlannedUnit& unit, const BucketPlan& bucket,
                const ByName& contracts, const RankMemoryOptions& options) {
  auto& places = kept[bucket.key.reductions.shard_axes];
  places.resize(static_cast<std::size_t>(bucket.ranks));
  for (const layout::Placed& placed : bucket.parameters) {
    if (placed.numel == 0) continue;
    const GradContract& contract = *contracts.at(unit.items.at(placed.parameter).name);
    const std::int64_t slice = bucket.slice_numel();
    const std::int64_t last = (placed.offset + placed.numel - 1) / slice;
    for (std::int64_t place = placed.offset / slice; place <= last; ++place) {
      const std::int64_t numel = bucket.owned(placed, static_cast<int>(place)).size();
      Kept& of = places.at(static_cast<std::size_t>(place));
      of.moments += options.states * numel * size_of(contract.state);
      of.master += numel * master_bytes(contract.master);
    }
  }
}

const Kept& kept_at(const KeptByPlace::value_type& each, const MeshShapes& mesh,
                    std::optional<int> rank) {
  const auto& [axes, places] = each;
  if (!rank) return *std::ranges::max_element(places, {}, &Kept::total);
  if (places.size() == 1) return places.front();
  const auto members = mesh.ranks_of(*rank, {axes.begin(), axes.end()});
  return places.at(static_cast<std::size_t>(std::ranges::find(members, *rank) - members.begin()));
}

/// The shard's accumulator, the sum over replicas, and the final gradient where it is neither.
std::int64_t gradient_bytes(const BucketPlan& bucket, bool replicas, bool scales_loss) {
  const layout::BucketKey& key = bucket.key;
  if (!key.trainable) return 0;
  const bool same = key.final == key.accumulate;
  const bool divides = scales_loss || key.reductions.divide_factor != 1.0;
  std::int64_t bytes = size_of(key.accumulate) * (replicas ? 2 : 1);
  if (!same || (divides && !replicas)) bytes += size_of(key.final);
  return bucket.slice_numel() * bytes;
}

struct StepOfRank {
  std::int64_t rows = 1;  ///< of a micro-batch
  std::int64_t micro_batches = 1;
};

/// Of the rank with most rows. A world that the batch does not divide over is refused by `train`
/// alone: here it may still be asked about.
StepOfRank step_of_rank(const TrainingConfig& training, std::int64_t data_ranks) {
  const std::int64_t local = training.local_batch_size.value_or(1);
  // What is counted, up to a score for each pair of positions, stays far within 64 bits.
  constexpr std::int64_t kMostPositions = std::int64_t{1} << 23;
  constexpr std::int64_t kMostPairs = std::int64_t{1} << 46;
  const std::int64_t positions = training.seq_len.value_or(1);
  TESSERA_CHECK(positions <= kMostPositions && local <= kMostPairs / (positions * positions),
                ErrorKind::kConfig, "training.seq_len and local_batch_size: found rows of ",
                positions, " tokens and ", local, " of them at once, expected at most ",
                kMostPositions, " tokens and ", kMostPairs,
                " pairs of positions, as no memory holds more");
  if (training.global_batch_size <= 0) return {local, 1};
  const std::int64_t rows = (training.global_batch_size + data_ranks - 1) / data_ranks;
  return {std::min(local, rows), (rows + local - 1) / local};
}

std::string activations_text(const MemoryTable& table) {
  if (!table.activations) return kActivationsUnknown;
  std::string text = concat("  activations of a micro-batch of ", table.rows, " x ",
                            table.positions, " tokens, by activation_checkpoint.mode\n",
                            "    mode             kept  a layer again     with the above\n");
  for (const auto& [word, mode] : words_of(RecomputeMode{})) {
    const auto& bytes = table.activations->in(mode);
    std::string row = concat("    ", word);
    const auto cell = [&](std::int64_t value, std::size_t end) {
      const std::string size = size_text(value);
      row.resize(std::max(row.size() + 1, end - size.size()), ' ');
      row += size;
    };
    cell(bytes.kept, 24);
    cell(bytes.peak, 38);
    cell(table.total(mode), 56);
    text += row + (mode == table.mode ? "  <- this configuration\n" : "\n");
  }
  return text;
}

}  // namespace

RankMemory rank_memory(const std::vector<GradContract>& contracts, const layout::ModelPlan& plan,
                       const RankMemoryOptions& options, std::optional<int> rank) {
  const ByName named = by_name(contracts);
  const bool replicas = plan.options.mesh.size_of(axis::kReplicate) > 1;
  RankMemory memory;
  KeptByPlace kept;
  for (const PlannedUnit& unit : plan.units) {
    for (const BucketPlan& bucket : unit.plan.buckets) {
      memory.parameters += layout::shard_bytes(bucket);
      memory.gradients += gradient_bytes(bucket, replicas, options.scales_loss);
      if (bucket.key.trainable) add_bucket(kept, unit, bucket, named, options);
    }
  }
  for (const GradContract& contract : contracts) {
    if (!contract.trainable) continue;
    memory.raw_gradient =
        std::max(memory.raw_gradient, contract.compute.payload_bytes(contract.local_numel()));
  }
  for (const auto& each : kept) {
    const Kept& own = kept_at(each, plan.options.mesh, rank);
    memory.moments += own.moments;
    memory.master += own.master;
  }
  memory.unsharded = most_unsharded(plan, options.reshard);
  memory.reductions = most_reduced(plan, options);
  return memory;
}

RankMemoryOptions rank_memory_options(const Config& config, const ParallelDims& dims,
                                      const ModelContract& contract) {
  RankMemoryOptions options;
  options.states = fsdp::kept_states(config.optimizer.name, config.optimizer);
  if (!config.parallelism.reshard_after_forward) options.reshard = Reshard::kNo;
  options.scales_loss = std::ranges::any_of(contract.parameters, [](const auto& each) {
    return each.compute.dtype == DType::kFloat16 ||
           (each.trainable && each.reduce == DType::kFloat16);
  });
  const StepOfRank step = step_of_rank(config.training, dims.data_ranks());
  options.defers_reductions = step.micro_batches > 1 && !config.training.sync_every_micro_batch;
  return options;
}

models::ForwardCase forward_case(const Config& config, const models::ModelSpec& spec,
                                 const ParallelDims& dims, const ModelContract& contract,
                                 double aux_loss_coef) {
  return {.spec = spec,
          .degrees = dims,
          .parameters = contract.parameters,
          .rows = step_of_rank(config.training, dims.data_ranks()).rows,
          .positions = config.training.seq_len.value(),
          .score_before_experts = config.model.score_before_experts,
          .router_probabilities = aux_loss_coef > 0,
          .activation_reduce = config.precision.activation_reduce_dtype.dtype};
}

MemoryTable memory_table(const Config& config, const models::ModelSpec& spec,
                         const ParallelDims& dims, const ModelContract& contract,
                         const layout::ModelPlan& plan, double aux_loss_coef) {
  const StepOfRank step = step_of_rank(config.training, dims.data_ranks());
  MemoryTable table{.mode = config.activation_checkpoint.of_layers(),
                    .rows = step.rows,
                    .positions = config.training.seq_len.value_or(0),
                    .micro_batches = step.micro_batches};
  table.held = rank_memory(contract.parameters, plan, rank_memory_options(config, dims, contract));
  if (!config.training.seq_len) return table;
  table.activations =
      models::kept_activations(forward_case(config, spec, dims, contract, aux_loss_coef));
  return table;
}

std::string table_line(std::string_view what, std::int64_t bytes, std::string_view why) {
  std::string text = concat("  ", what);
  text.resize(std::max<std::size_t>(text.size(), 24), ' ');
  const std::string size = size_text(bytes);
  text += std::string(size.size() < 10 ? 10 - size.size() : 0, ' ') + size;
  return text + (why.empty() ? "" : concat("  ", why)) + "\n";
}

std::string kernels_line(ComputesOn device) {
  return concat("  forecast for CPU kernels",
                device == ComputesOn::kCpu
                    ? "\n"
                    : ": those of cuda keep other activations, and take work space besides\n");
}

std::string to_string(const MemoryTable& table) {
  const RankMemory& held = table.held;
  std::string text =
      concat("memory of a rank (of the one that needs most)\n", kernels_line(table.computes_on));
  text += table_line("parameters", held.parameters, "stored shards");
  text += table_line("gradients", held.gradients, "sums on the shards");
  text += table_line("moments", held.moments, "of the optimizer");
  text += table_line("master", held.master, "beside 16-bit shards");
  text += table_line("unsharded peak", held.unsharded, "units gathered at once");
  text += table_line("reductions", held.reductions, "gradients on their way, at most");
  text +=
      table_line("raw gradient", held.raw_gradient, "of the largest parameter, until it is added");
  text += table_line("all of these", held.total(), "");
  return text + activations_text(table);
}

}  // namespace tessera::train
