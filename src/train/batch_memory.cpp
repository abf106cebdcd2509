#include "train/batch_memory.h"

#include <algorithm>
#include <charconv>
#include <new>
#include <optional>
#include <sstream>
#include <string_view>

#include "base/one_line.h"
#include "tessera/error.h"

namespace tessera::train {
namespace {

constexpr double kIdsOfToken = 2 * sizeof(std::int64_t);  // inputs and targets

double gib(double bytes) { return bytes / (1024.0 * 1024.0 * 1024.0); }

/// 0 for the embedding, n + 1 for layer n of the text; none for what else there is.
std::optional<std::int64_t> depth_of(std::string_view parameter) {
  for (const std::string_view model : {"model.language_model.", "model."}) {
    if (!parameter.starts_with(model)) continue;
    const std::string_view path = parameter.substr(model.size());
    if (path == "embed_tokens.weight") return 0;
    constexpr std::string_view kLayers = "layers.";
    if (!path.starts_with(kLayers)) continue;
    std::int64_t number = 0;
    const std::string_view rest = path.substr(kLayers.size());
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), number);
    if (error == std::errc()) return number + 1;
  }
  return std::nullopt;
}

/// The first layer whose input wants a gradient: the one behind the first thing that is trained.
/// All after it do, and the head.
std::optional<std::int64_t> first_with_gradient(const std::vector<GradContract>& parameters) {
  std::optional<std::int64_t> first;
  for (const GradContract& parameter : parameters) {
    const auto depth = parameter.trainable ? depth_of(parameter.name) : std::nullopt;
    if (depth && (!first || *depth < *first)) first = depth;
  }
  return first;
}

double narrowest_compute(const std::vector<GradContract>& parameters) {
  std::int64_t bytes = size_of(DType::kFloat64);
  for (const GradContract& parameter : parameters) {
    if (is_floating(parameter.compute.dtype)) {
      bytes = std::min(bytes, size_of(parameter.compute.dtype));
    }
  }
  return static_cast<double>(bytes);
}

/// Elements of the tokens between layers.
double stream_of(const models::ModelSpec& spec, const ForwardForm& form) {
  return static_cast<double>(spec.hidden_size) /
         (form.sequence_parallel ? static_cast<double>(form.tensor_ranks) : 1.0);
}

/// Elements that a layer saves of a token.
double kept_of_layer(const models::ModelSpec& spec, std::int64_t number, const ForwardForm& form) {
  const double ranks = form.tensor_ranks;
  // Recomputed or not: the input, of a checkpoint or of the first norm.
  double kept = stream_of(spec, form);
  if (form.recompute == RecomputeMode::kFull || spec.gemma4) return kept;
  // The sum beside the second norm, where nothing is computed again.
  if (form.recompute == RecomputeMode::kNone) kept += stream_of(spec, form);
  // As results of products, or as what the functions behind them save.
  if (!spec.mla) kept += static_cast<double>(spec.q_size() + 2 * spec.kv_size()) / ranks;
  if (!spec.is_moe(number)) kept += 2.0 * static_cast<double>(spec.intermediate_size) / ranks;
  return kept;
}

/// Of the ranks that share a pool.
struct Together {
  int ranks = 0;
  double micro_batch_bytes = 0;
  double step_bytes = 0;
};

Together together(const std::vector<MemoryClaim>& claims, const MemoryPool& pool) {
  Together sum;
  for (const MemoryClaim& claim : claims) {
    if (std::ranges::find(claim.pools, pool.id) == claim.pools.end()) continue;
    ++sum.ranks;
    sum.micro_batch_bytes += claim.micro_batch_bytes;
    sum.step_bytes += claim.step_bytes;
  }
  return sum;
}

std::string of_ranks(int ranks) {
  return ranks == 1 ? std::string() : concat(" on the ", ranks, " ranks that share it");
}

std::string has_left(const MemoryPool& pool) {
  return concat("what is left of memory holds: at most ", gib(std::max(pool.left_bytes, 0.0)),
                " GiB of ", gib(pool.size_bytes), " GiB (", pool.name, ", with swap)");
}

}  // namespace

