#include "train/dry/rank_memory.h"

#include <algorithm>

#include "base/text/printable.h"
#include "grad/enum_words.h"
#include "tessera/error.h"
#include "train/contract_of_run.h"
#include "train/dry/dry_batches.h"

namespace tessera::train {
namespace {

std::string activations_text(const MemoryTable& table) {
  if (table.activations.empty()) return kActivationsUnknown;
  std::string text = concat("  activations of a micro-batch of ", table.rows, " x ",
                            table.positions, " tokens, by activation_checkpoint.mode\n",
                            "    mode             kept      at most     with the above\n");
  for (const auto& [word, mode] : words_of(RecomputeMode{})) {
    const auto& bytes = table.activations.at(mode);
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

RankMemory rank_memory(const DryStep& step) {
  return {.parameters = step.held.shards,
          .gradients = step.held.gradients,
          .moments = step.optimizer.moments,
          .master = step.optimizer.masters,
          .unsharded = step.held.unsharded,
          .reductions = std::max<std::int64_t>(0, step.held.pool - step.held.unsharded)};
}

ActivationBytes activation_bytes(const DryStep& step, const RankMemory& held) {
  ActivationBytes bytes{.peak = std::max<std::int64_t>(0, step.peak - held.total())};
  const std::int64_t before = step.between_steps - step.held.pool;
  for (const DryPass& pass : step.passes) {
    if (pass.is_forward) bytes.kept = std::max(bytes.kept, pass.after - before);
  }
  return bytes;
}

Config stepped_config(const Config& config, const ParallelDims& dims) {
  Config stepped = config;
  auto& training = stepped.training;
  const std::int64_t local = training.local_batch_size.value_or(1);
  // Counts, up to a score for each pair of positions, stay far within 64 bits.
  constexpr std::int64_t kMostPositions = std::int64_t{1} << 23;
  constexpr std::int64_t kMostPairs = std::int64_t{1} << 46;
  const std::int64_t positions = training.seq_len.value_or(1);
  const std::int64_t own = std::max<std::int64_t>(1, positions / dims.cp);
  TESSERA_CHECK(positions <= kMostPositions && local <= kMostPairs / (own * positions),
                ErrorKind::kConfig, "training.seq_len and local_batch_size: found rows of ",
                positions, " tokens and ", local, " of them at once, expected at most ",
                kMostPositions, " tokens and ", kMostPairs,
                " pairs of positions on a rank, as no memory holds more");
  if (training.global_batch_size <= 0) return stepped;
  const std::int64_t ranks = dims.data_ranks();
  const std::int64_t rows = (training.global_batch_size + ranks - 1) / ranks;
  training.local_batch_size = std::min(local, rows);
  const std::int64_t micro_batches = (rows + local - 1) / local;
  training.global_batch_size = micro_batches * *training.local_batch_size * ranks;
  return stepped;
}

Config stepped_config(const Config& config, const ParallelDims& dims, RecomputeMode mode) {
  Config stepped = stepped_config(config, dims);
  stepped.compile = {};
  stepped.activation_checkpoint.mode = mode;
  return stepped;
}

MemoryTable memory_table(const Config& config, const ModelSource& source, const ParallelDims& dims,
                         const DryStep& step, const ExpertLoads& loads) {
  MemoryTable table{.held = rank_memory(step),
                    .mode = config.activation_checkpoint.of_layers(),
                    .rows = stepped_config(config, dims).training.local_batch_size.value_or(1),
                    .positions = config.training.seq_len.value_or(0),
                    .images = images_text(config, source)};
  if (!config.training.seq_len) return table;
  const int rank = busiest_rank(loads, mesh_shape(dims), 0);
  for (const auto& [word, mode] : words_of(RecomputeMode{})) {
    table.activations[mode] =
        mode == table.mode ? activation_bytes(step, table.held)
                           : activation_bytes(dry_step(stepped_config(config, dims, mode), source,
                                                       rank, dims.world_size(), {.loads = loads}),
                                              table.held);
  }
  return table;
}

std::string table_line(std::string_view what, std::int64_t bytes, std::string_view why) {
  std::string text = concat("  ", what);
  text.resize(std::max<std::size_t>(text.size(), 24), ' ');
  const std::string size = size_text(bytes);
  text += std::string(size.size() < 10 ? 10 - size.size() : 0, ' ') + size;
  return text + (why.empty() ? "" : concat("  ", why)) + "\n";
}

std::string kernels_line(KernelsOf device) {
  return device == KernelsOf::kCpu ? "  forecast for CPU kernels\n"
                                   : "  forecast for kernels of cuda; their work space, cuBLAS "
                                     "and NCCL take some besides\n";
}

std::string to_string(const MemoryTable& table) {
  const RankMemory& held = table.held;
  std::string text =
      concat("memory of a rank (of the one that needs most)\n", kernels_line(table.computes_on));
  text += table_line("parameters", held.parameters, "stored shards");
  text += table_line("gradients", held.gradients, "sums on the shards");
  text += table_line("moments", held.moments, "of the optimizer");
  text += table_line("master", held.master, "next to 16-bit shards");
  text += table_line("unsharded peak", held.unsharded, "units gathered at once");
  text += table_line("reductions", held.reductions, "gradients on their way, and blocks on hand");
  text += table_line("all of these", held.total(), "");
  if (!table.images.empty()) text += concat("  ", table.images, "\n");
  return text + activations_text(table);
}

}  // namespace tessera::train
