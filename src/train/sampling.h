// Which token comes next, from the logits of one position. Pure.
//
// A choice depends on (seed, position) and the logits only, drawn by the counter-based generator of
// base/random.h: the same text comes out however it is computed. Next: generate.h.
#pragma once

#include <cstdint>
#include <span>

namespace tessera::train {

struct Sampling {
  double temperature = 0.0;  ///< 0 = the most likely token, always
  std::int64_t top_k = 0;    ///< the most likely ones to choose from; 0 = all
  /// Keeps the fewest of those whose shares, after temperature, add up to this or more; in (0, 1].
  double top_p = 1.0;
  std::uint64_t seed = 42;
};

/// The token at `position` of the text (the first one of the prompt is 0). Of equal logits the
/// lowest id counts as the more likely. top_p as in transformers (Holtzman et al. 2020,
/// arXiv:1904.09751). Errors: kNumeric for logits that are NaN or infinite.
std::int64_t choose_token(std::span<const float> logits, const Sampling& sampling,
                          std::int64_t position);

}  // namespace tessera::train
