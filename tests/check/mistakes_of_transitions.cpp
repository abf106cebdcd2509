// Known kinds of wrong transitions: forwards and backwards that do not belong together.
#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <vector>

#include "check/mistakes_by_area.h"
#include "parallel/collectives.h"
#include "parallel/transition.h"

namespace tessera::mistakes {
namespace {

using parallel::Transition;

at::Tensor as_it_is(const Transition& /*of*/, const at::Tensor& x) { return x; }

at::Tensor own_part(const Transition& of, const at::Tensor& x) {
  return parallel::own_part(x, of.axis, of.form().dim);
}

/// Replaces a summing direction, without the sum.
Instead without_sum(const Site& site) {
  const bool cuts = site.kind == "reduce_scatter" || site.kind == "all_gather";
  const Instead::Way way = cuts ? own_part : as_it_is;
  return site.is_forward ? Instead{way, {}} : Instead{{}, way};
}

Instead summed_again_in_backward() {
  return {{}, [](const Transition& of, const at::Tensor& grad) {
            return parallel::exchange_sum(of.backward(grad), of.axis, std::nullopt, "once more");
          }};
}

/// Sums are formed over `other`, which may have one rank in another layout: then nothing is summed.
Instead summed_over(const Site& site, const parallel::Axis& other) {
  const auto way = [=](const Transition& of, const at::Tensor& x) {
    const bool cuts = of.kind == "reduce_scatter" || of.kind == "all_gather";
    const at::Tensor sum =
        other.alone() ? x : parallel::exchange_sum(x.contiguous(), other, std::nullopt, of.where);
    return cuts ? own_part(of, sum) : sum;
  };
  return site.is_forward ? Instead{way, {}} : Instead{{}, way};
}

std::optional<Mistake> over_another_axis(Draws& draws, const Ground& ground) {
  std::vector<std::string_view> others;
  const auto& dims = ground.run.dims;
  if (dims.dp_shard > 1) others.push_back(axis::kShard);
  if (dims.dp_replicate > 1) others.push_back(axis::kReplicate);
  if (others.empty()) return std::nullopt;
  const std::string other(pick(draws, others));
  auto mistake = at_a_site(Kind::kWrongAxis, draws, ground,
                           {[](const Site& site) { return site.sums() && site.axis == "tp"; },
                            [=](const Site& site, const RankParts& rank) {
                              return summed_over(site, parallel::axis_of(rank.mesh, other));
                            }});
  if (mistake) mistake->place += concat(", summed over ", other);
  return mistake;
}

Instead nothing_goes_back(const Site& /*site*/, const RankParts& /*rank*/) {
  return {{}, [](const Transition& of, const at::Tensor& grad) {
            const auto form = of.form();
            if (of.kind == "all_gather") return at::zeros_like(own_part(of, grad));
            auto sizes = grad.sizes().vec();
            sizes[static_cast<std::size_t>(form.dim)] = form.total.value();
            return at::zeros(sizes, grad.options());
          }};
}

Instead gathered_in_backward(const Site& /*site*/, const RankParts& /*rank*/) {
  return {{}, [](const Transition& of, const at::Tensor& grad) {
            const auto form = of.form();
            return parallel::exchange_gather(grad, of.axis, {form.dim, form.total}, "gathered");
          }};
}

/// The part of rank + 1, and a backward that belongs to it. Parts of other sizes stay.
Instead part_of_next_rank(const Site& /*site*/, const RankParts& /*rank*/) {
  const auto is_even = [](const Transition& of) {
    return of.form().total.value() % of.axis.size == 0;
  };
  return {[=](const Transition& of, const at::Tensor& x) -> at::Tensor {
            if (!is_even(of)) return {};
            const auto form = of.form();
            const std::int64_t part = *form.total / of.axis.size;
            const at::Tensor whole =
                of.kind == "slice" ? x : parallel::exchange_sum(x, of.axis, std::nullopt, of.where);
            const std::int64_t next = (of.axis.rank + 1) % of.axis.size;
            return whole.narrow(form.dim, next * part, part).contiguous();
          },
          [=](const Transition& of, const at::Tensor& grad) -> at::Tensor {
            if (!is_even(of)) return {};
            const auto form = of.form();
            return of.backward(grad).roll(*form.total / of.axis.size, form.dim);
          }};
}

bool sums_forward(const Site& site) { return site.is_forward && site.sums(); }

bool is_bias(const Site& site, std::int64_t hidden) {
  return site.kind == "only_first" && site.is_forward && !site.sizes.empty() &&
         site.sizes.back() == hidden;
}

/// Each rank adds what one of them has to, and takes its gradient. Biases go this way, and so do
/// counts and probabilities of a router's load.
std::optional<Mistake> bias_on_every_rank(Draws& draws, const Ground& ground) {
  const std::int64_t hidden = ground.run.source.spec.hidden_size;
  return at_a_site(Kind::kBiasOnEveryRank, draws, ground,
                   {[=](const Site& site) { return is_bias(site, hidden); },
                    [=](const Site& /*site*/, const RankParts& /*rank*/) {
                      const auto way = [=](const Transition& /*of*/, const at::Tensor& x) {
                        return x.size(-1) == hidden ? x : at::Tensor();
                      };
                      return Instead{way, way};
                    }});
}

Instead rounded_addends(const Site& site, const RankParts& /*rank*/) {
  const auto rounded = [](const at::Tensor& x) { return x.to(at::kBFloat16).to(at::kFloat); };
  if (site.is_forward) {
    return {[=](const Transition& of, const at::Tensor& x) {
              return x.scalar_type() == at::kFloat ? of.forward(rounded(x)) : at::Tensor();
            },
            {}};
  }
  return {{}, [=](const Transition& of, const at::Tensor& grad) {
            return grad.scalar_type() == at::kFloat ? of.backward(rounded(grad)) : at::Tensor();
          }};
}

}  // namespace

std::optional<Mistake> transitions(Kind kind, Draws& draws, const Ground& ground) {
  const auto at = [&](const std::function<bool(const Site&)>& fits, const auto& instead) {
    return at_a_site(kind, draws, ground, {fits, instead});
  };
  switch (kind) {
    case Kind::kDroppedSumForward:
      return at(sums_forward, [](const Site& site, const RankParts&) { return without_sum(site); });
    case Kind::kDroppedSumBackward:
      return at([](const Site& site) { return !site.is_forward && site.kind == "copy"; },
                [](const Site& site, const RankParts&) { return without_sum(site); });
    case Kind::kDoubledSumBackward:
      return at(
          [](const Site& site) {
            return !site.is_forward && (site.kind == "reduce_scatter" ||
                                        (site.kind == "all_reduce" && site.is_invariant));
          },
          [](const Site&, const RankParts&) { return summed_again_in_backward(); });
    case Kind::kWrongAxis:
      return over_another_axis(draws, ground);
    case Kind::kBiasOnEveryRank:
      return bias_on_every_rank(draws, ground);
    case Kind::kDetachedGather:
      return at(
          [](const Site& site) {
            return !site.is_forward && (site.kind == "all_gather" || site.kind == "slice");
          },
          nothing_goes_back);
    case Kind::kPartialMetWithReduced:
      return at(
          [](const Site& site) {
            return !site.is_forward && site.kind == "all_gather" && !site.is_invariant;
          },
          [](const Site& site, const RankParts&) { return without_sum(site); });
    case Kind::kGatheredNotPadded:
      return at(
          [](const Site& site) {
            return !site.is_forward && site.kind == "slice" && !site.is_invariant;
          },
          gathered_in_backward);
    case Kind::kPartOfNextRank:
      return at(
          [](const Site& site) {
            return site.is_forward && (site.kind == "slice" || site.kind == "reduce_scatter");
          },
          part_of_next_rank);
    case Kind::kSumRoundsEarly:
      return at([](const Site& site) { return site.sums(); }, rounded_addends);
    default:
      return std::nullopt;
  }
}

}  // namespace tessera::mistakes
