#include "train/context_of_run.h"

#include <algorithm>
#include <iomanip>
#include <map>
#include <sstream>
#include <utility>

#include "base/text/printable.h"
#include "layout/context_cut.h"
#include "tessera/dtype.h"
#include "train/config/config_resolve.h"

namespace tessera::train {
namespace {

using layout::ContextCut;
using layout::Range;

/// The attention of one layer on a rank of tp.
struct SharedAttention {
  std::int64_t heads = 0, groups = 0;       ///< of queries, of keys and values
  std::int64_t key_dim = 0, value_dim = 0;  ///< of a head
  std::int64_t latent = 0;                  ///< width of what is gathered instead; 0: none
  std::int64_t window = 0, chunk = 0;       ///< 0: none
  auto operator<=>(const SharedAttention&) const = default;

  /// Numbers of a position that travel in the gather form.
  std::int64_t gathered_numbers() const {
    return latent > 0 ? latent : groups * (key_dim + value_dim);
  }
  /// The first key that a query sees.
  std::int64_t first_key(std::int64_t query) const {
    std::int64_t first = window > 0 ? std::max<std::int64_t>(0, query - window + 1) : 0;
    if (chunk > 0) first = std::max(first, query / chunk * chunk);
    return first;
  }
  /// The pairs of a key and one of the first `queries` queries.
  double pairs_before(std::int64_t queries) const {
    if (chunk == 0) return pairs_in_run(queries);
    const std::int64_t whole = queries / chunk;
    return static_cast<double>(whole) * pairs_in_run(chunk) + pairs_in_run(queries % chunk);
  }

