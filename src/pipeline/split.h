// Splits the layers of a model into stages. Pure.
//
// The embedding is in the first stage, final norm and head are in the last one. A stage has at
// least one layer, except that the first may hold the embedding alone and the last the head.
#pragma once

#include <string>
#include <vector>

namespace tessera::pipeline {

/// The costs of a micro-batch, in any unit: of each layer, of what is before the layers (the
/// embedding) and after them (norm and head).
struct LayerCosts {
  std::vector<double> layers;
  double before = 0.0;
  double after = 0.0;
};

struct Split {
  int layers = 0;
  std::vector<int> first_layer;  ///< of each stage

  int stages() const { return static_cast<int>(first_layer.size()); }
  int begin(int stage) const { return first_layer.at(static_cast<std::size_t>(stage)); }
  int end(int stage) const { return stage + 1 < stages() ? begin(stage + 1) : layers; }
  bool operator==(const Split&) const = default;
};

/// Lists the parts of a stage: "embedding, layers 0-3".
std::string layers_text(const Split& split, int stage);
/// "stage 0: embedding, layers 0-3; stage 1: layers 4-7, head".
std::string to_string(const Split& split);

/// Makes the largest cost of a rank (the sum over its stages) as small as can be, then the next
/// one, then that of a stage: exactly where all layers cost the same or a rank has one stage, else
/// so that no layer that changes its stage makes it smaller. `rank_of`: of each stage. Errors:
/// kConfig with the numbers where there are fewer layers than stages need.
Split split_by_cost(const LayerCosts& costs, const std::vector<int>& rank_of);

/// Splits before the given layers. Errors: kConfig with the numbers for another count than stages,
/// layers out of order or out of range, a first one that is not 0, a stage in the middle without a
/// layer.
Split split_as_given(const std::vector<int>& first_layers, int layers, int stages);

/// Returns the cost of each stage, embedding and head included.
std::vector<double> stage_costs(const Split& split, const LayerCosts& costs);

}  // namespace tessera::pipeline
