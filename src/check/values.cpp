#include "check/values.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <sstream>

#include "tessera/error.h"

namespace tessera::check {
namespace {

double norm(const std::vector<double>& numbers) {
  double squares = 0;
  for (const double x : numbers) squares += x * x;
  return std::sqrt(squares);
}

/// A tensor as [before, dim, after].
struct Split {
  std::int64_t before = 1, size = 1, after = 1;
};
Split split_at(const std::vector<std::int64_t>& sizes, std::int64_t dim) {
  Split split;
  for (std::int64_t i = 0; i < std::ssize(sizes); ++i) {
    const std::int64_t size = sizes[static_cast<std::size_t>(i)];
    (i < dim ? split.before : i == dim ? split.size : split.after) *= size;
  }
  return split;
}

/// Whether parts can be joined along `dim` to a tensor of these sizes.
bool fits(std::span<const Values> parts, const std::vector<std::int64_t>& whole, std::size_t dim) {
  std::int64_t total = 0;
  for (const Values& part : parts) {
    if (part.sizes.size() != whole.size()) return false;
    for (std::size_t i = 0; i < whole.size(); ++i) {
      if (i != dim && part.sizes[i] != whole[i]) return false;
    }
    total += part.sizes[dim];
  }
  return total == whole[dim];
}

}  // namespace

double error_of(const Values& found, const Values& expected) {
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  if (found.sizes != expected.sizes) return kInfinite;
  std::vector<double> difference(found.numbers.size());
  for (std::size_t i = 0; i < difference.size(); ++i) {
    difference[i] = found.numbers[i] - expected.numbers[i];
  }
  const double error = norm(difference);
  if (error == 0) return 0;
  if (!std::isfinite(error)) return kInfinite;
  const double size = norm(expected.numbers);
  return size == 0 ? kInfinite : error / size;
}

Values sum(std::span<const Values> addends) {
  Values total = addends.front();
  for (const Values& one : addends.subspan(1)) {
    TESSERA_INVARIANT(one.sizes == total.sizes, "addends of different sizes");
    for (std::size_t i = 0; i < total.numbers.size(); ++i) total.numbers[i] += one.numbers[i];
  }
  return total;
}

Values join(std::span<const Values> parts, std::int64_t dim) {
  Values whole;
  whole.sizes = parts.front().sizes;
  const auto at = static_cast<std::size_t>(dim);
  whole.sizes.at(at) = 0;
  for (const Values& part : parts) whole.sizes.at(at) += part.sizes.at(at);
  TESSERA_INVARIANT(fits(parts, whole.sizes, at), "parts of different sizes");
  const std::int64_t before = split_at(whole.sizes, dim).before;
  for (std::int64_t i = 0; i < before; ++i) {
    for (const Values& part : parts) {
      const Split of = split_at(part.sizes, dim);
      const auto begin = part.numbers.begin() + i * of.size * of.after;
      whole.numbers.insert(whole.numbers.end(), begin, begin + of.size * of.after);
    }
  }
  return whole;
}

Values slice(const Values& whole, std::int64_t dim, std::int64_t begin, std::int64_t end) {
  Values part;
  part.sizes = whole.sizes;
  part.sizes.at(static_cast<std::size_t>(dim)) = end - begin;
  const Split of = split_at(whole.sizes, dim);
  TESSERA_INVARIANT(0 <= begin && begin <= end && end <= of.size, "a slice beyond its tensor");
  for (std::int64_t i = 0; i < of.before; ++i) {
    const auto row = whole.numbers.begin() + i * of.size * of.after;
    part.numbers.insert(part.numbers.end(), row + begin * of.after, row + end * of.after);
  }
  return part;
}

Values zeros_like(const Values& of) { return {of.sizes, std::vector<double>(of.numbers.size())}; }

std::optional<Placement> placement_of(std::span<const Values> parts, const Values& whole) {
  if (parts.empty()) return std::nullopt;
  const bool same =
      std::ranges::all_of(parts, [&](const Values& part) { return equal(part, whole); });
  if (same) return Placement{PlacementKind::kReplicate};
  for (std::size_t dim = 0; dim < whole.sizes.size(); ++dim) {
    if (!fits(parts, whole.sizes, dim)) continue;
    if (equal(join(parts, static_cast<std::int64_t>(dim)), whole)) {
      return Placement{PlacementKind::kShard, static_cast<int>(dim)};
    }
  }
  const bool add =
      std::ranges::all_of(parts, [&](const Values& part) { return part.sizes == whole.sizes; });
  if (add && equal(sum(parts), whole)) return Placement{PlacementKind::kPartial};
  return std::nullopt;
}

std::optional<double> factor_of(const Values& found, const Values& expected) {
  if (found.sizes != expected.sizes) return std::nullopt;
  double product = 0, squares = 0;
  for (std::size_t i = 0; i < found.numbers.size(); ++i) {
    product += found.numbers[i] * expected.numbers[i];
    squares += expected.numbers[i] * expected.numbers[i];
  }
  if (squares == 0 || !std::isfinite(product)) return std::nullopt;
  const double factor = product / squares;
  Values scaled = expected;
  for (double& x : scaled.numbers) x *= factor;
  double difference = 0;
  for (std::size_t i = 0; i < found.numbers.size(); ++i) {
    difference += (found.numbers[i] - scaled.numbers[i]) * (found.numbers[i] - scaled.numbers[i]);
  }
  if (std::sqrt(difference) >= kNoise * std::sqrt(squares)) return std::nullopt;
  return factor;
}

std::string difference_text(const Values& found, const Values& expected) {
  std::ostringstream text;
  text.precision(3);
  if (found.sizes != expected.sizes) {
    text << "another shape";
    return text.str();
  }
  const bool zeros = std::ranges::all_of(found.numbers, [](double x) { return x == 0; });
  if (zeros) return "zeros";
  if (const auto factor = factor_of(found, expected)) {
    text << *factor << " times the expected values";
    return text.str();
  }
  const double error = error_of(found, expected);
  if (!std::isfinite(error)) {
    const bool finite =
        std::ranges::all_of(found.numbers, [](double x) { return std::isfinite(x); });
    return finite ? "values where zeros are expected" : "values that are not finite";
  }
  text << "values that differ by " << 100 * error << " % of their norm";
  return text.str();
}

}  // namespace tessera::check
