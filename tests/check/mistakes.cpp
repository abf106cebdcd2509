#include "check/mistakes.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <tuple>

#include "check/mistakes_by_area.h"
#include "golden/faulty_run.h"
#include "train/contract_of_run.h"
#include "train/parallelize.h"

namespace tessera::mistakes {

const std::vector<KindOfMistake>& kinds() {
  using enum Use;
  static const std::vector<KindOfMistake> all{
#define TESSERA_MISTAKE(kind, use, what, seen) {Kind::k##kind, use, #kind, what, seen},
#include "check/kinds.def"
#undef TESSERA_MISTAKE
  };
  return all;
}

const KindOfMistake& of(Kind kind) { return kinds().at(static_cast<std::size_t>(kind)); }

Finder finder_of(Kind kind) {
  const bool is_of_replicas = kind == Kind::kReplicaBeginsElsewhere || kind == Kind::kReplicaDrifts;
  return is_of_replicas ? Finder::kGuard : Finder::kCheck;
}

std::optional<Mistake> draw_mistake(Kind kind, Draws& draws, const Ground& ground) {
  for (Drawing* area : {transitions, contracts, sources, dtypes, numbers, orders, replicas,
                        held_back_transitions, held_back_contracts, held_back_runs}) {
    if (auto drawn = area(kind, draws, ground)) return drawn;
  }
  return std::nullopt;
}

namespace {

bool needs_tensor_ranks(Kind kind) {
  using enum Kind;
  static const std::set<Kind> all{
      kDroppedSumForward,    kDroppedSumBackward, kDoubledSumForward,
      kDoubledSumBackward,   kWrongAxis,          kBiasOnEveryRank,
      kDetachedGather,       kGatheredNotPadded,  kPartialMetWithReduced,
      kPartOfNextRank,       kSamePartEverywhere, kJoinedInWrongOrder,
      kMeanForSum,           kReductionExtra,     kPlacementOfAnotherDim,
      kLayerAgainstContract, kMissingCast,        kSumRoundsEarly};
  return all.contains(kind);
}

bool is_of_dtypes(Kind kind) {
  using enum Kind;
  return kind == kReduceNarrower || kind == kAccumulateNarrower || kind == kMissingCast ||
         kind == kStateNarrower;
}

bool needs_experts(Kind kind) {
  using enum Kind;
  return kind == kRowsToAnotherRank || kind == kReductionOnWrongAxis ||
         kind == kAuxiliaryLossOfOwnTokens || kind == kBiasOfOwnTokens ||
         kind == kGatheredNotPadded;
}

bool suits_experts(Kind kind, Drawn& layout) {
  using enum Kind;
  if (!needs_experts(kind)) return true;
  if (!layout.routed) return false;
  if (kind == kAuxiliaryLossOfOwnTokens) {
    if (layout.frozen || layout.adapters != Drawn::Adapters::kNone) return false;
    layout.aux_loss_coef = 0.01;
  }
  if (kind == kAuxiliaryLossOfOwnTokens || kind == kBiasOfOwnTokens) {
    return layout.replicate * layout.shard > 1;
  }
  if (kind == kRowsToAnotherRank) return layout.ep > 1;
  if (kind == kReductionOnWrongAxis) return layout.ep > 1 || layout.etp > 1;
  return true;
}

}  // namespace

bool suit(Kind kind, Drawn& layout) {
  using enum Kind;
  if (is_of_dtypes(kind)) layout.dtype = "bfloat16";
  if (kind == kReduceNarrower || kind == kAccumulateNarrower) layout.bf16_wire = false;
  if (kind == kPartialMetWithReduced) layout.sequence = true;
  if (needs_tensor_ranks(kind) && layout.tp == 1) return false;
  if (kind == kWrongAxis && layout.replicate * layout.shard == 1) return false;
  if (kind == kMessageOfAnotherMicroBatch) {
    if (layout.pp == 1) return false;
    layout.frozen = false;  // no gradient is due where what is before is frozen
  }
  // The layers of a rank are reduced one after the other.
  if (kind == kOrderOfOneRank && (layout.pp > 1 || layout.shard == 1)) return false;
  if (kind == kBiasOnEveryRank) {
    if (layout.family != "gpt-oss" && layout.family != "gpt2") return false;
    layout.adapters = Drawn::Adapters::kNone;  // with which biases stay the zeros that they are
  }
  if (finder_of(kind) == Finder::kGuard && layout.replicate == 1 && layout.tp == 1) return false;
  return suits_experts(kind, layout);
}

void suit(Kind kind, train::Config& config) {
  if (kind == Kind::kBiasOfOwnTokens) config.model.load_balance_coeff = 1e-3;
}

bool Site::is(const parallel::Transition& of) const {
  return of.kind == kind && of.where == where && of.axis.name == axis &&
         of.form().is_invariant == is_invariant && (unit.empty() || is_in_unit(unit));
}

bool Site::sums() const {
  if (is_forward) return kind == "all_reduce" || kind == "reduce_scatter";
  return kind == "copy" || ((kind == "all_reduce" || kind == "all_gather") && !is_invariant);
}

std::string Site::text() const {
  return concat(kind, " of ", where, is_forward ? ", forward" : ", backward", ", over ", axis,
                unit.empty() ? "" : ", in unit " + unit);
}

std::vector<Site> sites_of(const train::SeenRun& seen) {
  std::vector<Site> sites;
  std::set<std::tuple<std::string, std::string, std::string, std::string, bool, bool>> known;
  for (const train::SeenRank& rank : seen.steps.front().ranks) {
    for (const check::SeenTransition& one : rank.transitions) {
      if (!known.emplace(one.kind, one.where, one.unit, one.axis, one.is_forward, one.is_invariant)
               .second) {
        continue;
      }
      sites.push_back({one.kind, one.where, one.axis, one.unit, one.is_forward, one.is_invariant,
                       one.dim, one.given.sizes});
    }
  }
  return sites;
}

std::optional<Mistake> at_a_site(Kind kind, Draws& draws, const Ground& ground,
                                 const WayAtSite& way) {
  std::vector<Site> all;
  for (const Site& site : sites_of(ground.seen())) {
    if (way.fits(site)) all.push_back(site);
  }
  if (all.empty()) return std::nullopt;
  Site site = pick(draws, all);
  // The root runs between its layers.
  const bool in_layer = site.unit.find("layers.") != std::string::npos;
  if (!in_layer || draws.below(2) == 0) site.unit.clear();
  Mistake mistake{.kind = kind, .place = site.text(), .changes = {}, .named_by = {}};
  const auto instead = way.instead;
  mistake.changes.transitions = [=](const RankParts& rank) {
    Instead changed = instead(site, rank);
    for (Instead::Way* direction : {&changed.forward, &changed.backward}) {
      if (!*direction) continue;
      *direction = [=, there = *direction](const parallel::Transition& one, const at::Tensor& x) {
        return site.is(one) ? there(one, x) : at::Tensor();
      };
    }
    return changed;
  };
  mistake.named_by = [=](const check::Finding& finding) {
    return finding.operation.starts_with(concat(site.kind, " of ", site.where, ", ")) &&
           has_axis(finding, site.axis);
  };
  return mistake;
}

Mistake of_parameter(Kind kind, const GradContract& parameter, const std::string& axis,
                     const std::string& how) {
  return {.kind = kind,
          .place = concat(parameter.name, axis.empty() ? "" : ", over " + axis, ": ", how),
          .changes = {},
          .named_by = [=](const check::Finding& finding) {
            return has_parameter(finding, parameter) && (axis.empty() || has_axis(finding, axis));
          }};
}

Mistake of_number(Kind kind, const std::string& number, const std::string& place) {
  return {
      .kind = kind, .place = place, .changes = {}, .named_by = [=](const check::Finding& finding) {
        return finding.operation == number;
      }};
}

std::function<std::unique_ptr<golden::SumStandIn>(const RankParts&)> other_sum(train::RankSum what,
                                                                               const SumWay& way) {
  return [=](const RankParts& rank) {
    return std::make_unique<golden::SumStandIn>(
        [=](train::RankSum of, const golden::SumStandIn::Values& of_ranks) {
          auto right = train::added_by_rank(of_ranks);
          if (of != what) return right;
          auto values = way(rank.mesh, of_ranks, right);
          if (values != right) rank.act();
          return values;
        });
  };
}

std::size_t place_of(const Mesh& mesh, int tensor) {
  return static_cast<std::size_t>(train::data_rank(mesh) * mesh.size_of(axis::kTensor) + tensor);
}

namespace {

/// Without images nothing of a tower for them is part of a step.
std::vector<GradContract> trained(ModelContract model) {
  std::erase_if(model.parameters, [](const GradContract& one) {
    return !one.trainable || one.name.find("vision") != std::string::npos;
  });
  return model.parameters;
}

}  // namespace

std::vector<GradContract> contracts_of(const Ground& ground) {
  const auto& run = ground.run;
  return trained(train::resolve_model(run.source, run.config, run.dims));
}

std::vector<GradContract> contracts_of_run(const Ground& ground) {
  const auto dims = train::resolve_parallelism(ground.config.parallelism, ground.layout.ranks());
  return trained(train::resolve_model(ground.source, ground.config, dims));
}

std::optional<GradContract> draw_parameter(Draws& draws, const std::vector<GradContract>& all,
                                           const std::function<bool(const GradContract&)>& fits) {
  std::vector<GradContract> fitting;
  std::ranges::copy_if(all, std::back_inserter(fitting), fits);
  if (fitting.empty()) return std::nullopt;
  return pick(draws, fitting);
}

GradContract* contract_in(const RankParts& rank, const std::string& name) {
  auto& all = rank.parts.contract.parameters;
  const auto found = std::ranges::find(all, name, &GradContract::name);
  return found == all.end() ? nullptr : &*found;
}

bool has_parameter(const RankParts& rank, const std::string& name) {
  return rank.parts.model->named_parameters().contains(name);
}

void change_contract(const RankParts& rank, const std::string& name,
                     const std::function<void(GradContract&)>& change) {
  GradContract* const contract = contract_in(rank, name);
  if (contract == nullptr) return;
  const GradContract before = *contract;
  change(*contract);
  if (!(*contract == before)) rank.act();
}

void declare_layout(const RankParts& rank, const std::string& name, const ParameterLayout& layout) {
  if (has_parameter(rank, name)) golden::declare(rank, name, layout);
}

void contract_layout(const RankParts& rank, const std::string& name,
                     const ParameterLayout& layout) {
  const DataAxes data(rank.mesh.shapes(), 1.0);
  change_contract(rank, name, [&](GradContract& each) {
    each.layout = layout;
    each.reductions = reductions_of(layout, data, each.name);
  });
}

void change_raw_gradients(const RankParts& rank, const std::string& name,
                          const std::function<at::Tensor(const at::Tensor&)>& change) {
  golden::on_raw_gradient(rank, name, [=](const at::Tensor& raw) {
    if (!raw.defined()) return raw;  // one that is deferred comes by another way
    at::Tensor changed = change(raw);
    return changed.defined() ? changed : raw;
  });
}

std::string base_axis(std::string_view axis) {
  if (axis == "dp_shard_mod_ep") return "dp_shard";
  if (axis.starts_with("tp_")) return "tp";
  return std::string(axis);
}

namespace {

bool is_of_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

bool has_word(std::string_view text, std::string_view word) {
  for (auto at = text.find(word); at != text.npos; at = text.find(word, at + 1)) {
    const auto end = at + word.size();
    if ((at == 0 || !is_of_name(text[at - 1])) && (end == text.size() || !is_of_name(text[end]))) {
      return true;
    }
  }
  return false;
}

}  // namespace

bool has_axis(const check::Finding& finding, std::string_view axis) {
  if (!finding.axis.empty() || finding.kind != check::FindingKind::kRefused) {
    return base_axis(finding.axis) == base_axis(axis);
  }
  // Behind it refusals list all axes.
  return has_word(finding.found.substr(0, finding.found.find(" on the mesh")), axis);
}

bool has_parameter(const check::Finding& finding, const GradContract& parameter) {
  std::vector<std::string> names = parameter.aliases;
  names.push_back(parameter.name);
  return std::ranges::any_of(names, [&](const std::string& name) {
    return finding.parameter == name ||
           (finding.kind == check::FindingKind::kRefused && says(finding, name));
  });
}

bool says(const check::Finding& finding, std::string_view text) {
  return finding.found.find(text) != std::string::npos ||
         finding.expected.find(text) != std::string::npos;
}

}  // namespace tessera::mistakes
