// The transitions of all ranks of a small run, compared with what each one is for.
//
// Each transition of src/parallel is worked out a second time, from the inputs of all ranks and by
// another code, in both directions; and what it takes as the same on every rank is compared. What
// it is given it is not blamed for, so that a finding names the transition itself. Pure. Next:
// ../parallel/transitions.h for the table, values.h.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "check/finding.h"
#include "check/values.h"

namespace tessera::check {

/// One transition on one rank, in one direction.
struct SeenTransition {
  std::string kind = {};   ///< "all_gather"
  std::string where = {};  ///< its caller
  std::string unit = {};
  bool is_forward = true;
  std::string group = {};  ///< the same on the ranks that take part in it, and on no others
  std::string axis = {};
  int ranks = 1;
  int rank = 0;  ///< among them
  std::int64_t dim = 0;
  std::optional<std::int64_t> total = {};               ///< of `dim`; none: parts are equal
  bool is_invariant = false;                            ///< its whole side is I, not R
  std::vector<std::int64_t> sends = {}, receives = {};  ///< rows of an all_to_all, by rank
  Values given = {};  ///< forward: the input; backward: the gradient of the result
  Values made = {};
};

/// `ranks`: what each rank saw, in its order. One finding for each operation of a unit and axis.
std::vector<Finding> wrong_transitions(std::span<const std::vector<SeenTransition>> ranks);

}  // namespace tessera::check
