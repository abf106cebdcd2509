// The small model of `tessera check`: which layers of the whole one it has.
#include "train/small/small_spec.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace tessera::train::small_spec_test {
namespace {

/// A spec of eight layers of which each fourth has no rope, as SmolLM3's.
models::ModelSpec spec_of_eight() {
  models::ModelSpec spec;
  spec.num_hidden_layers = 8;
  spec.num_attention_heads = 4;
  spec.num_key_value_heads = 2;
  spec.layers_without_rope = {3, 7};
  return spec;
}

// Naive: the whole model's numbers stay, and no layer of two is without rope.
TEST(SmallSpec, KeepsOneLayerOfEachKindOfPositions) {
  const models::ModelSpec small = small_spec(spec_of_eight(), ParallelDims{}, 2);
  EXPECT_EQ(small.num_hidden_layers, 2);
  EXPECT_EQ(small.layers_without_rope, std::vector<std::int64_t>{1});
}

TEST(SmallSpec, NumbersLayersWithoutRopeByTheirPlaceAmongTheChosenOnes) {
  const models::ModelSpec small = small_spec(spec_of_eight(), ParallelDims{}, 4);
  EXPECT_EQ(small.num_hidden_layers, 4);
  EXPECT_EQ(small.layers_without_rope, (std::vector<std::int64_t>{2, 3}));
}

}  // namespace
}  // namespace tessera::train::small_spec_test
