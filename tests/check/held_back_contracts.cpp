// Held-back kinds of wrong contracts, of wrong dtypes in them, and of sources of a gradient.
#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "check/mistakes_by_area.h"

namespace tessera::mistakes {
namespace {

const std::vector<std::int64_t>& dims_of(const GradContract& contract) {
  const auto& cut = contract.layout.sharded_shape;
  return cut.empty() ? contract.shape : cut;
}

/// The first axis of such a placement; null where there is none.
template <class Contract>
auto axis_with(Contract& contract, PlacementKind parameter)
    -> decltype(contract.layout.axes.data()) {
  for (auto& one : contract.layout.axes) {
    if (one.parameter.kind == parameter) return &one;
  }
  return nullptr;
}

/// Layer and contract say so, on all ranks on which `change` changes it.
void place(const RankParts& rank, const std::string& name,
           const std::function<bool(GradContract&)>& change) {
  const GradContract* const right = contract_in(rank, name);
  if (right == nullptr) return;
  GradContract changed = *right;
  if (!change(changed)) return;
  contract_layout(rank, name, changed.layout);
  declare_layout(rank, name, changed.layout);
}

std::optional<Mistake> summed_though_whole(Draws& draws, const Ground& ground) {
  const auto parameter = draw_parameter(draws, contracts_of(ground), [](const GradContract& one) {
    return axis_with(one, PlacementKind::kInvariant) != nullptr;
  });
  if (!parameter) return std::nullopt;
  const auto axis = base_axis(axis_with(*parameter, PlacementKind::kInvariant)->axis);
  auto mistake = of_parameter(Kind::kReductionExtra, *parameter, axis, "declared R");
  mistake.changes.parts = [name = parameter->name](const RankParts& rank) {
    place(rank, name, [](GradContract& each) {
      auto* const one = axis_with(each, PlacementKind::kInvariant);
      if (one == nullptr) return false;
      *one = AxisPlacement::partial(one->axis, one->size);
      return true;
    });
  };
  return mistake;
}

std::optional<Mistake> cut_along_another(Draws& draws, const Ground& ground) {
  const auto other_dim = [](const GradContract& one, const AxisPlacement& axis) {
    const auto& dims = dims_of(one);
    for (int dim = 0; dim < std::ssize(dims); ++dim) {
      if (dim != axis.parameter.dim && dims[static_cast<std::size_t>(dim)] % axis.size == 0) {
        return dim;
      }
    }
    return -1;
  };
  const auto parameter = draw_parameter(draws, contracts_of(ground), [&](const GradContract& one) {
    const auto* axis = axis_with(one, PlacementKind::kShard);
    return axis != nullptr && other_dim(one, *axis) >= 0;
  });
  if (!parameter) return std::nullopt;
  auto mistake =
      of_parameter(Kind::kPlacementOfAnotherDim, *parameter, "", "cut along another dim");
  mistake.changes.parts = [=, name = parameter->name](const RankParts& rank) {
    place(rank, name, [&](GradContract& each) {
      auto* const one = axis_with(each, PlacementKind::kShard);
      const int dim = one == nullptr ? -1 : other_dim(each, *one);
      if (dim >= 0) *one = AxisPlacement::shard(one->axis, one->size, dim);
      return dim >= 0;
    });
  };
  return mistake;
}

std::optional<Mistake> narrower(Kind kind, Draws& draws, const Ground& ground,
                                DType GradContract::* field) {
  const auto parameter =
      draw_parameter(draws, contracts_of_run(ground),
                     [=](const GradContract& one) { return one.*field == DType::kFloat32; });
  if (!parameter) return std::nullopt;
  auto mistake = of_parameter(kind, *parameter, "", "in bfloat16");
  mistake.changes.parts = [=, name = parameter->name](const RankParts& rank) {
    change_contract(rank, name, [=](GradContract& each) { each.*field = DType::kBFloat16; });
  };
  mistake.named_by = [by_parameter = mistake.named_by](const check::Finding& finding) {
    return by_parameter(finding) && says(finding, "bfloat16");
  };
  return mistake;
}

/// Each contribution comes twice, or each second one does.
std::optional<Mistake> twice(Draws& draws, const Ground& ground) {
  const auto parameter =
      draw_parameter(draws, contracts_of(ground), [](const GradContract&) { return true; });
  if (!parameter) return std::nullopt;
  const bool all = draws.below(2) == 0;
  auto mistake = of_parameter(Kind::kGradientTwice, *parameter, "",
                              all ? "each one twice" : "each second one twice");
  mistake.changes.parts = [=, name = parameter->name](const RankParts& rank) {
    change_raw_gradients(rank, name, [=, count = std::make_shared<int>(0)](const at::Tensor& raw) {
      const bool again = all || (*count)++ % 2 == 1;
      return again ? raw + raw : at::Tensor();
    });
  };
  return mistake;
}

}  // namespace

std::optional<Mistake> held_back_contracts(Kind kind, Draws& draws, const Ground& ground) {
  switch (kind) {
    case Kind::kReductionExtra:
      return summed_though_whole(draws, ground);
    case Kind::kPlacementOfAnotherDim:
      return cut_along_another(draws, ground);
    case Kind::kAccumulateNarrower:
      return narrower(kind, draws, ground, &GradContract::accumulate);
    case Kind::kStateNarrower:
      return narrower(kind, draws, ground, &GradContract::state);
    case Kind::kGradientTwice:
      return twice(draws, ground);
    default:
      return std::nullopt;
  }
}

}  // namespace tessera::mistakes
