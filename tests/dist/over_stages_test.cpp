// Rank 0's gradients of a model whose stages lie on several ranks: every gradient once, whole, from
// every stage.

#include "base/hash.h"
#include "fsdp/handle.h"
#include "grad/torch_dtype.h"
#include "support/plain.h"
#include "support/ranks.h"
#include "support/test.h"
#include "train/gradients.h"
#include "train/plan_of_run.h"

namespace tessera::test::over_stages_test {
namespace {

using ::testing::UnorderedElementsAre;

/// Parameters by name; values follow from the name.
class Named : public torch::nn::Module {
 public:
  explicit Named(const std::vector<std::string>& names) {
    for (const auto& name : names) register_parameter(name, whole(name));
  }
  /// Odd ones are in bfloat16.
  static at::Tensor whole(const std::string& name) {
    const auto dtype = name.size() % 2 == 0 ? at::kFloat : at::kBFloat16;
    return seeded(hash_bytes(name), {static_cast<std::int64_t>(name.size()), 5}, dtype);
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
};

using Stages = std::vector<std::vector<std::string>>;

struct Layout {
  Stages stages;
  int shards = 1;
  int replicas = 1;
};

/// "tied" is on the first and the last stage.
std::vector<Layout> layouts() {
  return {{{{"tied", "first", "second", "third_one"}}},
          {{{"tied", "first"}, {"second", "third_one", "tied"}}},
          {{{"tied"}, {"first", "second"}, {"third_one", "tied"}}, 2},
          {{{"tied", "first", "second"}, {"third_one", "tied"}}, 1, 2}};
}

/// As the gradient of the whole parameter.
at::Tensor gradient_of(const GradContract& contract) {
  return seeded(hash_bytes(contract.name, 7), contract.shape);
}

void for_each_layout(
    const std::function<void(World&, const Layout&, const Sharded<Named>&)>& body) {
  for (const auto& layout : layouts()) {
    const auto stages = static_cast<int>(layout.stages.size());
    ranks(stages * layout.shards * layout.replicas).run([&](World& world) {
      const Mesh mesh = world.mesh(MeshShape::dense(stages, layout.replicas, layout.shards, 1, 1));
      const auto own = static_cast<std::size_t>(mesh.coordinate(axis::kPipeline));
      const auto model =
          fully_shard(std::make_shared<Named>(layout.stages[own]), mesh, PrecisionPolicy());
      for (const auto& view : model.shards()) {
        view.shard.mutable_grad() = gradient_of(*view.contract)
                                        .flatten()
                                        .narrow(0, view.begin, view.end - view.begin)
                                        .to(to_scalar_type(view.contract->final))
                                        .clone();
      }
      body(world, layout, model);
    });
  }
}

// Naive: rank 0 gives its own stage alone, the tied one twice, or a stage waits for ever.
TEST(OverStages, RankZeroSeesEveryGradientOnceAndWhole) {
  for_each_layout([](World& world, const Layout& layout, const Sharded<Named>& model) {
    std::vector<std::string> names;
    train::visit_full_gradients_of_run(model, [&](const std::string& name,
                                                  const at::Tensor& gradient) {
      names.push_back(name);
      const auto size = Named::whole(name);
      const auto expected = seeded(hash_bytes(name, 7), size.sizes()).to(gradient.scalar_type());
      EXPECT_TRUE(same_bits(gradient, expected)) << name;
    });
    if (world.rank() == 0) {
      EXPECT_THAT(names, UnorderedElementsAre("tied", "first", "second", "third_one"));
    } else {
      const auto stage = static_cast<std::size_t>(model.mesh().coordinate(axis::kPipeline));
      EXPECT_EQ(names.size(), layout.stages[stage].size());
    }
  });
}

TEST(OverStages, ThePlansHashIsOfAllStagesAndTheSameOnEveryRank) {
  std::vector<std::uint64_t> of_layouts;
  for_each_layout([&](World& world, const Layout& layout, const Sharded<Named>& model) {
    const auto hash = train::plan_hash_of_run(model);
    const bool agreed = comm::all_agree(world.control(), {hash}, "hash of the test")[0];
    EXPECT_TRUE(agreed);
    if (layout.stages.size() == 1) {
      EXPECT_EQ(hash, layout::hash(fsdp::plan_of(model)));
    }
    if (world.rank() == 0) of_layouts.push_back(hash);
  });
  std::ranges::sort(of_layouts);
  EXPECT_EQ(std::ranges::adjacent_find(of_layouts), of_layouts.end()) << "all differ";
  EXPECT_EQ(train::stages_hash({5}), 5U);
  EXPECT_NE(train::stages_hash({5, 6}), train::stages_hash({6, 5}));
}

}  // namespace
}  // namespace tessera::test::over_stages_test
