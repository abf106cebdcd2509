// The handle as a user sees it: signatures, names, modes, what is refused.
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>

#include "fsdp/runtime/unit.h"
#include "support/plain.h"
#include "support/test.h"

namespace tessera::test::fsdp_handle_test {
namespace {

using ::testing::UnorderedElementsAre;

constexpr std::int64_t kWidth = 5;

class HandleOnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, HandleOnRanks, ::testing::Values(1, 2));

TEST_P_ON_RANKS(HandleOnRanks, ASequentialOfHandlesTrainsAsUnsharded, GetParam()) {
  const auto mesh = data_mesh(world);
  const auto make = [] {
    return std::pair{std::make_shared<Affine>(1, kWidth, 7),
                     std::make_shared<Affine>(2, 7, kWidth)};
  };
  auto [a, b] = make();
  torch::nn::Sequential plain(a, torch::nn::Functional(at::relu), b);
  auto [c, d] = make();
  torch::nn::Sequential handles(std::make_shared<Sharded<Affine>>(fully_shard(c, mesh)),
                                torch::nn::Functional(at::relu),
                                std::make_shared<Sharded<Affine>>(fully_shard(d, mesh)));
  auto handle = fully_shard(handles.ptr(), mesh);  // Sharded<SequentialImpl>
  for (int step = 0; step < 2; ++step) {
    handle.zero_grad();
    backward(squares(handle.forward(input_of(world.rank(), step, kWidth))));
    expect_same(whole_gradients(handle), gradients_of_squares(*plain, world.size(), step, kWidth));
  }
  EXPECT_THAT(handle.named_parameters().keys(),
              ElementsAre("0.weight", "0.bias", "2.weight", "2.bias"));
}

TEST_P_ON_RANKS(HandleOnRanks, AWholeSequentialAsOneUnit, GetParam()) {
  torch::nn::Sequential plain(std::make_shared<Affine>(1, kWidth, 7),
                              std::make_shared<Affine>(2, 7, kWidth));
  torch::nn::Sequential same(std::make_shared<Affine>(1, kWidth, 7),
                             std::make_shared<Affine>(2, 7, kWidth));
  auto handle = fully_shard(same.ptr(), data_mesh(world));
  backward(squares(handle.forward(input_of(world.rank(), 0, kWidth))));
  expect_same(whole_gradients(handle), gradients_of_squares(*plain, world.size(), 0, kWidth));
}

struct Sample {
  at::Tensor x;
  at::Tensor ids;
  int count = 0;
  template <class F>
  void visit_tensors(F&& f) {
    f(x);
    f(ids);
  }
};

struct Answer {
  std::map<std::string, at::Tensor> named;
  std::pair<at::Tensor, int> counted;
  template <class F>
  void visit_tensors(F&& f) {
    tessera::visit_tensors(named, f);
    tessera::visit_tensors(counted, f);
  }
};

/// Everything that a forward may take and give.
class Signature : public torch::nn::Module {
 public:
  Answer forward(const std::vector<at::Tensor>& list, std::optional<at::Tensor> maybe,
                 const std::tuple<at::Tensor, double>& scaled,
                 std::map<std::string, at::Tensor> named, Sample sample, std::string mode) {
    auto y = table.index_select(0, sample.ids).sum() * 0.0 +
             std::get<0>(scaled) * std::get<1>(scaled) * weight;
    for (const auto& one : list) y = y + one;
    if (maybe) y = y * *maybe;
    for (const auto& [key, value] : named) y = y + value;
    y = y + sample.x * sample.count;
    if (mode == "double") y = y * 2;
    return {{{"y", y}, {"z", y.sum()}}, {table.index_select(0, sample.ids), 3}};
  }
  at::Tensor weight = register_parameter("weight", seeded(1, {kWidth}));
  at::Tensor table = register_parameter("table", seeded(2, {4, kWidth}));
};

TEST_P_ON_RANKS(HandleOnRanks, ArgumentsAndResultsOfEveryShape, GetParam()) {
  Signature plain;
  auto handle = fully_shard(std::make_shared<Signature>(), data_mesh(world));
  const auto loss_of = [](auto& model, int rank, std::vector<at::Tensor>& inputs) {
    const auto seed = static_cast<std::uint64_t>(40 + rank);
    inputs.clear();
    for (std::uint64_t i = 0; i < 6; ++i)
      inputs.push_back(seeded(seed + 10 * i, {kWidth}).requires_grad_());
    auto answer = model.forward({inputs[0], inputs[1]}, inputs[2], std::tuple{inputs[3], 0.5},
                                {{"k", inputs[4]}},
                                Sample{inputs[5], here(at::tensor({0, 2, 2})), 3}, "double");
    EXPECT_EQ(answer.counted.second, 3);
    return answer.named.at("y").pow(2).sum() + answer.named.at("z") +
           answer.counted.first.pow(2).sum();
  };
  std::vector<at::Tensor> ours, theirs;
  backward(loss_of(handle, world.rank(), ours));
  const auto found = whole_gradients(handle);
  backward(loss_of(plain, world.rank(), theirs));
  for (std::size_t i = 0; i < ours.size(); ++i)
    EXPECT_TRUE(same_bits(ours[i].grad(), theirs[i].grad())) << i;
  expect_same(found, plain_gradients(plain, world.size(), world.size(),
                                     [&](int rank) { backward(loss_of(plain, rank, theirs)); }));
}

TEST_P(HandleOnRanks, NoOptionalNoListNoResult) {
  class Quiet : public torch::nn::Module {
   public:
    void forward(std::optional<at::Tensor> maybe, std::vector<at::Tensor> list) {
      EXPECT_FALSE(maybe.has_value());
      EXPECT_TRUE(list.empty());
      seen = weight.sum();
    }
    at::Tensor weight = register_parameter("weight", here(at::ones({kWidth})));
    at::Tensor seen;
  };
  ranks(GetParam()).run([](World& world) {
    auto module = std::make_shared<Quiet>();
    auto handle = fully_shard(module, data_mesh(world));
    handle.forward(std::nullopt, {});
    EXPECT_EQ(module->seen.item<float>(), static_cast<float>(kWidth));
  });
}

TEST_P(HandleOnRanks, AResultMayBeChangedInPlaceAndMayBeAnInput) {
  class Mixed : public torch::nn::Module {
   public:
    std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(const at::Tensor& x,
                                                           const at::Tensor& ids) {
      return {x * weight, x, ids};
    }
    at::Tensor weight = register_parameter("weight", seeded(1, {kWidth}));
  };
  ranks(GetParam()).run([](World& world) {
    Mixed plain;
    auto handle = fully_shard(std::make_shared<Mixed>(), data_mesh(world));
    const auto loss_of = [](auto& model, at::Tensor leaf) {
      const auto ids = here(at::tensor({1, 2}));
      auto [y, x, same] = model.forward(leaf * 1.0, ids);
      EXPECT_TRUE(at::equal(same, ids));
      y.mul_(3.0);  // naive: a custom Function's outputs are views that may not be changed in place
      y.add_(x);
      return y.pow(2).sum() + x.sum();
    };
    for (int step = 0; step < 2; ++step) {
      handle.zero_grad();
      auto x = input_of(world.rank(), step, kWidth).requires_grad_();
      auto z = input_of(world.rank(), step, kWidth).requires_grad_();
      backward(loss_of(handle, x));
      const auto found = whole_gradients(handle);
      backward(loss_of(plain, z));
      EXPECT_TRUE(same_bits(x.grad(), z.grad()));
      expect_same(found, plain_gradients(plain, world.size(), world.size(), [&](int rank) {
                    backward(loss_of(plain, input_of(rank, step, kWidth).requires_grad_()));
                  }));
    }
  });
}

// ------------------------------------------------------------------------------- names, modes,
// refusals

TEST_P_ON_RANKS(HandleOnRanks, NamesAreTrueNamesInAnyNesting, GetParam()) {
  ShardedChain model(data_mesh(world), 1, 2, kWidth);
  EXPECT_THAT(model.handle.named_parameters().keys(),
              UnorderedElementsAre("scale", "block0.a", "block0.b", "block1.a", "block1.b"));
  std::vector<std::string> contracts;
  for (const auto& view : model.handle.shards()) contracts.push_back(view.contract->name);
  EXPECT_THAT(contracts,
              UnorderedElementsAre("scale", "block0.a", "block0.b", "block1.a", "block1.b"));
  EXPECT_THAT(model.handle.contract_table(), Says("block0.a", "float32"));
  EXPECT_THAT(model.chain->handles[1]->named_parameters().keys(), ElementsAre("a", "b"));
}

TEST_P_ON_RANKS(HandleOnRanks, CanonicalNamesAreKeptWhereTheyAreGiven, GetParam()) {
  ShardOptions inner, root;
  inner.name = "model.layers.0";
  root.name = "model";
  auto chain = std::make_shared<Chain>(1, 1, kWidth);
  chain->shard_blocks(data_mesh(world), {}, inner);
  auto handle = fully_shard(chain, data_mesh(world), {}, root);
  EXPECT_THAT(handle.named_parameters().keys(),
              UnorderedElementsAre("model.scale", "model.layers.0.a", "model.layers.0.b"));
}

TEST_ON_RANKS(Handle, AParentThatIsNotShardedShowsTheShards, 2) {
  struct Parent : torch::nn::Module {
    std::shared_ptr<Sharded<Block>> block;
  };
  Parent parent;
  parent.block =
      parent.register_module("block", std::make_shared<Sharded<Block>>(fully_shard(
                                          std::make_shared<Block>(1, kWidth), data_mesh(world))));
  const auto parameters = parent.parameters();
  ASSERT_EQ(parameters.size(), 2U);
  const auto shards = parent.block->shards();
  EXPECT_TRUE(parameters[0].is_same(shards[0].shard));
  EXPECT_TRUE(parameters[1].is_same(shards[1].shard));
  std::int64_t elements = 0;
  for (const auto& one : shards) elements += one.end - one.begin;
  auto total = at::tensor({elements});
  comm::all_reduce(world.control(), total, "elements");
  EXPECT_EQ(total.item<std::int64_t>(), 2 * kWidth * (kWidth + 1))
      << "every element once over the ranks";
}

TEST_P_ON_RANKS(HandleOnRanks, ModesReachTheModulesInside, GetParam()) {
  ShardedChain model(data_mesh(world), 1, 2, kWidth);
  model.handle.eval();
  EXPECT_FALSE(model.handle.is_training());
  EXPECT_FALSE(model.chain->is_training());
  EXPECT_FALSE(model.chain->blocks[1]->is_training());
  model.handle.train();
  EXPECT_TRUE(model.chain->blocks[1]->is_training());
}

TEST_ON_RANKS(Handle, CopiesAndMovesToOtherDtypesAreRefused, 1) {
  auto handle = std::make_shared<Sharded<Block>>(
      fully_shard(std::make_shared<Block>(1, kWidth), data_mesh(world)));
  torch::nn::Module& module = *handle;
  EXPECT_THAT(thrown_by([&] { module.clone(); }), Says("sharded module"));
  EXPECT_THAT(thrown_by([&] { module.to(at::kBFloat16); }), Says("sharded module"));
  EXPECT_THAT(thrown_by([&] { module.to(at::Device(at::kCPU)); }), Says("sharded module"));
  EXPECT_THAT(thrown_by([&] { module.to(at::kCPU, at::kDouble); }), Says("sharded module"));
  EXPECT_FALSE((std::is_copy_constructible_v<Sharded<Block>>));
  EXPECT_THAT(thrown_by([&] { fully_shard(std::make_shared<Block>(1, kWidth), Mesh()); }),
              Says("mesh without a world"));
}

// Naive: the second handle owns nothing, and trains nothing.
TEST_P_ON_RANKS(HandleOnRanks, AModuleThatIsShardedAlreadyIsRefused, GetParam()) {
  auto block = std::make_shared<Block>(1, kWidth);
  auto handle = fully_shard(block, data_mesh(world));
  EXPECT_THAT(thrown_by([&] { fully_shard(block, data_mesh(world)); }),
              Says("that another handle has sharded", "parameter a"));
}

TEST_ON_RANKS(Handle, AHandleThatWasMovedFromIsRefusedByName, 1) {
  auto first = fully_shard(std::make_shared<Block>(1, kWidth), data_mesh(world));
  auto second = std::move(first);
  // NOLINTBEGIN(bugprone-use-after-move): what this is about
  EXPECT_THAT(thrown_by([&] { first.forward(here(at::ones({1, kWidth}))); }),
              Says("a handle that was moved from"));
  EXPECT_THAT(thrown_by([&] { first.unshard(); }), Says("a handle that was moved from"));
  // NOLINTEND(bugprone-use-after-move)
  EXPECT_EQ(second.shards().size(), 2U);
}

TEST_ON_RANKS(Handle, APlainParentsCloneAndToReachTheRefusal, 1) {
  struct Parent : torch::nn::Module {};
  Parent parent;
  parent.register_module("block", std::make_shared<Sharded<Block>>(fully_shard(
                                      std::make_shared<Block>(1, kWidth), data_mesh(world))));
  EXPECT_THAT(thrown_by([&] { parent.to(at::kBFloat16); }), Says("sharded module"));
}

// Naive: the parts' slices are gathered over the ranks of the other mesh: other weights, silently.
TEST_ON_RANKS(Handle, PartsOverAnotherMeshAreRefused, 4) {
  class Parent : public torch::nn::Module {
   public:
    explicit Parent(std::shared_ptr<Sharded<Block>> part)
        : block(register_module("block", std::move(part))) {}
    at::Tensor forward(const at::Tensor& x) { return block->forward(x); }
    std::shared_ptr<Sharded<Block>> block;
  };
  const auto parent = std::make_shared<Parent>(std::make_shared<Sharded<Block>>(
      fully_shard(std::make_shared<Block>(1, kWidth), data_mesh(world, 2))));
  EXPECT_THAT(thrown_by([&] { fully_shard(parent, data_mesh(world)); }),
              Says("block sharded over the mesh", "over one mesh"));
}

// Stages of a pipeline hold different parts of a model: neither weights nor gradients meet.
TEST_ON_RANKS(Handle, RanksOfAnotherPipelineStageHaveModelsOfTheirOwn, 4) {
  const auto mesh = world.mesh(MeshShape::dense(2, 1, 2, 1, 1));
  const int stage = mesh.coordinate("pp");
  const auto make = [&] { return std::make_shared<Block>(stage == 0 ? 1 : 7, kWidth); };
  const auto x = seeded(static_cast<std::uint64_t>(stage) + 20, {3, kWidth});
  const auto plain = make();
  plain->forward(x).sum().backward();
  std::map<std::string, at::Tensor> expected;
  for (const auto& one : plain->named_parameters()) expected[one.key()] = one.value().grad();

  auto handle = fully_shard(make(), mesh);
  handle.forward(x).sum().backward();
  std::size_t compared = 0;
  handle.visit_full_gradients([&](const std::string& name, const at::Tensor& gradient) {
    EXPECT_TRUE(gradient.equal(expected.at(name))) << name << " of stage " << stage;
    ++compared;
  });
  EXPECT_EQ(compared, expected.size());
}

// Naive: gradients summed over dp_shard alone, or divided by its ranks.
TEST_ON_RANKS(Handle, RanksOfCpShardParametersAsThoseOfDpShardDo, 4) {
  const auto trained = [&](const Mesh& mesh) {
    auto handle = fully_shard(std::make_shared<Affine>(1, kWidth, 7), mesh);
    backward(squares(handle.forward(input_of(world.rank(), 0, kWidth))));
    return handle;
  };
  const auto flat = trained(world.mesh(MeshShape::dense(1, 1, 4, 1, 1)));
  for (const int shard : {1, 2}) {
    const auto handle = trained(world.mesh(MeshShape::dense(1, 1, shard, 4 / shard, 1)));
    const auto shards = handle.shards();
    const auto expected = flat.shards();
    ASSERT_EQ(shards.size(), expected.size());
    for (std::size_t i = 0; i < shards.size(); ++i) {
      EXPECT_EQ(shards[i].begin, expected[i].begin);
      EXPECT_EQ(shards[i].end, expected[i].end);
      EXPECT_TRUE(same_bits(shards[i].shard, expected[i].shard));
      EXPECT_TRUE(same_bits(shards[i].shard.grad(), expected[i].shard.grad()));
    }
    expect_same(whole_gradients(handle), whole_gradients(flat));
  }
  const auto copies = trained(world.mesh(MeshShape::dense(1, 2, 1, 2, 1)));
  const auto hybrid = trained(world.mesh(MeshShape::dense(1, 2, 2, 1, 1)));
  expect_same(whole_gradients(copies), whole_gradients(hybrid), "replicas of cp 2");
}

TEST_ON_RANKS(Handle, AMeshWithAxesOnWhichNoOneSumsIsRefused, 2) {
  const auto error_over = [&](const MeshShape& shape) {
    return thrown_by([&] { fully_shard(std::make_shared<Block>(1, kWidth), world.mesh(shape)); });
  };
  for (const char* name : {"ep", "etp", "dp_shard_mod_ep", "dp_sahrd"}) {
    EXPECT_THAT(error_over(MeshShape({{name, 2}})),
                Says(concat("found the axis ", name, " of 2 ranks")));
  }
  EXPECT_THAT(error_over(MeshShape::sparse(1, 1, 1, 2, 1)),
              Says("sparse reading of a mesh in addition to its dense one"));
}

TEST_P_ON_RANKS(HandleOnRanks, InputsAreCastToParamDtypeAndOutputsToOutputDtype, GetParam()) {
  class Sees : public torch::nn::Module {
   public:
    at::Tensor forward(const at::Tensor& x, const at::Tensor& ids) {
      EXPECT_EQ(x.scalar_type(), at::kBFloat16);
      EXPECT_EQ(ids.scalar_type(), at::kLong);
      EXPECT_EQ(weight.scalar_type(), at::kBFloat16);
      return x * weight;
    }
    at::Tensor weight = register_parameter("weight", here(at::ones({kWidth})));
  };
  auto policy = in_bfloat16();
  policy.output_dtype = DType::kFloat32;
  auto handle = fully_shard(std::make_shared<Sees>(), data_mesh(world), policy);
  auto x = seeded(1, {kWidth}).requires_grad_();
  const auto y = handle.forward(x, here(at::tensor({1}, at::kLong)));
  EXPECT_EQ(y.scalar_type(), at::kFloat);
  backward(y.sum());
  EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
}

}  // namespace
}  // namespace tessera::test::fsdp_handle_test
