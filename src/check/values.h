// Values: the numbers of a small tensor, and what of the whole tensor the parts of several ranks
// are.
//
// Comparisons are relative to the size of what is compared: two tensors are equal where the norm of
// their difference is below kNoise times that of the expected one, which sums in float32 stay far
// below. Pure. Next: seen_transitions.h.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/placement.h"

namespace tessera::check {

/// Row-major.
struct Values {
  std::vector<std::int64_t> sizes = {};
  std::vector<double> numbers = {};
  bool operator==(const Values&) const = default;
};

/// The most that float32 sums of as few addends as small runs have are apart.
inline constexpr double kNoise = 2e-4;

/// The norm of the difference over that of `expected`; 0 for two tensors of zeros, infinite where
/// sizes differ or a number is not finite.
double error_of(const Values& found, const Values& expected);
inline bool equal(const Values& found, const Values& expected) {
  return error_of(found, expected) < kNoise;
}

/// Adds at least one tensor. Errors: kInternal where sizes differ.
Values sum(std::span<const Values> addends);
/// Joins at least one tensor along `dim`. Errors: kInternal where other sizes differ.
Values join(std::span<const Values> parts, std::int64_t dim);
/// Rows [begin, end) of `dim`. Errors: kInternal beyond the tensor.
Values slice(const Values& whole, std::int64_t dim, std::int64_t begin, std::int64_t end);
/// Zeros of the same sizes.
Values zeros_like(const Values& of);

/// Returns how ranks hold `whole` by parts in rank order: the same on all (R), cut (S), or added up
/// to it (P); none where none of these is true, or there is no part. What is zero everywhere is R.
std::optional<Placement> placement_of(std::span<const Values> parts, const Values& whole);

/// Returns "2 times the expected values", "zeros", or "values that differ by 13 % of their norm"
/// where no factor explains it.
std::string difference_text(const Values& found, const Values& expected);
/// The factor between them, where there is one.
std::optional<double> factor_of(const Values& found, const Values& expected);

}  // namespace tessera::check
