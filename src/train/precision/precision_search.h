// The search for the cheapest policy whose gradients stay within a bound, over measured candidates.
//
// Pure: what computes gradients is behind a function, so that the search is tested on drawn tables.
// A policy is a set of groups that compute in float32; all others compute in bfloat16. An error is
// relative to the gradient of all groups in float32, one a parameter; infinity stands for one that
// is not finite. Short symbols: G groups, P parameters. Next: precision_what_if.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace tessera::train {

using ParameterErrors = std::vector<double>;  ///< [P]

/// Each group that computes in float32.
using WideGroups = std::vector<bool>;  ///< [G]

struct ErrorTable {
  ParameterErrors narrow;                 ///< of no group wide
  std::vector<ParameterErrors> widened;   ///< [G] of this group wide alone
  std::vector<ParameterErrors> narrowed;  ///< [G] of all groups wide but this one
  /// Errors with all groups wide and sums in another order: the noise of the reference.
  ParameterErrors wide_noise;
  ParameterErrors narrow_noise;  ///< by how much `narrow` differs in another order

  std::size_t groups() const { return widened.size(); }
};

/// Whether a parameter is held to the bound: not where its gradient is itself noise, so that
/// float32 alone moves it by more.
std::vector<bool> held_parameters(const ErrorTable& table, double bound);

/// Differences of errors that may be chance alone, by parameter: those of the order of additions,
/// and the most that any error grew where a group was widened. Widening removes roundings; an error
/// that grows all the same has been drawn again.
ParameterErrors noise_of(const ErrorTable& table);

/// The parameter of the largest error among those that are held, and that error; the first one
/// among equals. Without any held parameter the error is 0.
struct WorstError {
  std::size_t parameter = 0;
  double error = 0;
};
WorstError worst_error(const ParameterErrors& errors, const std::vector<bool>& held);

struct PolicyProblem {
  ErrorTable table;
  std::vector<std::int64_t> costs;  ///< [G] bytes that a wide group adds, at least 0
  double bound = 0;
};

/// A wide group of the result, and the errors of the result without it.
struct NeededGroup {
  std::size_t group = 0;
  WorstError without;
  /// No error that is above the bound without it differs by more than noise.
  bool is_within_noise = false;
};

struct FoundPolicy {
  WideGroups wide;
  ParameterErrors errors;
  std::vector<NeededGroup> needed;  ///< one for each wide group
  bool is_all_wide() const;
};

/// Measures a policy that the table has not.
using Measure = std::function<ParameterErrors(const WideGroups& wide)>;

/// From all narrow on, the group that takes most of the excess over the bound a byte is widened,
/// until all held errors are within the bound; where no group has an effect above noise, all are.
/// Then each wide group, the costliest first, is narrowed again where the errors stay within the
/// bound, until none can be. A wide group whose effect is noise is left out of a second search,
/// whose result counts unless only float32 is within the bound. So the errors of the result are
/// measured and within the bound, and no single group can be narrowed. `measure` is called for no
/// policy of the table, and for none twice.
FoundPolicy cheapest_policy(const PolicyProblem& problem, const Measure& measure);

/// Whether each group's gradients may travel in bfloat16. `errors`: of the policy with float32 on
/// the wire; `wire`: of all groups in float32 with bfloat16 on the wire, which changes a
/// parameter's own gradient alone. `groups`: places of their parameters.
std::vector<bool> narrow_wires(const ParameterErrors& errors, const ParameterErrors& wire,
                               const std::vector<std::vector<std::size_t>>& groups,
                               const std::vector<bool>& held, double bound);

}  // namespace tessera::train