 private:
  /// The pairs of so many queries that see each other, up to the window.
  double pairs_in_run(std::int64_t queries) const {
    const auto triangle = [](std::int64_t n) {
      return static_cast<double>(n) * static_cast<double>(n + 1) / 2;
    };
    if (window == 0 || queries <= window) return triangle(queries);
    return triangle(window) + static_cast<double>(queries - window) * static_cast<double>(window);
  }
};

SharedAttention attention_of_layer(const models::ModelSpec& spec, std::int64_t layer, int tp) {
  SharedAttention of{.heads = spec.num_attention_heads / tp};
  const models::LayerAttention sizes = models::attention_of(spec, layer);
  of.window = sizes.window.value_or(0);
  if (spec.is_chunked(layer)) of.chunk = spec.chunked->attention_chunk_size;
  if (spec.mla) {
    of.groups = of.heads;
    of.key_dim = spec.mla->qk_head_dim();
    of.value_dim = spec.mla->v_head_dim;
    of.latent = spec.mla->kv_lora_rank + spec.mla->qk_rope_head_dim;
    return of;
  }
  const auto heads = models::key_value_heads(spec);
  const bool by_layer = std::ssize(heads) == spec.num_hidden_layers;
  const std::int64_t all = by_layer ? heads[static_cast<std::size_t>(layer)] : heads.front();
  of.groups = std::max<std::int64_t>(1, all / tp);
  of.key_dim = of.value_dim = sizes.dims / 2;
  return of;
}

/// How many layers have each kind of attention.
std::map<SharedAttention, std::int64_t> attentions_of(const models::ModelSpec& spec, int tp,
                                                      KernelsOf kernels) {
  std::map<SharedAttention, std::int64_t> found;
  for (std::int64_t layer = 0; layer < spec.num_hidden_layers; ++layer) {
    if (spec.is_linear(layer) || spec.sees_nothing(layer)) continue;
    SharedAttention of = attention_of_layer(spec, layer, tp);
    // The first keys of chunks lie on the device, where the host does not read them.
    if (kernels != KernelsOf::kCpu) of.chunk = 0;
    ++found[of];
  }
  return found;
}

/// The keys that a part's queries see; kernels begin at a multiple of 32.
Range reach_of_part(const ContextCut& cut, int number, const SharedAttention& of) {
  constexpr std::int64_t kFirstKeys = 32;
  const Range part = cut.part(number);
  return {of.first_key(part.begin) / kFirstKeys * kFirstKeys, part.end};
}

/// Positions that a rank sends and receives for one layer.
struct Travelling {
  std::int64_t keys = 0;          ///< sent to ranks whose queries see them
  std::int64_t addends_sent = 0;  ///< to the gradients of others' keys
  std::int64_t addends_received = 0;
};

Travelling travelling(const ContextCut& cut, int rank, const SharedAttention& of) {
  Travelling found;
  // A reach has the last positions of a part, or none: queries see back from their place.
  const auto common = [&](const Range& reach, int number) {
    return layout::intersect(reach, cut.part(number)).size();
  };
  // The latent's addends are summed on a rank: one reach from its first key to its last.
  const auto reaches = [&](int other) {
    std::vector<Range> all;
    for (const int number : cut.parts_of(other)) all.push_back(reach_of_part(cut, number, of));
    if (of.latent == 0) return all;
    Range one = all.front();
    for (const Range& each : all) {
      one = {std::min(one.begin, each.begin), std::max(one.end, each.end)};
    }
    return std::vector<Range>{one};
  };
  for (int other = 0; other < cut.ranks; ++other) {
    if (other == rank) continue;
    const auto of_other = reaches(other), own = reaches(rank);
    for (const int number : cut.parts_of(rank)) {
      std::int64_t most = 0;
      for (const Range& reach : of_other) {
        most = std::max(most, common(reach, number));
        found.addends_received += common(reach, number);
      }
      found.keys += most;
    }
    for (const int number : cut.parts_of(other)) {
      for (const Range& reach : own) found.addends_sent += common(reach, number);
    }
  }
  return found;
}

/// Returns the bytes of all layers in one form, on one rank.
ContextBytes context_bytes_of(const std::map<SharedAttention, std::int64_t>& layers,
                              const ContextCut& cut, int rank, ContextForm form, std::int64_t rows,
                              std::int64_t element) {
  constexpr std::int64_t kWide = 4;
  ContextBytes bytes;
  for (const auto& [of, count] : layers) {
    if (form == ContextForm::kHeads) {
      const std::int64_t numbers =
          of.heads * (of.key_dim + of.value_dim) + of.groups * (of.key_dim + of.value_dim);
      const std::int64_t sent =
          numbers * rows * cut.positions_of_rank() / cut.ranks * (cut.ranks - 1) * element;
      bytes.forward += count * sent;
      bytes.backward += count * sent;
      continue;
    }
    const std::int64_t numbers = of.gathered_numbers() * rows;
    const Travelling moves = travelling(cut, rank, of);
    const std::int64_t keys = moves.keys * numbers * element;
    // The latent is kept whole, so that backward does not gather it again.
    bytes.forward += count * keys;
    bytes.backward += count * ((of.latent > 0 ? 0 : keys) + moves.addends_sent * numbers * kWide);
    bytes.gathered = std::max(bytes.gathered, cut.positions * numbers * element);
    bytes.partials =
        std::max(bytes.partials, (moves.addends_sent + moves.addends_received) * numbers * kWide);
  }
  return bytes;
}

ContextBytes most_of_ranks(const std::map<SharedAttention, std::int64_t>& layers,
                           const ContextCut& cut, ContextForm form, std::int64_t rows,
                           std::int64_t element) {
  ContextBytes most;
  if (cut.ranks == 1) return most;
  for (int rank = 0; rank < cut.ranks; ++rank) {
    const ContextBytes one = context_bytes_of(layers, cut, rank, form, rows, element);
    if (one.sent() > most.sent()) {
      most.forward = one.forward;
      most.backward = one.backward;
    }
    most.gathered = std::max(most.gathered, one.gathered);
    most.partials = std::max(most.partials, one.partials);
  }
  return most;
}

double slowest_over_mean(const std::map<SharedAttention, std::int64_t>& layers,
                         const ContextCut& cut) {
  double most = 0.0, sum = 0.0;
  for (int rank = 0; rank < cut.ranks; ++rank) {
    double pairs = 0.0;
    for (const auto& [of, count] : layers) {
      const auto weight = static_cast<double>(count * of.heads * (of.key_dim + of.value_dim));
      for (const Range& run : cut.runs_of(rank)) {
        pairs += weight * (of.pairs_before(run.end) - of.pairs_before(run.begin));
      }
    }
    most = std::max(most, pairs);
    sum += pairs;
  }
  return sum > 0.0 ? most * cut.ranks / sum : 1.0;
}

bool divides_heads(const std::map<SharedAttention, std::int64_t>& layers, int cp) {
  return std::ranges::all_of(layers, [cp](const auto& one) { return one.first.groups % cp == 0; });
}

std::vector<std::string> placements_of(const models::ModelSpec& spec, const ParallelDims& dims) {
  if (dims.context_form == ContextForm::kHeads) {
    return {"q, k, v of attention: S(cut) -> S(heads), gradient S(heads) -> S(cut)",
            "result of attention: S(heads) -> S(cut), gradient S(cut) -> S(heads)"};
  }
  if (!spec.mla) {
    return {
        concat("k, v of attention: S(cut) -> R, gradient P -> S(cut) in float32, in the order "
               "of ",
               dims.context_parts, " parts")};
  }
  return {concat("latent of k, v: S(cut) -> R, gradient P -> S(cut) in float32, in the order of ",
                 dims.cp, " ranks")};
}

/// Returns why results of other layouts may have other bits; empty where they have the same.
std::string why_bounds(const ModelContract& contract, KernelsOf kernels) {
  if (kernels != KernelsOf::kCpu) return "kernels of cuda, which choose sums by sizes";
  for (const GradContract& one : contract.parameters) {
    if (one.compute.dtype != DType::kFloat32) {
      return concat("computes in ", to_string(one.compute.dtype), " (", one.name, ")");
    }
  }
  return "";
}

std::string same_bits_text(const models::ModelSpec& spec, const ParallelDims& dims) {
  return concat(dims.context_form == ContextForm::kHeads
                    ? std::string("as one rank with whole rows")
                    : concat("as one rank with context_parallel_parts = ", dims.context_parts),
                ", one thread a rank",
                models::routed_experts(spec).layers.empty()
                    ? ""
                    : ", where each expert that has tokens has at least 4 on its rank");
}

/// Returns why a row without parts has other blocks of queries than its parts have; empty where it
/// has the same.
std::string why_other_blocks(const std::map<SharedAttention, std::int64_t>& layers,
                             std::int64_t part) {
  constexpr std::int64_t kBlocks = 256, kLeast = 32, kMost = 128;
  if (part % kBlocks != 0) {
    return concat("which have ", part, " positions, no multiple of ", kBlocks);
  }
  for (const auto& [of, count] : layers) {
    if (of.chunk > 0) return "as a row without them is computed chunk by chunk";
    // A block has 256 / R queries (kernels/cpu/attention.cpp).
    const std::int64_t repeat = of.heads / of.groups;
    if (kBlocks % std::clamp(kBlocks / repeat, kLeast, kMost) != 0) {
      return concat("as blocks of queries with ", repeat, " heads a key head do not divide ",
                    kBlocks);
    }
  }
  return "";
}

/// Whether results also have the bits of rows that are not cut into parts.
std::string without_parts_text(const std::map<SharedAttention, std::int64_t>& layers,
                               const ParallelDims& dims, std::int64_t positions) {
  if (dims.context_form == ContextForm::kHeads) return "";
  if (positions == 0) return "; without parts: set training.seq_len to know";
  const std::string why = why_other_blocks(layers, positions / dims.context_parts);
  return why.empty() ? "; as one rank without parts, too" : concat("; bounds without parts, ", why);
}

}  // namespace

std::optional<ContextOfRun> context_of_run(const Config& config, const models::ModelSpec& spec,
                                           const ParallelDims& dims, const ModelContract& contract,
                                           KernelsOf kernels) {
  if (dims.cp == 1 && dims.context_parts == 1) return std::nullopt;
  const std::int64_t positions = config.training.seq_len.value_or(0);
  const std::int64_t rows = config.training.local_batch_size.value_or(1);
  if (positions > 0) check_positions(config.parallelism, positions);
  const auto layers = attentions_of(spec, dims.tp, kernels);
  ContextOfRun found{.dims = dims, .positions = positions};
  for (const auto& [of, count] : layers) found.layers += count;
  found.placements = placements_of(spec, dims);
  const std::string why = why_bounds(contract, kernels);
  const bool of_latents = spec.mla && dims.context_form == ContextForm::kGather && dims.cp > 1;
  found.forward_bits =
      why.empty() ? same_bits_text(spec, dims) + without_parts_text(layers, dims, positions)
                  : concat("bounds: ", why);
  found.backward_bits =
      !why.empty()  ? found.forward_bits
      : !of_latents ? same_bits_text(spec, dims)
                    : concat("bounds: the gradient of a latent has one addend from each of ",
                             dims.cp, " ranks");
  if (positions == 0) return found;
  const ContextCut cut = layout::head_tail(positions, dims.cp, dims.context_parts);
  std::map<DType, std::int64_t> elements;
  for (const GradContract& one : contract.parameters) elements[one.compute.dtype] += one.numel();
  const auto most =
      std::ranges::max_element(elements, {}, [](const auto& one) { return one.second; });
  const std::int64_t element = most == elements.end() ? 4 : size_of(most->first);
  const bool gathers = dims.context_form == ContextForm::kGather;
  found.bytes = most_of_ranks(layers, cut, dims.context_form, rows, element);
  if (!gathers || divides_heads(layers, dims.cp)) {
    found.other = most_of_ranks(layers, cut, gathers ? ContextForm::kHeads : ContextForm::kGather,
                                rows, element);
  }
  found.slowest_over_mean = gathers ? slowest_over_mean(layers, cut) : 1.0;
  return found;
}

std::string context_text(const ParallelDims& dims) {
  if (dims.cp == 1 && dims.context_parts == 1) return "";
  return concat(word_of(dims.context_form), " over ", dims.cp,
                dims.cp == 1 ? " rank, " : " ranks, ", dims.context_parts, " parts");
}

std::vector<std::string> context_lock_lines(const ParallelDims& dims) {
  if (dims.cp == 1 && dims.context_parts == 1) return {};
  return {concat("context rows degree ", dims.cp),
          concat("context rows form ", word_of(dims.context_form)),
          concat("context rows parts ", dims.context_parts)};
}

std::string contract_text(const ContextOfRun& context) {
  const ParallelDims& dims = context.dims;
  std::string text = concat("rows over cp ", dims.cp, ": form ", word_of(dims.context_form), ", ",
                            dims.context_parts, " parts");
  if (context.positions > 0) {
    text += concat(", ", context.positions / dims.cp, " of ", context.positions,
                   " positions on a rank");
  }
  text += "\n  stream, queries, logits: S(cut)\n";
  for (const std::string& line : context.placements) text += concat("  ", line, "\n");
  text += concat("  forward bits: ", context.forward_bits,
                 "\n  backward bits, of activations: ", context.backward_bits,
                 "\n  gradients of parameters: bounds: sums over tokens in another order, as with "
                 "other numbers of data ranks\n");
  return text;
}

std::string costs_text(const ContextOfRun& context) {
  const ParallelDims& dims = context.dims;
  if (dims.cp == 1) return "";
  std::string text = concat("  context: cp ", dims.cp, ", form ", word_of(dims.context_form), ", ",
                            dims.context_parts, " parts\n");
  if (context.positions == 0) return text + "    set training.seq_len to know what it sends\n";
  const ContextBytes& bytes = context.bytes;
  const std::int64_t layers = std::max<std::int64_t>(1, context.layers);
  text +=
      concat("    a layer's attention sends ", size_text(bytes.forward / layers), " in forward, ",
             size_text(bytes.backward / layers), " in backward of a micro-batch (mean of ",
             context.layers, " layers, rank that sends most)\n");
  if (dims.context_form == ContextForm::kGather) {
    text += concat("    holds meanwhile ", size_text(bytes.gathered),
                   " of gathered keys and values, in backward also ", size_text(bytes.partials),
                   " of addends in float32\n");
  }
  std::ostringstream ratio;
  ratio << std::fixed << std::setprecision(3) << context.slowest_over_mean;
  text += concat("    slowest over mean: ", ratio.str(),
                 dims.context_form == ContextForm::kGather
                     ? " by pairs of query and key, of rows of one document\n"
                     : ", as all ranks have as many heads\n");
  const bool gathers = dims.context_form == ContextForm::kGather;
  if (!context.other) {
    return text + concat("    gather is the form to take: ", dims.cp, " ranks of cp and ", dims.tp,
                         " of tp do not divide the heads\n");
  }
  const std::int64_t gather = gathers ? bytes.sent() : context.other->sent();
  const std::int64_t heads = gathers ? context.other->sent() : bytes.sent();
  if (gather == heads) {
    return text +
           concat("    cheaper form: none, both send ", size_text(gather), " a micro-batch\n");
  }
  return text + concat("    cheaper form: ", heads < gather ? "heads" : "gather", " (gather sends ",
                       size_text(gather), ", heads ", size_text(heads), " a micro-batch)\n");
}

}  // namespace tessera::train