KeptOfToken kept_of_token(const models::ModelSpec& spec,
                          const std::vector<GradContract>& parameters, const ForwardForm& form) {
  const double bytes = narrowest_compute(parameters);
  KeptOfToken kept;
  const std::int64_t logits = spec.vocab_size / form.tensor_ranks;
  kept.logits = bytes * static_cast<double>(logits);
  const auto first = first_with_gradient(parameters);
  if (!first) return kept;
  kept.activations = bytes * stream_of(spec, form);  // of the last norm
  for (std::int64_t layer = *first; layer < spec.num_hidden_layers; ++layer) {
    kept.activations += bytes * kept_of_layer(spec, layer, form);
  }
  return kept;
}

MemoryClaim claim_of(const RowsOfRank& rows, const KeptOfToken& kept,
                     const std::vector<MemoryPool>& pools) {
  const auto tokens = static_cast<double>(rows.tokens);
  const double forward =
      static_cast<double>(rows.micro_batch) * tokens * (kept.logits + kept.activations);
  MemoryClaim claim;
  claim.micro_batch_bytes = forward + static_cast<double>(rows.micro_batch) * tokens * kIdsOfToken;
  claim.step_bytes = forward + static_cast<double>(rows.rows) * tokens * kIdsOfToken;
  for (const MemoryPool& pool : pools) claim.pools.push_back(pool.id);
  return claim;
}

std::string encode(const MemoryClaim& claim) {
  std::ostringstream text;
  text << std::hexfloat << claim.micro_batch_bytes << '\n' << claim.step_bytes << '\n';
  for (const std::string& pool : claim.pools) text << pool << '\n';
  return text.str();
}

MemoryClaim decode_claim(const std::string& text) {
  std::istringstream lines(text);
  std::string line;
  const auto next = [&] { return static_cast<bool>(std::getline(lines, line)); };
  MemoryClaim claim;
  if (next()) claim.micro_batch_bytes = std::stod(line);
  if (next()) claim.step_bytes = std::stod(line);
  while (next()) claim.pools.push_back(line);
  return claim;
}

void require_room(const RowsOfRank& rows, const std::vector<MemoryClaim>& claims,
                  const std::vector<MemoryPool>& pools) {
  for (const MemoryPool& pool : pools) {
    const Together sum = together(claims, pool);
    TESSERA_CHECK(sum.micro_batch_bytes <= pool.left_bytes, ErrorKind::kConfig,
                  "training.local_batch_size: found ", rows.micro_batch, " rows of ", rows.tokens,
                  " tokens a micro-batch, whose ids, logits and saved activations alone are at "
                  "least ",
                  gib(sum.micro_batch_bytes), " GiB", of_ranks(sum.ranks), ", expected what ",
                  has_left(pool),
                  "; lower it (training.global_batch_size keeps the rows of a step) or "
                  "training.seq_len, or set activation_checkpoint.mode");
    TESSERA_CHECK(sum.step_bytes <= pool.left_bytes, ErrorKind::kConfig,
                  "training.global_batch_size: found ", rows.rows, " rows of ", rows.tokens,
                  " tokens a step on each data rank, whose ids, beside what one micro-batch keeps, "
                  "are at least ",
                  gib(sum.step_bytes), " GiB", of_ranks(sum.ranks), ", expected what ",
                  has_left(pool), "; lower it");
  }
}

bool is_beyond(const std::vector<MemoryClaim>& claims, const std::vector<MemoryPool>& pools) {
  return std::ranges::any_of(pools, [&](const MemoryPool& pool) {
    return together(claims, pool).step_bytes > pool.size_bytes;
  });
}

bool is_out_of_memory(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return true;
  if (dynamic_cast<const Error*>(&error) != nullptr) return false;  // may quote another rank's
  const std::string_view said = error.what();
  for (const std::string_view words :
       {"can't allocate memory", "not enough memory", "out of memory", "calculation overflowed"}) {
    if (said.find(words) != said.npos) return true;
  }
  return false;
}

std::string out_of_memory_text(const RowsOfRank& rows, const std::exception& error) {
  return concat("training.local_batch_size: found micro-batches of ", rows.micro_batch,
                " row(s) of ", rows.tokens,
                " tokens, for which memory ran out, expected fewer; lower it "
                "(training.global_batch_size keeps the rows of a step) or training.seq_len, or set "
                "activation_checkpoint.mode (",
                one_line(error.what()), ")");
}

}  // namespace tessera::train
