// Known kinds of wrong contracts, and of layers that are wrong about their parameters.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "check/mistakes_by_area.h"

namespace tessera::mistakes {
namespace {

const AxisPlacement* partial_axis(const GradContract& contract) {
  const auto& axes = contract.layout.axes;
  const auto found = std::ranges::find_if(
      axes, [](const auto& one) { return one.gradient.kind == PlacementKind::kPartial; });
  return found == axes.end() ? nullptr : &*found;
}

/// The layout of this rank's mesh with I where it has R on `axis`; none where it has not.
std::optional<ParameterLayout> unsummed(const RankParts& rank, const std::string& name,
                                        const std::string& axis) {
  const GradContract* contract = contract_in(rank, name);
  if (contract == nullptr) return std::nullopt;
  ParameterLayout layout = contract->layout;
  bool changed = false;
  for (AxisPlacement& one : layout.axes) {
    if (base_axis(one.axis) != axis || one.gradient.kind != PlacementKind::kPartial) continue;
    one = AxisPlacement::invariant(one.axis, one.size);
    changed = true;
  }
  return changed ? std::optional(layout) : std::nullopt;
}

/// Neither its layer nor its contract knows of the sum over an axis of the model.
std::optional<Mistake> unsummed_over_model_axis(Draws& draws, const Ground& ground) {
  const auto parameter = draw_parameter(draws, contracts_of(ground), [](const GradContract& one) {
    return partial_axis(one) != nullptr;
  });
  if (!parameter) return std::nullopt;
  const std::string axis = base_axis(partial_axis(*parameter)->axis);
  auto mistake = of_parameter(Kind::kReductionMissing, *parameter, axis, "declared I");
  mistake.changes.parts = [=, name = parameter->name](const RankParts& rank) {
    if (const auto layout = unsummed(rank, name, axis)) {
      contract_layout(rank, name, *layout);
      declare_layout(rank, name, *layout);
    }
  };
  return mistake;
}

/// An axis of the data is missing in the contract.
std::optional<Mistake> unsummed_over_data_axis(Draws& draws, const Ground& ground) {
  const auto data_axes = [](const GradContract& one) {
    std::vector<std::string> axes = one.reductions.replica_axes;
    for (const std::string& axis : one.reductions.shard_axes) {
      if (axis.starts_with("dp_shard")) axes.push_back(axis);
    }
    return axes;
  };
  const auto parameter = draw_parameter(draws, contracts_of(ground), [&](const GradContract& one) {
    return !data_axes(one).empty();
  });
  if (!parameter) return std::nullopt;
  const std::string axis = base_axis(pick(draws, data_axes(*parameter)));
  auto mistake = of_parameter(Kind::kReductionMissing, *parameter, axis, "not in its contract");
  mistake.changes.parts = [=, name = parameter->name](const RankParts& rank) {
    change_contract(rank, name, [&](GradContract& each) {
      for (auto* axes : {&each.reductions.shard_axes, &each.reductions.replica_axes}) {
        std::erase_if(*axes, [&](const auto& one) { return base_axis(one) == axis; });
      }
    });
  };
  return mistake;
}

bool is_expert(const GradContract& contract) {
  return contract.name.find("experts.") != std::string::npos &&
         contract.name.find("shared_expert") == std::string::npos;
}

/// Sums of experts that ranks of ep hold apart are formed over the data ranks of the dense mesh, those
/// of experts that are cut over tp over the ranks of tp.
std::optional<Mistake> summed_over_other_ranks(Draws& draws, const Ground& ground) {
  const auto parameter = draw_parameter(draws, contracts_of(ground), is_expert);
  if (!parameter) return std::nullopt;
  const auto& dims = ground.run.dims;
  const bool dense = dims.ep > 1 && (dims.etp == 1 || draws.below(2) == 0);
  if (dense && dims.dp_shard == 1) return std::nullopt;
  if (!dense && dims.etp == 1) return std::nullopt;
  const std::string axis = dense ? "ep" : "etp";
  auto mistake = of_parameter(Kind::kReductionOnWrongAxis, *parameter, "",
                              dense ? "summed over dp_shard" : "summed over tp, too");
  mistake.changes.parts = [=, name = parameter->name](const RankParts& rank) {
    if (rank.mesh.size_of(axis) == 1) return;
    change_contract(rank, name, [&](GradContract& each) {
      if (dense) {
        each.reductions.shard_axes = {"dp_shard"};
      } else {
        each.reductions.shard_axes.emplace_back("tp");
      }
    });
  };
  return mistake;
}

std::optional<Mistake> divided_by_another(Draws& draws, const Ground& ground) {
  const auto parameter =
      draw_parameter(draws, contracts_of(ground), [](const GradContract&) { return true; });
  if (!parameter) return std::nullopt;
  const double factor = draws.one_of({0.5, 2.0, 4.0});
  auto mistake = of_parameter(Kind::kWrongDivideFactor, *parameter, "", concat("/ ", factor));
  mistake.changes.parts = [=, name = parameter->name](const RankParts& rank) {
    change_contract(rank, name,
                    [&](GradContract& each) { each.reductions.divide_factor *= factor; });
  };
  return mistake;
}

/// One side says I, R or a cut where the other says what is right.
std::optional<Mistake> layer_against_contract(Draws& draws, const Ground& ground) {
  const auto parameter = draw_parameter(draws, contracts_of(ground), [](const GradContract& one) {
    return !one.layout.axes.empty();
  });
  if (!parameter) return std::nullopt;
  const auto& first = parameter->layout.axes.front();
  const std::string axis = base_axis(first.axis);
  const bool by_layer = draws.below(2) == 0;
  auto mistake = of_parameter(Kind::kLayerAgainstContract, *parameter, "",
                              concat("other over ", axis, by_layer ? " by its layer" : ""));
  mistake.changes.parts = [=, name = parameter->name](const RankParts& rank) {
    const GradContract* contract = contract_in(rank, name);
    if (contract == nullptr || contract->layout.axes.empty()) return;
    ParameterLayout layout = contract->layout;
    AxisPlacement& one = layout.axes.front();
    one = one.gradient.kind == PlacementKind::kInvariant
              ? AxisPlacement::partial(one.axis, one.size)
              : AxisPlacement::invariant(one.axis, one.size);
    by_layer ? declare_layout(rank, name, layout) : contract_layout(rank, name, layout);
  };
  return mistake;
}

}  // namespace

std::optional<Mistake> contracts(Kind kind, Draws& draws, const Ground& ground) {
  switch (kind) {
    case Kind::kReductionMissing: {
      const bool of_model = draws.below(2) == 0;
      auto mistake = of_model ? unsummed_over_model_axis(draws, ground)
                              : unsummed_over_data_axis(draws, ground);
      return mistake ? std::move(mistake) : unsummed_over_data_axis(draws, ground);
    }
    case Kind::kReductionOnWrongAxis:
      return summed_over_other_ranks(draws, ground);
    case Kind::kWrongDivideFactor:
      return divided_by_another(draws, ground);
    case Kind::kLayerAgainstContract:
      return layer_against_contract(draws, ground);
    default:
      return std::nullopt;
  }
}

}  // namespace tessera::mistakes
