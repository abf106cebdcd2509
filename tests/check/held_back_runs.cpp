// Held-back kinds of wrong numbers, of another order, and of replicas that are none.
#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "check/mistakes_by_area.h"
#include "comm/group.h"
#include "parallel/transition.h"
#include "tessera/world.h"

namespace tessera::mistakes {
namespace {

using check::FindingKind;
using parallel::Transition;

Mistake auxiliary_loss_of_own_tokens() {
  auto mistake = of_number(Kind::kAuxiliaryLossOfOwnTokens, "auxiliary loss",
                           "each rank's choices as if all ranks had them");
  mistake.changes.sums = other_sum(
      train::RankSum::kRouterLoad, [](const Mesh& mesh, const golden::SumStandIn::Values& of_ranks,
                                      const std::vector<double>& /*right*/) {
        auto own = of_ranks.at(place_of(mesh, mesh.coordinate(axis::kTensor)));
        for (double& one : own) one *= static_cast<double>(of_ranks.size());
        return own;
      });
  return mistake;
}

/// Without its collective, from what this rank has.
at::Tensor alone(const Transition& of, const at::Tensor& x, bool forward) {
  const auto form = of.form();
  const bool joins = forward ? of.kind == "all_gather" : of.kind == "reduce_scatter";
  const bool cuts = forward ? of.kind == "reduce_scatter" : of.kind == "all_gather";
  if (joins) {
    const std::vector<at::Tensor> copies(static_cast<std::size_t>(of.axis.size), x);
    return at::cat(copies, form.dim);
  }
  return cuts ? parallel::own_part(x, of.axis, form.dim) : x;
}

bool has_collective(const Site& site) {
  return site.sums() || (site.kind == "all_gather" && site.is_forward) ||
         (site.kind == "reduce_scatter" && !site.is_forward);
}

std::optional<Mistake> transition_skipped(Draws& draws, const Ground& ground) {
  const bool first = draws.below(2) == 0;
  auto mistake =
      at_a_site(Kind::kSkippedOnOneRank, draws, ground,
                {[&](const Site& site) { return has_collective(site); },
                 [=](const Site& site, const RankParts& /*rank*/) {
                   const auto way = [=](const Transition& of, const at::Tensor& x) {
                     const int skips = first ? 0 : of.axis.size - 1;
                     return of.axis.rank == skips ? alone(of, x, site.is_forward) : at::Tensor();
                   };
                   return site.is_forward ? Instead{way, {}} : Instead{{}, way};
                 }});
  if (!mistake) return mistake;
  // The collective is named by its caller.
  const std::string site = mistake->place.substr(0, mistake->place.find(','));
  const std::string caller = site.substr(site.find(" of ") + 4);
  mistake->place += first ? ", on the first rank" : ", on the last rank";
  mistake->named_by = [=, by_site = mistake->named_by](const check::Finding& finding) {
    const bool is_kind =
        finding.kind == FindingKind::kOrder || finding.kind == FindingKind::kRefused;
    return by_site(finding) || (is_kind && says(finding, caller));
  };
  return mistake;
}

/// One data rank takes its own labels for those of all.
std::optional<Mistake> sum_skipped(Draws& draws, const Ground& ground) {
  const auto ranks = static_cast<std::size_t>(ground.run.dims.world_size());
  const auto skips = static_cast<int>(draws.below(ranks));
  Mistake mistake{
      .kind = Kind::kSkippedOnOneRank,
      .place = concat("sum of labels on rank ", skips),
      .changes = {},
      .named_by = [](const check::Finding& finding) {
        return (finding.kind == FindingKind::kOrder || finding.kind == FindingKind::kRefused) &&
               (says(finding, "values of a step") || says(finding, "counts of a step"));
      }};
  mistake.changes.data_ranks = [=](const RankParts& rank) -> Changes::DataRanks {
    const auto& world = *rank.mesh.world();
    const bool is_this = world.rank() == skips % world.size();
    return [=](train::RankSum what, comm::Group* data) -> comm::Group* {
      if (!is_this || data == nullptr || what != train::RankSum::kLabels) return data;
      rank.act();
      return nullptr;
    };
  };
  return mistake;
}

/// Before the update of its second step a rank's parameter becomes another one.
std::optional<Mistake> drifts(Draws& draws, const Ground& ground) {
  const auto over = draw_replicated(draws, ground);
  if (!over) return std::nullopt;
  Mistake mistake = of_replicated(Kind::kReplicaDrifts, *over);
  struct OfRank {
    const ShardedBase* model = nullptr;
    int steps = 0;
  };
  const auto ranks = std::make_shared<std::vector<OfRank>>(ground.layout.ranks());
  const auto of_rank = [=](const Mesh& mesh) -> OfRank& {
    return ranks->at(static_cast<std::size_t>(mesh.world()->rank()));
  };
  mistake.changes.model = [=](const Mesh& mesh, ShardedBase& model, const Act& /*act*/) {
    of_rank(mesh) = {&model, 0};
  };
  mistake.changes.sum_of_norm = [=, over = *over](const RankParts& rank) -> Changes::SumOfNorm {
    return [=](double mine, comm::Group* replica) {
      OfRank& here = of_rank(rank.mesh);
      if (++here.steps == 2 && over.change_on(rank.mesh, *here.model)) rank.act();
      return sum_over(replica, mine);
    };
  };
  return mistake;
}

}  // namespace

std::optional<Mistake> held_back_runs(Kind kind, Draws& draws, const Ground& ground) {
  switch (kind) {
    case Kind::kAuxiliaryLossOfOwnTokens:
      return auxiliary_loss_of_own_tokens();
    case Kind::kSkippedOnOneRank: {
      auto mistake = transition_skipped(draws, ground);
      return mistake ? mistake : sum_skipped(draws, ground);
    }
    case Kind::kReplicaDrifts:
      return drifts(draws, ground);
    default:
      return std::nullopt;
  }
}

}  // namespace tessera::mistakes
