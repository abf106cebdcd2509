// Counter-based random numbers: every value is a pure function of a seed, a name and an index. Also
// the place of a forward in training, which keys the numbers of dropout.
//
// No generator object and no state, so a rank draws any range of a parameter and gets the values
// that every other layout gets there; nothing accesses libtorch's default generator. Source:
// Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); checked
// against the known answers of its reference library.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

namespace tessera {

using PhiloxCounter = std::array<std::uint32_t, 4>;
using PhiloxKey = std::array<std::uint32_t, 2>;

/// Philox 4x32 with 10 rounds.
PhiloxCounter philox(PhiloxCounter counter, PhiloxKey key);

/// Returns the key of a seed and a name. Different names have independent streams.
std::uint64_t stream_of(std::uint64_t seed, std::string_view name);

/// Sets out[i - begin] to element i of the normal variates of (seed, name), for begin <= i < end.
/// They are drawn in float64 (Box-Muller, |z| < 6.8) and rounded once to float32.
/// Errors: kInternal unless 0 <= begin <= end.
void fill_normal(float* out, std::int64_t begin, std::int64_t end, std::uint64_t seed,
                 std::string_view name, float mean, float std);

/// Does the same with variates that are uniform in [low, high).
void fill_uniform(float* out, std::int64_t begin, std::int64_t end, std::uint64_t seed,
                  std::string_view name, float low, float high);

/// A permutation of 0 .. size-1 without a table: a Feistel network on the next even power of two
/// (at least 256), walked along its cycle until it is inside the range. One look-up costs about 1
/// to 4 walks of 8 rounds, more only below 64 elements.
class Permutation {
 public:
  /// Errors: kInternal unless 0 <= size <= 2^62.
  Permutation(std::uint64_t seed, std::uint64_t epoch, std::int64_t size);
  /// Errors: kInternal unless 0 <= index < size().
  std::int64_t operator()(std::int64_t index) const;
  std::int64_t size() const { return size_; }

 private:
  std::uint64_t encrypt(std::uint64_t value) const;

  PhiloxKey key_;
  std::uint64_t epoch_;
  std::int64_t size_;
  int half_bits_;
};

/// The place that keys counter-based dropout. A layer sees rows of a micro-batch, but not which
/// rows of the step they are. The code that runs the micro-batch sets it for the thread, and
/// checkpoint() restores it when it recomputes, as it does random state. Without a scope nothing is
/// trained, and nothing is dropped.
struct SamplePlace {
  std::uint64_t seed = 0;
  std::int64_t step = 0;       ///< from 1
  std::int64_t first_row = 0;  ///< row 0 of the micro-batch, counted over the step's global batch
  /// The places that the positions have in their rows; null: position i is at place i.
  std::shared_ptr<const std::vector<std::int64_t>> places = nullptr;
  bool operator==(const SamplePlace&) const = default;
};

/// Returns the place of the innermost scope in this pass.
std::optional<SamplePlace> sample_place();

/// Sets the place while it lives; scopes nest.
class SampleScope {
 public:
  explicit SampleScope(std::optional<SamplePlace> place);
  ~SampleScope();
  SampleScope(const SampleScope&) = delete;
  SampleScope& operator=(const SampleScope&) = delete;

 private:
  const std::optional<SamplePlace> place_;
  const std::optional<SamplePlace>* outer_;
};

}  // namespace tessera
