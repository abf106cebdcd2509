// Two sizes of one proof: ./test --all runs a seeded, pairwise part of a product of cases,
// scripts/full NAME all of it, in one sitting or in several. Next: pairwise.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/environment.h"
#include "pairwise.h"
#include "tessera/error.h"

namespace tessera::test {

/// TESSERA_FULL=1, which scripts/full sets.
inline bool full_proof() { return base::environment_switch("TESSERA_FULL"); }

inline std::uint64_t environment_number(const char* name, std::uint64_t otherwise) {
  const auto text = base::environment_variable(name);
  return text ? std::strtoull(text->c_str(), nullptr, 10) : otherwise;
}

/// One sitting of a proof of hours: of the cases that the whole has, every `count`th from the
/// `number`th on.
struct PartOfProof {
  std::size_t number = 1, count = 1;

  /// "K/N". Errors: kUsage, unless 1 <= K <= N.
  static PartOfProof parse(const std::string& text) {
    PartOfProof part;
    int read = 0;
    const int found = std::sscanf(text.c_str(), "%zu/%zu%n", &part.number, &part.count, &read);
    TESSERA_CHECK(found == 2 && static_cast<std::size_t>(read) == text.size() && part.number >= 1 &&
                      part.number <= part.count,
                  ErrorKind::kUsage, "TESSERA_PART: found '", text,
                  "', expected K/N with 1 <= K <= N, such as 2/11");
    return part;
  }
  std::vector<Choice> of(const std::vector<Choice>& whole) const {
    std::vector<Choice> some;
    for (std::size_t i = number - 1; i < whole.size(); i += count) some.push_back(whole[i]);
    return some;
  }
};

/// TESSERA_PART, which scripts/full NAME --part sets; else the whole.
inline PartOfProof part_of_proof() {
  const auto text = base::environment_variable("TESSERA_PART");
  return text ? PartOfProof::parse(*text) : PartOfProof{};
}

/// The choices that this run goes through.
inline std::vector<Choice> cases(const std::vector<std::size_t>& sizes, const IsValid& is_valid,
                                 std::uint32_t seed) {
  return full_proof() ? part_of_proof().of(product(sizes, is_valid))
                      : pairwise(sizes, is_valid, seed);
}

/// Selects what `one` of several `cases` runs of the list `all` in ./test --all: every `parts`th
/// item, beginning at the place of the case among the `cases` modulo `parts`. `parts` adjacent cases
/// that share a list have all of it together. Errors: kInternal where nothing is selected.
template <class Item, class Case>
std::vector<Item> in_turn(const std::vector<Item>& all, std::size_t parts,
                          const std::vector<Case>& cases, const Case& one) {
  if (full_proof()) return all;
  std::vector<Item> some;
  const auto number = static_cast<std::size_t>(std::ranges::find(cases, one) - cases.begin());
  for (std::size_t i = number % parts; i < all.size(); i += parts) some.push_back(all[i]);
  TESSERA_INVARIANT(number < cases.size() && !some.empty(), "found ", all.size(),
                    " items and case ", number, " of ", cases.size(), ", expected ", parts,
                    " items or more: this case would check nothing");
  return some;
}

}  // namespace tessera::test
