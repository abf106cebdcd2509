#include "models/rope_options.h"

#include <cmath>

namespace tessera::models {

nn::RopeOptions rope_options(const RopeSpec& rope, std::int64_t dim) {
  nn::RopeOptions options;
  options.head_dim = dim;
  options.theta = rope.theta;
  switch (rope.type) {
    case RopeType::kDefault:
      break;
    case RopeType::kLlama3:
      options.llama3 = nn::Llama3Scaling{
          .factor = rope.factor,
          .low_freq_factor = rope.low_freq_factor,
          .high_freq_factor = rope.high_freq_factor,
          .original_max_position_embeddings = rope.original_max_position_embeddings};
      break;
    case RopeType::kYarn:
      options.yarn =
          nn::YarnScaling{.factor = rope.factor,
                          .beta_fast = rope.yarn.beta_fast,
                          .beta_slow = rope.yarn.beta_slow,
                          .original_max_position_embeddings = rope.original_max_position_embeddings,
                          .truncate = rope.yarn.truncate};
      options.table_factor = table_factor(rope);
      break;
    case RopeType::kProportional:
      // In this order: transformers rounds down after the product.
      options.turned_pairs = static_cast<std::int64_t>(
          std::floor(rope.partial_rotary_factor * static_cast<double>(dim) / 2.0));
      options.factor = rope.factor;
      break;
  }
  return options;
}

}  // namespace tessera::models
