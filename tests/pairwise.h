// Products of cases, and a short part of one that still has every pair of values.
//
// A choice is one value of each dimension, by number. Most mistakes need two settings that do not
// fit each other, rarely three: pairwise() keeps every two values of two dimensions that can stand
// together, in about as many choices as the two longest dimensions have pairs. Next: proof.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <utility>
#include <vector>

namespace tessera::test {

using Choice = std::vector<std::size_t>;  ///< of every dimension the number of its value
using IsValid = std::function<bool(const Choice&)>;

/// Every valid choice; the last dimension changes first. `sizes`: how many values each has.
inline std::vector<Choice> product(const std::vector<std::size_t>& sizes, const IsValid& is_valid) {
  std::vector<Choice> all;
  if (std::ranges::find(sizes, 0U) != sizes.end()) return all;
  Choice choice(sizes.size(), 0);
  for (;;) {
    if (is_valid(choice)) all.push_back(choice);
    std::size_t dim = sizes.size();
    while (dim > 0 && choice[dim - 1] + 1 == sizes[dim - 1]) choice[--dim] = 0;
    if (dim == 0) return all;
    ++choice[dim - 1];
  }
}

/// Which pairs of values some choice has already. A value counts as a pair with itself, so that one
/// dimension alone is covered too.
class Pairs {
 public:
  explicit Pairs(const std::vector<std::size_t>& sizes) : sizes_(sizes) {
    std::size_t count = 0;
    for (std::size_t a = 0; a < sizes.size(); ++a) {
      for (std::size_t b = a; b < sizes.size(); ++b) {
        first_.push_back(count);
        count += sizes[a] * sizes[b];
      }
    }
    covered_.resize(count, false);
  }
  std::size_t missing(const Choice& choice) const {
    std::size_t count = 0;
    visit(choice, [&](std::size_t pair) { count += covered_[pair] ? 0 : 1; });
    return count;
  }
  void cover(const Choice& choice) {
    visit(choice, [&](std::size_t pair) { covered_[pair] = true; });
  }
  /// Of one choice.
  std::size_t most() const { return first_.size(); }

 private:
  template <class Visit>
  void visit(const Choice& choice, Visit&& visit_pair) const {
    std::size_t next = 0;
    for (std::size_t a = 0; a < choice.size(); ++a) {
      for (std::size_t b = a; b < choice.size(); ++b) {
        visit_pair(first_[next++] + choice[a] * sizes_[b] + choice[b]);
      }
    }
  }

  std::vector<std::size_t> sizes_;
  std::vector<std::size_t> first_;  ///< number of the first pair of every two dimensions
  std::vector<bool> covered_;
};

/// The order of a seed. std::shuffle draws otherwise in every standard library; that some orders
/// are a little likelier than others does not matter here.
inline void shuffle(std::vector<Choice>& choices, std::uint32_t seed) {
  std::mt19937 engine(seed);
  for (std::size_t i = choices.size(); i > 1; --i) std::swap(choices[i - 1], choices[engine() % i]);
}

/// Valid choices with every pair of values of two dimensions that some valid choice has. The same
/// for the same seed, with every compiler.
///
/// Greedy: always a choice that covers the most pairs yet missing; the seed picks among equals.
/// What a choice would cover only shrinks, so each is looked at once for every such number at most
/// (21 of them for six dimensions), not once for every choice that is taken.
inline std::vector<Choice> pairwise(const std::vector<std::size_t>& sizes, const IsValid& is_valid,
                                    std::uint32_t seed) {
  Pairs pairs(sizes);
  std::vector<std::vector<Choice>> covering(pairs.most() + 1);  // at most so many missing pairs
  covering.back() = product(sizes, is_valid);
  shuffle(covering.back(), seed);
  std::vector<Choice> taken;
  for (std::size_t most = pairs.most(); most > 0; --most) {
    for (Choice& choice : covering[most]) {
      const std::size_t missing = pairs.missing(choice);
      if (missing < most) {
        covering[missing].push_back(std::move(choice));
        continue;
      }
      pairs.cover(choice);
      taken.push_back(std::move(choice));
    }
    covering[most].clear();
  }
  return taken;
}

}  // namespace tessera::test
