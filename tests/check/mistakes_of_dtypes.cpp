// Known kinds of wrong dtypes: seen in runs of 16 bits alone.
#include <ATen/ATen.h>

#include <optional>

#include "check/mistakes_by_area.h"

namespace tessera::mistakes {
namespace {

using parallel::Transition;

bool says_float32(const check::Finding& finding) {
  return says(finding, "float32") || says(finding, "32 bits");
}

/// A transition returns float32 where it got 16 bits.
std::optional<Mistake> not_cast(Draws& draws, const Ground& ground) {
  auto mistake =
      at_a_site(Kind::kMissingCast, draws, ground,
                {[](const Site& site) {
                   return site.is_forward && (site.sums() || site.kind == "all_gather");
                 },
                 [](const Site&, const RankParts&) {
                   return Instead{[](const Transition& of, const at::Tensor& x) {
                                    const bool narrow = x.scalar_type() == at::kBFloat16;
                                    return narrow ? of.forward(x).to(at::kFloat) : at::Tensor();
                                  },
                                  {}};
                 }});
  if (!mistake) return mistake;
  // Which of its operations meets the wide tensor first is the next unit's matter.
  mistake->named_by = [by_place = mistake->named_by](const check::Finding& finding) {
    return says_float32(finding) && (by_place(finding) || !finding.unit.empty());
  };
  return mistake;
}

std::optional<Mistake> reduced_narrower(Draws& draws, const Ground& ground) {
  const auto parameter =
      draw_parameter(draws, contracts_of_run(ground),
                     [](const GradContract& one) { return one.reduce == DType::kFloat32; });
  if (!parameter) return std::nullopt;
  Mistake mistake{.kind = Kind::kReduceNarrower,
                  .place = concat(parameter->name, ": reduced in bfloat16"),
                  .changes = {},
                  .named_by = [=](const check::Finding& finding) {
                    return has_parameter(finding, *parameter) && says(finding, "bfloat16");
                  }};
  mistake.changes.parts = [name = parameter->name](const RankParts& rank) {
    change_contract(rank, name, [](GradContract& each) { each.reduce = DType::kBFloat16; });
  };
  return mistake;
}

}  // namespace

std::optional<Mistake> dtypes(Kind kind, Draws& draws, const Ground& ground) {
  switch (kind) {
    case Kind::kMissingCast:
      return not_cast(draws, ground);
    case Kind::kReduceNarrower:
      return reduced_narrower(draws, ground);
    default:
      return std::nullopt;
  }
}

}  // namespace tessera::mistakes
