// Known kinds of mistakes on a gradient's way from autograd to its slot.
#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "check/mistakes_by_area.h"

namespace tessera::mistakes {
namespace {

/// With the parameter's name.
std::optional<std::pair<Mistake, std::string>> of_raw_gradients(Kind kind, Draws& draws,
                                                                const Ground& ground,
                                                                const std::string& how) {
  const auto parameter =
      draw_parameter(draws, contracts_of(ground), [](const GradContract&) { return true; });
  if (!parameter) return std::nullopt;
  return std::pair{of_parameter(kind, *parameter, "", how), parameter->name};
}

/// Each raw gradient comes one backward late: that of the last one is left for the next step.
std::optional<Mistake> past_its_reduce(Draws& draws, const Ground& ground) {
  auto found = of_raw_gradients(Kind::kGradientPastItsReduce, draws, ground, "one backward late");
  if (!found) return std::nullopt;
  auto& [mistake, parameter] = *found;
  mistake.changes.parts = [name = parameter](const RankParts& rank) {
    const auto held = std::make_shared<at::Tensor>();
    change_raw_gradients(rank, name, [held](const at::Tensor& raw) {
      at::Tensor late = held->defined() ? *held : at::zeros_like(raw);
      *held = raw.clone();
      return late;
    });
  };
  return mistake;
}

/// Notes each gradient, and after it was added the slot holds it alone.
std::optional<Mistake> overwrites(Draws& draws, const Ground& ground) {
  auto found =
      of_raw_gradients(Kind::kGradientOverwrites, draws, ground, "the last one replaces all");
  if (!found) return std::nullopt;
  auto& [mistake, parameter] = *found;
  mistake.changes.accepted = [name = parameter](const RankParts& rank) -> Changes::Accepted {
    const auto noted = std::make_shared<at::Tensor>();
    change_raw_gradients(rank, name, [noted](const at::Tensor& raw) {
      *noted = raw.clone();
      return at::Tensor();
    });
    return [=](const GradContract& contract, const at::Tensor& slot) {
      if (contract.name != name || !noted->defined() || noted->sizes() != slot.sizes()) return;
      if (!at::equal(slot, noted->to(slot.scalar_type()))) {
        slot.copy_(*noted);
        rank.act();
      }
      noted->reset();
    };
  };
  return mistake;
}

std::optional<Mistake> rounded(Draws& draws, const Ground& ground) {
  auto found = of_raw_gradients(Kind::kRawGradientRounded, draws, ground, "rounded to bfloat16");
  if (!found) return std::nullopt;
  auto& [mistake, parameter] = *found;
  mistake.changes.parts = [name = parameter](const RankParts& rank) {
    change_raw_gradients(rank, name, [](const at::Tensor& raw) {
      return raw.scalar_type() == at::kFloat ? raw.to(at::kBFloat16).to(at::kFloat) : at::Tensor();
    });
  };
  return mistake;
}

}  // namespace

std::optional<Mistake> sources(Kind kind, Draws& draws, const Ground& ground) {
  switch (kind) {
    case Kind::kGradientPastItsReduce:
      return past_its_reduce(draws, ground);
    case Kind::kGradientOverwrites:
      return overwrites(draws, ground);
    case Kind::kRawGradientRounded:
      return rounded(draws, ground);
    default:
      return std::nullopt;
  }
}

}  // namespace tessera::mistakes
