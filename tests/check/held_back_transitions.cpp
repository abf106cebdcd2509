// Held-back kinds of wrong transitions.
#include <ATen/ATen.h>

#include <optional>

#include "check/mistakes_by_area.h"
#include "parallel/collectives.h"
#include "parallel/transition.h"

namespace tessera::mistakes {
namespace {

using parallel::Transition;

Instead in_direction(const Site& site, const Instead::Way& way) {
  return site.is_forward ? Instead{way, {}} : Instead{{}, way};
}

at::Tensor right(const Site& site, const Transition& of, const at::Tensor& x) {
  return site.is_forward ? of.forward(x) : of.backward(x);
}

Instead summed_twice(const Site& /*site*/, const RankParts& /*rank*/) {
  return {[](const Transition& of, const at::Tensor& x) {
            return of.forward(parallel::exchange_sum(x, of.axis, std::nullopt, "once more"));
          },
          {}};
}

Instead mean_for_sum(const Site& site, const RankParts& /*rank*/) {
  return in_direction(site, [=](const Transition& of, const at::Tensor& x) {
    return right(site, of, x) / of.axis.size;
  });
}

/// The first rank's part of the whole; parts of other sizes stay.
Instead first_part(const Site& /*site*/, const RankParts& /*rank*/) {
  return {[](const Transition& of, const at::Tensor& x) -> at::Tensor {
            const auto form = of.form();
            const std::int64_t whole = form.total.value();
            if (whole % of.axis.size != 0) return {};
            const at::Tensor from =
                of.kind == "slice" ? x : parallel::exchange_sum(x, of.axis, std::nullopt, of.where);
            return from.narrow(form.dim, 0, whole / of.axis.size).contiguous();
          },
          {}};
}

/// Part r comes from rank r + 1, and its gradient goes back there; parts of other sizes stay.
Instead joined_by_next_ranks(const Site& /*site*/, const RankParts& /*rank*/) {
  const auto part = [](const Transition& of, const at::Tensor& whole) -> std::int64_t {
    const std::int64_t total = whole.size(of.form().dim);
    return total % of.axis.size == 0 ? total / of.axis.size : 0;
  };
  return {[=](const Transition& of, const at::Tensor& x) -> at::Tensor {
            const at::Tensor whole = of.forward(x);
            const std::int64_t rows = part(of, whole);
            return rows == 0 ? at::Tensor() : whole.roll(-rows, of.form().dim);
          },
          [=](const Transition& of, const at::Tensor& grad) -> at::Tensor {
            const std::int64_t rows = part(of, grad);
            return rows == 0 ? at::Tensor() : of.backward(grad.roll(rows, of.form().dim));
          }};
}

/// Each token gets what the one before it was sent for.
Instead rows_of_others(const Site& /*site*/, const RankParts& /*rank*/) {
  return {[](const Transition& of, const at::Tensor& x) -> at::Tensor {
            const at::Tensor rows = of.forward(x);
            return rows.size(0) > 1 ? rows.roll(1, 0) : rows;
          },
          [](const Transition& of, const at::Tensor& grad) -> at::Tensor {
            return of.backward(grad.size(0) > 1 ? grad.roll(-1, 0) : grad);
          }};
}

}  // namespace

std::optional<Mistake> held_back_transitions(Kind kind, Draws& draws, const Ground& ground) {
  const auto at = [&](const std::function<bool(const Site&)>& fits, const auto& instead) {
    return at_a_site(kind, draws, ground, {fits, instead});
  };
  switch (kind) {
    case Kind::kDoubledSumForward:
      return at([](const Site& site) { return site.is_forward && site.sums(); }, summed_twice);
    case Kind::kMeanForSum:
      return at([](const Site& site) { return site.sums(); }, mean_for_sum);
    case Kind::kSamePartEverywhere:
      return at(
          [](const Site& site) {
            return site.is_forward && (site.kind == "slice" || site.kind == "reduce_scatter");
          },
          first_part);
    case Kind::kJoinedInWrongOrder:
      return at([](const Site& site) { return site.is_forward && site.kind == "all_gather"; },
                joined_by_next_ranks);
    case Kind::kRowsToAnotherRank:
      return at(
          [](const Site& site) {
            return site.is_forward && site.kind == "all_to_all" && site.where.ends_with("combine");
          },
          rows_of_others);
    default:
      return std::nullopt;
  }
}

}  // namespace tessera::mistakes
