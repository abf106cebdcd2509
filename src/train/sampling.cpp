#include "train/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "base/random.h"
#include "tessera/error.h"

namespace tessera::train {
namespace {

/// Uniform in [0, 1), 53 bits.
double uniform(std::uint64_t seed, std::int64_t position) {
  const std::uint64_t stream = stream_of(seed, "generate");
  const auto index = static_cast<std::uint64_t>(position);
  const PhiloxCounter words =
      philox({static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32), 0, 0},
             {static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32)});
  const std::uint64_t bits = (std::uint64_t{words[0]} << 32 | words[1]) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

void check_finite(std::span<const float> logits, std::int64_t position) {
  const auto bad =
      std::find_if(logits.begin(), logits.end(), [](float x) { return !std::isfinite(x); });
  TESSERA_CHECK(bad == logits.end(), ErrorKind::kNumeric, "generate: found the logit ", *bad,
                " of token ", bad - logits.begin(), " at position ", position,
                ", expected finite numbers; the model's weights are damaged or overflow");
}

/// Whether token a comes before b by its logit; of equal ones the lowest id.
auto more_likely_by(std::span<const float> logits) {
  return [logits](std::int64_t a, std::int64_t b) {
    const float of_a = logits[static_cast<std::size_t>(a)];
    const float of_b = logits[static_cast<std::size_t>(b)];
    return of_a > of_b || (of_a == of_b && a < b);
  };
}

/// Ids of the `count` most likely tokens, ascending, so that the draw runs through them in an order
/// that does not depend on how they were selected.
std::vector<std::int64_t> most_likely(std::span<const float> logits, std::int64_t count) {
  std::vector<std::int64_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), std::int64_t{0});
  if (count == 0 || std::cmp_greater_equal(count, ids.size())) return ids;
  std::nth_element(ids.begin(), ids.begin() + (count - 1), ids.end(), more_likely_by(logits));
  ids.resize(static_cast<std::size_t>(count));
  std::sort(ids.begin(), ids.end());
  return ids;
}

/// The part of a token in the softmax over the temperature, but for the sum: that of `best` is 1.
double weight(float logit, float best, double temperature) {
  return std::exp((double{logit} - double{best}) / temperature);
}

/// The most likely of `ids` until their shares add up to top_p, ascending again.
std::vector<std::int64_t> nucleus(std::vector<std::int64_t> ids, std::span<const float> logits,
                                  const Sampling& sampling, float best) {
  if (sampling.top_p >= 1.0) return ids;
  std::sort(ids.begin(), ids.end(), more_likely_by(logits));
  const auto weight_of = [&](std::int64_t id) {
    return weight(logits[static_cast<std::size_t>(id)], best, sampling.temperature);
  };
  double total = 0.0;
  for (const std::int64_t id : ids) total += weight_of(id);
  std::size_t kept = 0;
  for (double sum = 0.0; kept < ids.size() && sum < sampling.top_p * total; ++kept) {
    sum += weight_of(ids[kept]);
  }
  ids.resize(std::max(kept, std::size_t{1}));  // a product that underflows keeps none
  std::sort(ids.begin(), ids.end());
  return ids;
}

}  // namespace

std::int64_t choose_token(std::span<const float> logits, const Sampling& sampling,
                          std::int64_t position) {
  TESSERA_INVARIANT(!logits.empty(), "no token to choose from");
  check_finite(logits, position);
  const auto best = std::max_element(logits.begin(), logits.end());  // the first of equal ones
  if (sampling.temperature == 0.0) return best - logits.begin();
  const auto ids = nucleus(most_likely(logits, sampling.top_k), logits, sampling, *best);
  std::vector<double> running(ids.size());
  double sum = 0.0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    sum += weight(logits[static_cast<std::size_t>(ids[i])], *best, sampling.temperature);
    running[i] = sum;
  }
  const double wanted = uniform(sampling.seed, position) * sum;
  auto chosen = std::upper_bound(running.begin(), running.end(), wanted);
  // Rounding may carry the product to the sum itself, behind the last token that has a share.
  if (chosen == running.end()) chosen = std::lower_bound(running.begin(), running.end(), sum);
  return ids[static_cast<std::size_t>(chosen - running.begin())];
}

}  // namespace tessera::train
