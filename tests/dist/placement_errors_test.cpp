// Declarations that would sum a gradient twice or not at all, or that ranks do not share: one error
// that names the parameter.

#include "dist/cut_modules.h"
#include "support/test.h"

namespace tessera::test::placement_errors_test {
namespace {

Mesh tensor_mesh(World& world) { return world.mesh(MeshShape::dense(1, 1, 1, 1, world.size())); }

std::vector<std::string> errors_with(const std::map<std::string, ParameterLayout>& layouts) {
  return errors_of(2, [&](World& world) {
    auto options = undivided();
    options.layouts = layouts;
    fully_shard(std::make_shared<Scale>(here(at::ones({4}))), tensor_mesh(world), {}, options);
  });
}

std::vector<std::string> errors_with(PlacementKind parameter, PlacementKind gradient) {
  ParameterLayout layout;
  layout.axes = {{"tp", 2, {parameter}, {gradient}}};
  return errors_with({{"weight", layout}});
}

TEST(PlacementErrors, PairsThatSumTwiceOrNotAtAll) {
  using enum PlacementKind;
  for (const auto& [parameter, gradient, shown] :
       {std::tuple{kReplicate, kReplicate, "tp 2 R, gradient R"},
        std::tuple{kInvariant, kPartial, "tp 2 I, gradient P"},
        std::tuple{kShard, kPartial, "tp 2 S(0), gradient P"}}) {
    EXPECT_THAT(errors_with(parameter, gradient),
                Each(Says("weight", shown, "summed twice or not at all")));
  }
}

TEST(PlacementErrors, NothingDeclaredOverSeveralRanks) {
  EXPECT_THAT(errors_with(std::map<std::string, ParameterLayout>()),
              Each(Says("weight", "no placement on the axis tp of 2 ranks", "DeclaresLayouts")));
}

TEST(PlacementErrors, AxesThatTheMeshDoesNotHave) {
  ParameterLayout layout;
  layout.axes = {partial("tp", 4)};
  EXPECT_THAT(errors_with({{"weight", layout}}), Each(Says("weight", "tp 4 R, gradient P")));
  layout.axes = {partial("dp_shard", 2)};
  EXPECT_THAT(errors_with({{"weight", layout}}), Each(Says("expected one on tp")));
  layout.axes = {partial("tp", 2), partial("tp_rep/2", 2)};
  EXPECT_THAT(errors_with({{"weight", layout}}), Each(Says("a placement over 4 ranks")));
}

TEST(PlacementErrors, APathThatNoParameterHas) {
  const auto layout = layout_on(MeshKind::kDense, {partial("tp", 2)});
  EXPECT_THAT(errors_with({{"weight", layout}, {"wieght", layout}}),
              Each(Says("wieght", "ShardOptions::layouts")));
}

TEST(PlacementErrors, RanksThatDeclareDifferently) {
  const auto errors = errors_of(2, [](World& world) {
    auto options = undivided();
    const auto layout = world.rank() == 0 ? partial("tp", 2) : invariant("tp", 2);
    options.layouts = {{"weight", layout_on(MeshKind::kDense, {layout})}};
    fully_shard(std::make_shared<Scale>(here(at::ones({4}))), tensor_mesh(world), {}, options);
  });
  EXPECT_THAT(errors, Each(Says("contracts differ between ranks", "weight", "rank 1")));
}

/// Contracts of a CutBlock, of which `change` changes the one of `parameter`.
std::vector<std::string> errors_with_contract(const std::string& parameter,
                                              const std::function<void(GradContract&)>& change) {
  return errors_of(2, [&](World& world) {
    const auto mesh = tensor_mesh(world);
    auto block = std::make_shared<CutBlock>(mesh, 1);
    std::vector<ParameterMeta> metas;
    for (const auto& [name, value] : block_values(1)) {
      ParameterMeta meta;
      meta.name = name;
      meta.shape = value.sizes().vec();
      meta.dtype = DType::kFloat64;
      meta.layout = block->layouts.at(name);
      metas.push_back(meta);
    }
    auto contracts = resolve_contracts(metas, {}, DataAxes(mesh.shapes(), 1.0));
    for (auto& contract : contracts) {
      if (contract.name == parameter) change(contract);
    }
    auto options = undivided();
    options.contracts = std::make_shared<const std::vector<GradContract>>(std::move(contracts));
    fully_shard(block, mesh, {}, options);
  });
}

TEST(PlacementErrors, AContractThatIsNotWhatTheModuleDoes) {
  EXPECT_THAT(errors_with_contract("norm", [](GradContract&) {}), Each(""));
  EXPECT_THAT(
      errors_with_contract(
          "norm", [](GradContract& contract) { contract.layout.axes = {invariant("tp", 2)}; }),
      Each(Says("parameter norm", "tp 2 I, gradient I", "tp 2 R, gradient P by its module")));
  EXPECT_THAT(errors_with_contract("w2", [](GradContract& contract) { contract.shape[0] *= 2; }),
              Each(Says("parameter w2", "another shape")));
}

// Naive: groups made from the contract, not the mesh: summed on one rank alone.
TEST(PlacementErrors, AContractThatNeedsOtherSums) {
  EXPECT_THAT(errors_with_contract(
                  "norm", [](GradContract& contract) { contract.reductions.shard_axes.clear(); }),
              Each(Says("parameter norm", "no sum", "sum over tp")));
}

class TwoScales : public torch::nn::Module, public DeclaresLayouts {
 public:
  TwoScales(at::Tensor weight, AxisPlacement axis)
      : axis_(std::move(axis)), weight_(register_parameter("weight", std::move(weight))) {}
  ParameterLayout layout_of(const std::string&) const override {
    return layout_on(MeshKind::kDense, {axis_});
  }
  at::Tensor forward(const at::Tensor& x) { return x * weight_; }

 private:
  AxisPlacement axis_;
  at::Tensor weight_;
};

class Pair : public torch::nn::Module {
 public:
  explicit Pair(const AxisPlacement& second) {
    const auto weight = here(at::ones({4}));
    register_module("a", std::make_shared<TwoScales>(weight, partial("tp", 2)));
    register_module("b", std::make_shared<TwoScales>(weight, second));
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
};

TEST(PlacementErrors, TiedParametersWhoseModulesDisagree) {
  const auto errors = [](const AxisPlacement& second) {
    return errors_of(2, [&](World& world) {
      fully_shard(std::make_shared<Pair>(second), tensor_mesh(world), {}, undivided());
    });
  };
  EXPECT_THAT(errors(partial("tp", 2)), Each(""));
  EXPECT_THAT(errors(invariant("tp", 2)),
              Each(Says("tied parameters a.weight and b.weight", "tp 2 I, gradient I")));
}

// Units on one mesh: another sparse reading is another mesh.
TEST(PlacementErrors, PartsOnAnotherReadingOfTheRanks) {
  const auto errors = errors_of(2, [](World& world) {
    const Mesh one =
        world.mesh({MeshShape::dense(1, 1, 2, 1, 1), MeshShape::sparse(1, 1, 1, 2, 1)});
    auto chain = std::make_shared<Chain>(3, 1, 4);
    chain->shard_blocks(one);
    fully_shard(chain, data_mesh(world));
  });
  EXPECT_THAT(errors, Each(Says("block0", "ep 2", "over one mesh")));
}

}  // namespace
}  // namespace tessera::test::placement_errors_test
