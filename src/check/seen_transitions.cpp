#include "check/seen_transitions.h"

#include <algorithm>
#include <bit>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "layout/range.h"
#include "tessera/error.h"

namespace tessera::check {
namespace {

/// One transition: what each of its ranks saw of it, in rank order.
using Together = std::vector<const SeenTransition*>;

std::string operation_of(const SeenTransition& one) {
  return concat(one.kind, " of ", one.where, ", ", one.is_forward ? "forward" : "backward");
}

Finding finding_at(const SeenTransition& one) {
  return {.kind = FindingKind::kTransition,
          .operation = operation_of(one),
          .unit = one.unit,
          .axis = one.axis};
}

std::vector<Values> given_of(const Together& all) {
  std::vector<Values> given;
  for (const auto* one : all) given.push_back(one->given);
  return given;
}

layout::Range part_of(const SeenTransition& one, std::int64_t total) {
  return layout::part_of(total, one.ranks, one.rank);
}

Values own_part(const SeenTransition& one, const Values& whole) {
  const auto part = part_of(one, whole.sizes.at(static_cast<std::size_t>(one.dim)));
  return slice(whole, one.dim, part.begin, part.end);
}

/// The rank's rows among zeros.
Values in_zeros(const SeenTransition& one, const std::vector<Values>& parts) {
  std::vector<Values> others;
  for (int rank = 0; rank < one.ranks; ++rank) {
    const Values& part = parts[static_cast<std::size_t>(rank)];
    others.push_back(rank == one.rank ? part : zeros_like(part));
  }
  return join(others, one.dim);
}

/// Rows that go to each rank, one after the other; in backward the way is the other one.
Values exchanged(const SeenTransition& one, const Together& all) {
  std::vector<Values> rows;
  for (const auto* from : all) {
    const auto& sends = from->is_forward ? from->sends : from->receives;
    std::int64_t begin = 0;
    for (int to = 0; to < one.rank; ++to) begin += sends.at(static_cast<std::size_t>(to));
    const auto count = sends.at(static_cast<std::size_t>(one.rank));
    rows.push_back(slice(from->given, 0, begin, begin + count));
  }
  return join(rows, 0);
}

/// Works out what the rank has to make of what all were given.
Values expected_of(const SeenTransition& one, const Together& all) {
  const auto given = given_of(all);
  const auto& own = one.given;
  const bool forward = one.is_forward;
  if (one.kind == "all_reduce") return !forward && one.is_invariant ? own : sum(given);
  if (one.kind == "copy") return forward ? own : sum(given);
  if (one.kind == "all_gather") {
    if (forward) return join(given, one.dim);
    return own_part(one, one.is_invariant ? own : sum(given));
  }
  if (one.kind == "reduce_scatter") {
    return forward ? own_part(one, sum(given)) : join(given, one.dim);
  }
  if (one.kind == "slice") {
    if (forward) return own_part(one, own);
    return one.is_invariant ? join(given, one.dim) : in_zeros(one, given);
  }
  if (one.kind == "pad") return forward ? in_zeros(one, given) : own_part(one, own);
  if (one.kind == "only_first") return one.rank == 0 ? own : zeros_like(own);
  TESSERA_INVARIANT(one.kind == "all_to_all", "a transition of kind ", one.kind);
  return exchanged(one, all);
}

/// Whether ranks have to be given the same: I and R in forward, the gradients of I and P in
/// backward.
bool takes_the_same(const SeenTransition& one) {
  if (one.is_forward) return one.kind == "copy" || one.kind == "slice" || one.kind == "only_first";
  if (one.kind == "all_reduce" || one.kind == "all_gather") return one.is_invariant;
  return one.kind == "pad" || one.kind == "only_first";
}

double rounded_to_16_bits(double x) {
  const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(x));
  const std::uint32_t even = (bits >> 16) & 1U;
  return std::bit_cast<float>((bits + 0x7fffU + even) & 0xffff0000U);
}

/// Whether what was made is what addends of 16 bits come to.
bool is_of_rounded(const SeenTransition& one, const Together& all) {
  std::vector<SeenTransition> rounded;
  for (const auto* each : all) {
    rounded.push_back(*each);
    for (double& x : rounded.back().given.numbers) x = rounded_to_16_bits(x);
  }
  Together of;
  for (const auto& each : rounded) of.push_back(&each);
  constexpr double kFloat = 1e-6;
  return error_of(one.made, expected_of(*of[static_cast<std::size_t>(one.rank)], of)) < kFloat;
}

std::string what_is_due(const SeenTransition& one) {
  const bool sums = one.kind == "all_reduce" || one.kind == "reduce_scatter" ||
                    (!one.is_forward && (one.kind == "copy" || one.kind == "all_gather"));
  if (!one.is_forward && one.is_invariant && one.kind != "slice" && one.kind != "copy") {
    return one.kind == "all_gather" ? "the local part of the gradient" : "the gradient as it is";
  }
  if (sums) return concat("the sum over the ", one.ranks, " ranks of ", one.axis, ", once");
  if (one.kind == "all_gather" || (!one.is_forward && one.is_invariant)) {
    return concat("the parts of all ranks of ", one.axis, ", in rank order");
  }
  if (one.kind == "all_to_all") return "each rank's rows, in rank order";
  if (one.kind == "only_first") return "the tensor on the first rank, zeros on the others";
  if (one.kind == "copy") return "the tensor as it is";
  const bool pads = (one.kind == "pad") == one.is_forward;
  return pads ? "the rank's part among zeros" : "the local part";
}

std::optional<Finding> wrong_result(const SeenTransition& one, const Together& all) {
  Finding finding = finding_at(one);
  Values expected;
  try {
    expected = expected_of(one, all);
  } catch (const Error&) {  // no sum and no whole can be made of them
    finding.found = "tensors of the ranks whose sizes do not belong together";
    finding.expected = what_is_due(one);
    finding.mend = "look at where they are cut";
    return finding;
  }
  if (equal(one.made, expected)) return std::nullopt;
  finding.found = is_of_rounded(one, all) ? "addends that are rounded to 16 bits before the sum"
                                          : difference_text(one.made, expected);
  finding.expected = what_is_due(one);
  finding.mend = concat("mend the ", one.is_forward ? "forward" : "backward",
                        " of this transition: its two directions belong together "
                        "(parallel/transitions.h)");
  return finding;
}

std::optional<Finding> different_inputs(const Together& all) {
  const SeenTransition& first = *all.front();
  if (!takes_the_same(first)) return std::nullopt;
  for (const auto* one : all) {
    if (equal(one->given, first.given)) continue;
    Finding finding = finding_at(first);
    finding.found =
        concat(first.is_forward ? "inputs" : "gradients", " that differ on ranks 0 and ", one->rank,
               " of ", first.axis, " (", difference_text(one->given, first.given), ")");
    finding.expected = concat("the same on every rank, as ", first.kind,
                              first.is_invariant ? " from I" : "", " takes it");
    finding.mend = "a sum is missing before it, or it has to be another transition";
    return finding;
  }
  return std::nullopt;
}

/// Names the first rank of a group that did something else, if any.
std::optional<Finding> other_order(const Together& all) {
  const SeenTransition& first = *all.front();
  for (const auto* one : all) {
    if (operation_of(*one) == operation_of(first) && one->unit == first.unit) continue;
    Finding finding = finding_at(first);
    finding.kind = FindingKind::kOrder;
    finding.found = concat("rank ", one->rank, " of ", first.axis, " in ", operation_of(*one),
                           " in unit ", one->unit, ", where rank 0 is in this one");
    finding.expected = "the same transitions in the same order on every rank";
    finding.mend = kMendOfOrder;
    return finding;
  }
  return std::nullopt;
}

/// The transitions of each group in their order.
std::vector<Together> together(std::span<const std::vector<SeenTransition>> ranks) {
  std::map<std::string, std::vector<Together>> groups;
  for (const auto& seen : ranks) {
    std::map<std::string, std::size_t> count;
    for (const SeenTransition& one : seen) {
      auto& places = groups[one.group];
      const std::size_t place = count[one.group]++;
      if (places.size() <= place) places.resize(place + 1);
      places[place].push_back(&one);
    }
  }
  std::vector<Together> all;
  for (auto& [group, places] : groups) {
    for (Together& one : places) {
      if (std::ssize(one) != one.front()->ranks) break;  // a run that failed half-way
      std::ranges::sort(one, {}, &SeenTransition::rank);
      all.push_back(std::move(one));
    }
  }
  return all;
}

}  // namespace

std::vector<Finding> wrong_transitions(std::span<const std::vector<SeenTransition>> ranks) {
  std::vector<Finding> findings;
  std::set<std::tuple<std::string, std::string, std::string>> known;
  const auto add = [&](std::optional<Finding> finding) {
    if (!finding) return false;
    if (known.emplace(finding->operation, finding->unit, finding->axis).second) {
      findings.push_back(std::move(*finding));
    }
    return true;
  };
  for (const Together& all : together(ranks)) {
    if (add(other_order(all))) continue;
    if (add(different_inputs(all))) continue;
    for (const auto* one : all) {
      if (add(wrong_result(*one, all))) break;
    }
  }
  return findings;
}

}  // namespace tessera::check
