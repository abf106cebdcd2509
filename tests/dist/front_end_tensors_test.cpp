// The paths of a front end's tensors: tied, not stored, or ignored.

#include "dist/front_end_net.h"
#include "tessera/state_dict.h"

namespace tessera::test::front_end_tensors_test {
namespace {

using namespace front_end_net;  // NOLINT(google-build-using-namespace): the model of all tests

/// Parameters and buffers by path, as a front end mirrors them.
struct Tensorholder : torch::nn::Module {
  at::Tensor parameter(const std::string& name, const at::Tensor& value, bool trainable = true) {
    return register_parameter(name, value, trainable);
  }
  at::Tensor buffer(const std::string& name, const at::Tensor& value) {
    return register_buffer(name, value);
  }
};

/// A tensor without values, as of a model on the meta device.
at::Tensor unset(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  auto tensor = at::empty({0}, at::TensorOptions(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

FrontEnd shard(World& world, const std::shared_ptr<torch::nn::Module>& module,
               const ShardOptions& options, UnitBody run = {}) {
  return {module, std::move(run), data_mesh(world), PrecisionPolicy(), options};
}

// Naive: two tensors without memory are two parameters, and training tears them apart.
TEST(FrontEndTensors, PathsThatAreTiedAreOneParameter) {
  for (const int count : {1, 2}) {
    ranks(count).run([](World& world) {
      const auto values = seeded(4, {kWidth, kWidth});
      const auto module = std::make_shared<Tensorholder>();
      const auto embed = module->parameter("embed", unset({kWidth, kWidth}));
      const auto own = module->parameter("own", unset({kWidth}));
      const auto head = module->parameter("head", unset({kWidth, kWidth}));
      ShardOptions options;
      options.tied = {{"embed", "head"}};
      auto unit = shard(world, module, options, [=](const Several& in) -> Several {
        return {at::linear(at::linear(in[0], embed) * own, head)};
      });
      ASSERT_EQ(unit.shards().size(), 2U);
      EXPECT_EQ(unit.contract().parameters[0].aliases, std::vector<std::string>{"head"});
      load_state_dict(unit, {whole_entry("embed", values), whole_entry("own", seeded(5, {kWidth})),
                             whole_entry("head", values)});
      backward(squares(unit(input_of(world.rank(), 0, kWidth))));
      Tensorholder plain;
      const auto tied = plain.parameter("embed", values.clone());
      const auto scale = plain.parameter("own", seeded(5, {kWidth}));
      const auto expected = plain_gradients(plain, world.size(), world.size(), [&](int rank) {
        const auto x = input_of(rank, 0, kWidth);
        backward(squares(at::linear(at::linear(x, tied) * scale, tied)));
      });
      expect_same(whole_gradients(unit), expected);
      std::vector<std::string> names;
      for (const auto& entry : state_dict(unit, StateDictKind::kFull)) names.push_back(entry.name);
      EXPECT_THAT(names, ElementsAre("embed", "head", "own"));
    });
  }
}

TEST(FrontEndTensors, PathsThatMayNotBeTiedAreRefused) {
  ranks(1).run([](World& world) {
    const auto refusal = [&](const at::Tensor& first, const at::Tensor& second,
                             std::vector<std::vector<std::string>> tied = {{"first", "second"}},
                             bool second_trains = true) {
      const auto module = std::make_shared<Tensorholder>();
      module->parameter("first", first);
      module->parameter("second", second, second_trains);
      ShardOptions options;
      options.tied = std::move(tied);
      return refusal_of(ErrorKind::kContract, [&] { shard(world, module, options); });
    };
    EXPECT_EQ(refusal(unset({4}), unset({4})), "");
    EXPECT_EQ(refusal(at::empty({0, 4}), at::empty({0, 4})), "");
    EXPECT_THAT(refusal(unset({4}), unset({2, 2})), Says("first and second", "[4] and [2, 2]"));
    EXPECT_THAT(refusal(unset({4}), unset({4}, at::kBFloat16)), Says("found dtypes"));
    EXPECT_THAT(refusal(unset({4}), unset({4}), {{"first", "second"}}, false),
                Says("one frozen and one trainable"));
    EXPECT_THAT(refusal(seeded(1, {4}), seeded(1, {4})), Says("not in one memory"));
    EXPECT_THAT(refusal(unset({4}), seeded(1, {4})), Says("not in one memory"));
    EXPECT_THAT(refusal(unset({4}), unset({4}), {{"first", "third"}}),
                Says("ShardOptions::tied", "third"));
    EXPECT_THAT(refusal(unset({4}), unset({4}), {{"first", "second"}, {"second"}}),
                Says("second twice"));
    const auto both = seeded(1, {4});
    EXPECT_EQ(refusal(both, both.view({4})), "") << "memory says the same";
  });
}

TEST(FrontEndTensors, UnstoredBuffersAreInNoStateDict) {
  ranks(2).run([](World& world) {
    const auto make = [&] {
      const auto module = std::make_shared<Tensorholder>();
      module->parameter("weight", seeded(1, {kWidth}));
      const auto table = module->buffer("table", seeded(2, {kWidth}));
      module->buffer("mean", seeded(3, {kWidth}));
      const auto inner = module->register_module("inner", std::make_shared<Tensorholder>());
      inner->buffer("mask", table);  // the same tensor, stored under this name
      inner->buffer("cache", seeded(4, {2}));
      return module;
    };
    ShardOptions options;
    options.unstored_buffers = {"table", "inner.cache"};
    auto unit = shard(world, make(), options);
    const auto names = [&] {
      std::set<std::string> all;
      for (const auto& entry : state_dict(unit, StateDictKind::kFull)) all.insert(entry.name);
      return all;
    };
    EXPECT_EQ(names(), (std::set<std::string>{"weight", "table", "mean", "inner.mask"}))
        << "a buffer that is stored in one place is stored";
    options.unstored_buffers = {"table", "inner.mask", "inner.cache"};
    auto other = shard(world, make(), options);
    const auto entries = state_dict(other, StateDictKind::kFull);
    EXPECT_EQ(entries.size(), 2U);
    EXPECT_TRUE(load_state_dict(other, entries).missing.empty());
    EXPECT_REFUSED(
        kContract,
        load_state_dict(other, {entries[0], entries[1], whole_entry("table", seeded(2, {kWidth}))}),
        "table");
    options.unstored_buffers = {"weight"};
    EXPECT_REFUSED(kContract, shard(world, make(), options), "unstored_buffers", "weight");
  });
}

TEST(FrontEndTensors, IgnoredOnesHaveTheirNamesAndAreInNoStateDict) {
  ranks(1).run([](World& world) {
    const auto net = std::make_shared<Net>(1);
    ShardOptions inner, outer;
    inner.ignored_parameters = {net->layers[1]->b};
    outer.ignored_parameters = {net->last};
    ShardedNet model(world, net, {}, inner, outer);
    EXPECT_THAT(model.root->ignored_names(), ElementsAre("last", "layer1.b"));
    std::size_t count = 0;
    for (const auto& entry : state_dict(*model.root, StateDictKind::kFull)) {
      EXPECT_NE(entry.name, "last");
      ++count;
    }
    EXPECT_EQ(count, 5U);
    EXPECT_TRUE(ShardedNet(world, std::make_shared<Net>(1)).root->ignored_names().empty());
  });
}

TEST(FrontEndTensors, WholeParametersAndGradientsAreVisited) {
  ranks(2).run([](World& world) {
    ShardedNet model(world, std::make_shared<Net>(1));
    Tensors plain;
    for (const auto& entry : Net(1).named_parameters()) plain[entry.key()] = entry.value().detach();
    expect_same(whole_parameters(*model.root), plain);
  });
}

}  // namespace
}  // namespace tessera::test::front_end_tensors_test
