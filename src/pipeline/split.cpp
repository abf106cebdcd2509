#include "pipeline/split.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "base/text/printable.h"
#include "tessera/error.h"

namespace tessera::pipeline {
namespace {

/// Whether a stage may do without a layer.
bool may_be_empty(int stage, int stages) { return stage == 0 || stage + 1 == stages; }

int fewest_layers(int stages) { return stages == 1 ? 1 : stages - 2; }

/// Smaller is better, from the front: ranks, the costliest first, then stages.
std::vector<double> cost_vector(const Split& split, const LayerCosts& costs,
                                const std::vector<int>& rank_of) {
  std::vector<double> stages = stage_costs(split, costs);
  std::vector<double> ranks(static_cast<std::size_t>(*std::ranges::max_element(rank_of)) + 1);
  for (std::size_t stage = 0; stage < stages.size(); ++stage) {
    ranks[static_cast<std::size_t>(rank_of[stage])] += stages[stage];
  }
  std::ranges::sort(ranks, std::greater());
  std::ranges::sort(stages, std::greater());
  ranks.insert(ranks.end(), stages.begin(), stages.end());
  return ranks;
}

bool is_whole(const Split& split) {
  for (int stage = 0; stage < split.stages(); ++stage) {
    const int layers = split.end(stage) - split.begin(stage);
    if (layers < (may_be_empty(stage, split.stages()) ? 0 : 1)) return false;
  }
  return true;
}

Split even_split(int layers, int stages) {
  Split split{layers, {}};
  for (int stage = 0; stage < stages; ++stage) {
    split.first_layer.push_back(static_cast<int>(std::int64_t{layers} * stage / stages));
  }
  if (is_whole(split)) return split;
  // Fewer layers than stages: the ends go without.
  for (int stage = 0; stage < stages; ++stage) {
    split.first_layer[static_cast<std::size_t>(stage)] = std::clamp(stage - 1, 0, layers);
  }
  return split;
}

/// The largest cost of a stage is as small as can be, whichever rank it is on.
Split split_of_smallest_maximum(const LayerCosts& costs, int stages) {
  const int layers = static_cast<int>(costs.layers.size());
  std::vector<double> sum(costs.layers.size() + 1);  // of the layers before
  for (std::size_t i = 0; i < costs.layers.size(); ++i) sum[i + 1] = sum[i] + costs.layers[i];
  const auto cost = [&](int stage, int begin, int end) {
    return sum[static_cast<std::size_t>(end)] - sum[static_cast<std::size_t>(begin)] +
           (stage == 0 ? costs.before : 0.0) + (stage + 1 == stages ? costs.after : 0.0);
  };
  // best[end]: of the stages up to here, over the layers before `end`.
  std::vector<double> best(sum.size(), std::numeric_limits<double>::infinity());
  std::vector<std::vector<int>> from(static_cast<std::size_t>(stages),
                                     std::vector<int>(sum.size()));
  for (int stage = 0; stage < stages; ++stage) {
    std::vector<double> next(sum.size(), std::numeric_limits<double>::infinity());
    const int fewest = may_be_empty(stage, stages) ? 0 : 1;
    for (int end = 0; end <= layers; ++end) {
      for (int begin = 0; begin + fewest <= end; ++begin) {
        if (stage == 0 && begin > 0) break;
        const double before = stage == 0 ? 0.0 : best[static_cast<std::size_t>(begin)];
        const double largest = std::max(before, cost(stage, begin, end));
        if (largest >= next[static_cast<std::size_t>(end)]) continue;
        next[static_cast<std::size_t>(end)] = largest;
        from[static_cast<std::size_t>(stage)][static_cast<std::size_t>(end)] = begin;
      }
    }
    best = std::move(next);
  }
  Split split{layers, std::vector<int>(static_cast<std::size_t>(stages))};
  for (int stage = stages - 1, end = layers; stage >= 0; --stage) {
    end = from[static_cast<std::size_t>(stage)][static_cast<std::size_t>(end)];
    split.first_layer[static_cast<std::size_t>(stage)] = end;
  }
  return split;
}

/// Moves a layer from one stage to another, those between them along, as long as that is better.
Split improved(Split split, const LayerCosts& costs, const std::vector<int>& rank_of) {
  std::vector<double> costs_of_split = cost_vector(split, costs, rank_of);
  for (bool better = true; better;) {
    better = false;
    for (int from = 0; from < split.stages(); ++from) {
      for (int to = 0; to < split.stages(); ++to) {
        Split moved = split;
        for (int border = std::min(from, to) + 1; border <= std::max(from, to); ++border) {
          moved.first_layer[static_cast<std::size_t>(border)] += from < to ? -1 : 1;
        }
        if (!is_whole(moved)) continue;
        std::vector<double> of_moved = cost_vector(moved, costs, rank_of);
        if (of_moved >= costs_of_split) continue;
        split = std::move(moved);
        costs_of_split = std::move(of_moved);
        better = true;
      }
    }
  }
  return split;
}

void check_layers(int layers, int stages) {
  TESSERA_CHECK(
      layers >= fewest_layers(stages), ErrorKind::kConfig, "pipeline.split: found ", layers,
      " layers for ", stages, " stages, expected at least ", fewest_layers(stages),
      " (one a stage, the first may hold the embedding alone, the last the head); take fewer "
      "ranks or stages a rank");
}

}  // namespace

std::string layers_text(const Split& split, int stage) {
  std::vector<std::string> parts;
  if (stage == 0) parts.emplace_back("embedding");
  const int last = split.end(stage) - 1;
  if (last > split.begin(stage)) {
    parts.push_back(concat("layers ", split.begin(stage), "-", last));
  } else if (last == split.begin(stage)) {
    parts.push_back(concat("layer ", last));
  }
  if (stage + 1 == split.stages()) parts.emplace_back("head");
  return joined(parts);
}

std::string to_string(const Split& split) {
  std::string text;
  for (int stage = 0; stage < split.stages(); ++stage) {
    text += concat(stage == 0 ? "" : "; ", "stage ", stage, ": ", layers_text(split, stage));
  }
  return text;
}

Split split_by_cost(const LayerCosts& costs, const std::vector<int>& rank_of) {
  const int stages = static_cast<int>(rank_of.size());
  TESSERA_INVARIANT(stages >= 1, "a pipeline has a stage");
  const int layers = static_cast<int>(costs.layers.size());
  check_layers(layers, stages);
  const Split even = improved(even_split(layers, stages), costs, rank_of);
  const Split small = improved(split_of_smallest_maximum(costs, stages), costs, rank_of);
  return cost_vector(small, costs, rank_of) < cost_vector(even, costs, rank_of) ? small : even;
}

Split split_as_given(const std::vector<int>& first_layers, int layers, int stages) {
  TESSERA_CHECK(static_cast<int>(first_layers.size()) == stages, ErrorKind::kConfig,
                "pipeline.split: found the first layers of ", first_layers.size(),
                " stages, expected those of ", stages);
  const Split split{layers, first_layers};
  TESSERA_CHECK(first_layers.front() == 0, ErrorKind::kConfig, "pipeline.split: found layer ",
                first_layers.front(), " at the beginning, expected 0");
  for (int stage = 0; stage < stages; ++stage) {
    const int fewest = may_be_empty(stage, stages) ? 0 : 1;
    TESSERA_CHECK(
        split.begin(stage) <= layers && split.end(stage) - split.begin(stage) >= fewest,
        ErrorKind::kConfig, "pipeline.split: found stage ", stage, " from layer ",
        split.begin(stage), " to ", split.end(stage), " of ", layers,
        ", expected first layers that rise (the first stage may hold the embedding alone, "
        "the last one the head)");
  }
  return split;
}

std::vector<double> stage_costs(const Split& split, const LayerCosts& costs) {
  std::vector<double> sums;
  for (int stage = 0; stage < split.stages(); ++stage) {
    double sum = stage == 0 ? costs.before : 0.0;
    for (int layer = split.begin(stage); layer < split.end(stage); ++layer) {
      sum += costs.layers.at(static_cast<std::size_t>(layer));
    }
    if (stage + 1 == split.stages()) sum += costs.after;
    sums.push_back(sum);
  }
  return sums;
}

}  // namespace tessera::pipeline
