// Private to mistakes.cpp and the files that have the kinds: those of one area each, and what they
// draw and compare. Each draw gives none for a kind of another area.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "check/mistakes.h"
#include "tessera/contract.h"

namespace tessera::mistakes {

using Drawing = std::optional<Mistake>(Kind kind, Draws& draws, const Ground& ground);

// Kinds that the checker was built with in view.
Drawing transitions, contracts, sources, dtypes, numbers, orders, replicas;
// Kinds that were held back.
Drawing held_back_transitions, held_back_contracts, held_back_runs;

// Drawing.

template <class T>
const T& pick(Draws& draws, const std::vector<T>& from) {
  return from[draws.below(from.size())];
}

/// A transition of the small run, in one direction.
struct Site {
  std::string kind, where, axis;
  std::string unit;  ///< one alone; empty: in all
  bool is_forward = true;
  bool is_invariant = false;
  std::int64_t dim = 0;
  std::vector<std::int64_t> sizes = {};  ///< of what the first one seen was given

  bool is(const parallel::Transition& of) const;
  bool sums() const;  ///< whether its direction adds addends of all ranks
  std::string text() const;
};
/// Those that right runs go through, of each unit and each direction.
std::vector<Site> sites_of(const train::SeenRun& seen);

/// The change at a site.
struct WayAtSite {
  std::function<bool(const Site&)> fits;
  /// Directions that stay as they are are empty.
  std::function<Instead(const Site&, const RankParts&)> instead;
};
/// Draws a site that fits, in one unit or in all.
std::optional<Mistake> at_a_site(Kind kind, Draws& draws, const Ground& ground,
                                 const WayAtSite& way);

/// Contracts of trained parameters: of the small model, and of the run's own one.
std::vector<GradContract> contracts_of(const Ground& ground);
std::vector<GradContract> contracts_of_run(const Ground& ground);
/// One that fits, if any does.
std::optional<GradContract> draw_parameter(Draws& draws, const std::vector<GradContract>& all,
                                           const std::function<bool(const GradContract&)>& fits);

/// A mistake in what is said of `parameter`, which a right name has, and `axis` where that is not
/// empty.
Mistake of_parameter(Kind kind, const GradContract& parameter, const std::string& axis,
                     const std::string& how);
/// In a number of a step, by the name that findings have for it.
Mistake of_number(Kind kind, const std::string& number, const std::string& place);
/// Instead of the sum of `what` over ranks: `way` of what all ranks have, and of the right sum.
using SumWay = std::function<std::vector<double>(
    const Mesh&, const golden::SumStandIn::Values& of_ranks, std::vector<double> right)>;
std::function<std::unique_ptr<golden::SumStandIn>(const RankParts&)> other_sum(train::RankSum what,
                                                                               const SumWay& way);
/// Where the values of the rank of tp are among those of all ranks, of this one's rows.
std::size_t place_of(const Mesh& mesh, int tensor);

/// A parameter that the ranks of an axis hold alike.
struct Replicated {
  std::string parameter, over;
  /// Changes an element of it, on one rank alone: whether that is this one.
  bool change_on(const Mesh& mesh, const ShardedBase& model) const;
};
std::optional<Replicated> draw_replicated(Draws& draws, const Ground& ground);
/// Named where the guard says parameter and axis.
Mistake of_replicated(Kind kind, const Replicated& one);

// On a rank.

GradContract* contract_in(const RankParts& rank, const std::string& name);
bool has_parameter(const RankParts& rank, const std::string& name);
/// Changes the contract on every rank, and counts where that is another one then.
void change_contract(const RankParts& rank, const std::string& name,
                     const std::function<void(GradContract&)>& change);
/// Changes what its layer declares, where this rank has the layer.
void declare_layout(const RankParts& rank, const std::string& name, const ParameterLayout& layout);
/// Changes what its contract has, with the sums that follow.
void contract_layout(const RankParts& rank, const std::string& name, const ParameterLayout& layout);
/// Changes its raw gradients; undefined: as they are.
void change_raw_gradients(const RankParts& rank, const std::string& name,
                          const std::function<at::Tensor(const at::Tensor&)>& change);

// Names.

/// "tp" of "tp_rep/2", "dp_shard" of "dp_shard_mod_ep".
std::string base_axis(std::string_view axis);
bool has_axis(const check::Finding& finding, std::string_view axis);
/// By its canonical name or by that of a tensor that shares its matrix; in the text where a run is
/// refused.
bool has_parameter(const check::Finding& finding, const GradContract& parameter);
bool says(const check::Finding& finding, std::string_view text);

}  // namespace tessera::mistakes
