// State dicts: what is saved is the model, any layout loads it, and what does not fit is refused on
// every rank before anything is written.

#include "dist/controls.h"
#include "dist/everything.h"
#include "support/test.h"
#include "tessera/state_dict.h"

namespace tessera::test::fsdp_state_dict_test {
namespace {

std::map<std::string, at::Tensor> values_of(const torch::nn::Module& module) {
  std::map<std::string, at::Tensor> all;
  for (const auto& entry : module.named_parameters()) all[entry.key()] = entry.value().detach();
  for (const auto& entry : module.named_buffers()) all[entry.key()] = entry.value();
  return all;
}

StateDict whole_dict(const torch::nn::Module& module) {
  StateDict dict;
  for (const auto& [name, values] : values_of(module))
    dict.push_back(whole_entry(name, values.clone()));
  return dict;
}

void expect_values(const StateDict& found, const std::map<std::string, at::Tensor>& expected) {
  EXPECT_EQ(found.size(), expected.size());
  for (const auto& entry : found) {
    ASSERT_EQ(expected.count(entry.name), 1U) << entry.name;
    EXPECT_TRUE(same_bits(entry.values, expected.at(entry.name))) << entry.name;
    EXPECT_EQ(entry.shape, expected.at(entry.name).sizes().vec()) << entry.name;
  }
}

class StateDicts : public ::testing::TestWithParam<std::pair<int, int>> {};
INSTANTIATE_TEST_SUITE_P(Grid, StateDicts,
                         ::testing::Values(std::pair(1, 1), std::pair(2, 1), std::pair(3, 1),
                                           std::pair(4, 1), std::pair(4, 2)));

TEST_P_ON_RANKS(StateDicts, AFullOneIsThePlainModulesWithEveryName, GetParam().first) {
  const Everything plain(1);
  auto handle = fully_shard(std::make_shared<Everything>(1), data_mesh(world, GetParam().second));
  auto expected = values_of(plain);
  expected["tied"] = expected.at("narrow.weight");
  expect_values(state_dict(handle, StateDictKind::kFull), expected);
  const auto on_zero = state_dict(handle, StateDictKind::kFullOnRankZero);
  if (world.rank() == 0) {
    expect_values(on_zero, expected);
  } else {
    EXPECT_THAT(on_zero, IsEmpty());
  }
}

TEST_P_ON_RANKS(StateDicts, ShardedEntriesAreTheLiveShardsAndSayWhichElementsTheyAre,
                GetParam().first) {
  auto handle = fully_shard(std::make_shared<Everything>(1), data_mesh(world, GetParam().second));
  std::map<std::string, ShardView> views;
  for (const auto& view : handle.shards()) views[view.contract->name] = view;
  for (const auto& entry : state_dict(handle, StateDictKind::kSharded)) {
    const auto found = views.find(entry.name);
    if (found == views.end()) continue;  // another name, or a buffer
    EXPECT_TRUE(entry.values.is_alias_of(found->second.shard)) << entry.name;
    EXPECT_EQ(entry.begin, found->second.begin);
    EXPECT_EQ(entry.end, found->second.end);
    EXPECT_EQ(entry.shape, found->second.contract->shape);
    EXPECT_FALSE(entry.values.requires_grad());
  }
}

TEST_P_ON_RANKS(StateDicts, WhatOneModelSavedAnotherLoadsAndTrainsOn, GetParam().first) {
  const auto [count, replicas] = GetParam();
  for (const auto kind : {StateDictKind::kSharded, StateDictKind::kFull}) {
    const Everything plain(1);
    auto from = fully_shard(std::make_shared<Everything>(1), data_mesh(world, replicas));
    auto module = std::make_shared<Everything>(50);
    auto to = fully_shard(module, data_mesh(world, replicas));
    to.unshard();  // what it shows is of before
    const auto difference = load_state_dict(to, state_dict(from, kind));
    EXPECT_THAT(difference.missing, IsEmpty());
    EXPECT_THAT(difference.unexpected, IsEmpty());
    expect_same(whole_parameters(to), whole_parameters(from));
    EXPECT_TRUE(same_bits(module->count, plain.count));
    const auto x = seeded(9, {4, 7});
    EXPECT_TRUE(same_bits(to.forward(x).detach(), from.forward(x).detach()));
  }
}

class Pair : public torch::nn::Module {
 public:
  Pair() {
    register_parameter("first", seeded(1, {5, 3}));
    register_parameter("second", seeded(2, {5, 3}));
    register_parameter("third", seeded(3, {5, 3}));
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
};

// The entries are the model's own memory: what is overwritten first is read later.
TEST_P_ON_RANKS(StateDicts, ParametersOfOneModelMayChangePlaces, GetParam().first) {
  auto handle = fully_shard(std::make_shared<Pair>(), data_mesh(world, GetParam().second));
  const auto before = whole_parameters(handle);
  auto dict = state_dict(handle, StateDictKind::kSharded);
  for (auto& entry : dict) {
    entry.name = entry.name == "first" ? "second" : entry.name == "second" ? "third" : "first";
  }
  load_state_dict(handle, dict);
  const auto after = whole_parameters(handle);
  EXPECT_TRUE(same_bits(after.at("second"), before.at("first")));
  EXPECT_TRUE(same_bits(after.at("third"), before.at("second")));
  EXPECT_TRUE(same_bits(after.at("first"), before.at("third")));
}

// A file of any other layout is a full dict: the union of what its ranks held.
TEST(StateDictsAcrossLayouts, UnitsAndRankCountsDoNotMatter) {
  StateDict saved;
  ranks(3).run([&](World& world) {
    Twins twins(world);
    auto dict = state_dict(twins.handle(), StateDictKind::kFullOnRankZero);
    if (world.rank() == 0) saved = std::move(dict);
  });
  for (const int count : {1, 2, 4}) {
    ranks(count).run([&](World& world) {
      auto chain = std::make_shared<Chain>(77, kBlocks, Twins::kWidth);
      auto handle = fully_shard(chain, data_mesh(world));  // one unit
      load_state_dict(handle, saved);
      const Chain plain(1, kBlocks, Twins::kWidth);
      for (const auto& [name, value] : whole_parameters(handle)) {
        EXPECT_TRUE(same_bits(value, plain.named_parameters()[name])) << name;
      }
    });
  }
}

// ------------------------------------------------------------------------ without storage first

/// As models make their parameters: sizes, and no bytes.
std::shared_ptr<Chain> without_storage() {
  auto chain = std::make_shared<Chain>(1, kBlocks, Twins::kWidth);
  for (auto& p : chain->parameters()) {
    const auto sizes = p.sizes().vec();
    auto empty = at::empty({0}, p.options().requires_grad(false));
    empty.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    p.set_data(empty);
  }
  return chain;
}

TEST_P_ON_RANKS(StateDicts, AModelMadeWithoutStorageTrainsOnceItIsLoaded, GetParam().first) {
  const auto replicas = GetParam().second;
  const auto mesh = data_mesh(world, replicas);
  auto chain = without_storage();
  chain->shard_blocks(mesh);
  auto handle = fully_shard(chain, mesh);
  Chain plain(1, kBlocks, Twins::kWidth);
  load_state_dict(handle, whole_dict(plain));
  backward(squares(handle.forward(input_of(world.rank(), 0, Twins::kWidth))));
  expect_same(whole_gradients(handle),
              plain_gradients_over(plain, world, replicas, world.size(), [&](int rank) {
                backward(squares(plain.forward(input_of(rank, 0, Twins::kWidth))));
              }));
}

// Naive: zeros, or any values that the memory held.
TEST(StateDictErrors, AForwardThroughParametersThatNeverGotValuesIsRefused) {
  for (const int count : {1, 2}) {
    const auto errors = errors_of(count, [](World& world) {
      auto chain = without_storage();
      chain->shard_blocks(data_mesh(world));
      auto handle = fully_shard(chain, data_mesh(world));
      auto dict = whole_dict(Chain(1, kBlocks, Twins::kWidth));
      std::erase_if(dict, [](const auto& entry) { return entry.name == "block1.b"; });
      const auto difference = load_state_dict(handle, dict, Strict::kNo);
      EXPECT_THAT(difference.missing, ElementsAre("block1.b"));
      handle.forward(input_of(world.rank(), 0, Twins::kWidth));
    });
    EXPECT_THAT(errors, Contains(Says("unit block1: found parameters that never got values",
                                      "load_state_dict()")));
  }
}

// ------------------------------------------------------------------------------------- refusals

/// Returns what every rank says of `change`d entries; nothing may have been written.
std::vector<std::string> refusals(int count, const std::function<void(World&, StateDict&)>& change,
                                  Strict strict = Strict::kYes) {
  return errors_of(count, [&](World& world) {
    auto module = std::make_shared<Everything>(1);
    const auto count_before = module->count.clone();
    auto handle = fully_shard(module, data_mesh(world));
    const auto before = whole_parameters(handle);
    auto dict = whole_dict(Everything(50));
    change(world, dict);
    const auto error = thrown_by([&] { load_state_dict(handle, dict, strict); });
    expect_same(whole_parameters(handle), before, "after a refusal");
    EXPECT_TRUE(same_bits(module->count, count_before));
    if (!error.empty()) throw std::runtime_error(error);
  });
}

StateTensor& entry_of(StateDict& dict, const std::string& name) {
  return *std::find_if(dict.begin(), dict.end(),
                       [&](const auto& entry) { return entry.name == name; });
}

TEST(StateDictErrors, EveryMissingAndUnexpectedNameIsNamed) {
  for (const int count : {1, 2, 3}) {
    const auto errors = refusals(count, [](World&, StateDict& dict) {
      entry_of(dict, "frozen").name = "frosen";
      entry_of(dict, "affine.mean").name = "affine.means";
    });
    EXPECT_THAT(errors,
                Each(Says("found no entry for frozen, affine.mean", "affine.means, frosen")));
  }
}

TEST(StateDictErrors, ShapesDtypesAndDoublesAreNamedEvenWhereLoadingIsLenient) {
  for (const auto strict : {Strict::kYes, Strict::kNo}) {
    const auto errors = refusals(
        2,
        [](World&, StateDict& dict) {
          entry_of(dict, "affine.weight") = whole_entry("affine.weight", here(at::zeros({7, 13})));
          entry_of(dict, "narrow.bias").values = here(at::zeros({5}));
          entry_of(dict, "count").values = here(at::zeros({2}));
          dict.push_back(whole_entry("single", here(at::zeros({}))));
        },
        strict);
    EXPECT_THAT(errors, Each(Says("affine.weight: found the shape [7, 13], expected [13, 7]",
                                  "narrow.bias: found the dtype Float, which BFloat16 storage "
                                  "cannot hold exactly",
                                  "count: found the dtype Float", "single: found two entries")));
  }
}

// Naive: as many values as elements are enough, and a transposed weight is loaded in another order.
TEST(StateDictErrors, WholeValuesOfAnotherShapeAndTensorsWithoutValuesAreNamed) {
  const auto errors = refusals(2, [](World& world, StateDict& dict) {
    if (world.rank() == 0) return;
    auto& weight = entry_of(dict, "affine.weight");
    weight.values = weight.values.t().contiguous();
    auto& bias = entry_of(dict, "affine.bias");
    bias.values = bias.values.to(at::kMeta);
    auto& single = entry_of(dict, "single");
    single.values = single.values.reshape({1}).to_sparse();
  });
  EXPECT_THAT(errors, Each(Says("affine.weight: found values of the shape [7, 13] for [13, 7]",
                                "affine.bias: found no tensor with values",
                                "single: found no tensor with values")));
}

// Naive: the rank with the complete dict waits, or loads alone.
TEST(StateDictErrors, WhatOneRankCannotLoadNoRankLoads) {
  const auto errors = refusals(3, [](World& world, StateDict& dict) {
    if (world.rank() == 1) std::erase_if(dict, [](const auto& e) { return e.name == "single"; });
  });
  EXPECT_THAT(errors, Each(Says("found no entry for single")));
  EXPECT_THAT(errors[0], Says("(rank 1)"));
  const auto lenient = refusals(
      2,
      [](World& world, StateDict& dict) {
        if (world.rank() == 1)
          std::erase_if(dict, [](const auto& e) { return e.name == "single"; });
      },
      Strict::kNo);
  EXPECT_THAT(lenient, Each(Says("rank 0 lacks entries for [] and rank 1 for [single]")));
}

TEST(StateDictErrors, ElementsOfAnotherLayoutAreNamed) {
  const auto errors = refusals(2, [](World&, StateDict& dict) {
    auto& entry = entry_of(dict, "frozen");
    entry.values = entry.values.reshape(-1).narrow(0, 0, 2).clone();
    entry.end = 2;
  });
  EXPECT_THAT(errors, Each(Says("frozen: found elements 0 to 2", "load a full state dict")));
}

TEST(StateDictErrors, TiedEntriesHaveToAgree) {
  const auto errors = refusals(2, [](World&, StateDict& dict) {
    std::erase_if(dict, [](const auto& entry) { return entry.name == "tied"; });
    dict.push_back(whole_entry("tied", here(at::zeros({5, 13}, at::kBFloat16))));
  });
  EXPECT_THAT(errors, Each(Says("the model has one tensor for both")));
}

TEST_ON_RANKS(StateDictErrors, LoadingBetweenAForwardAndItsBackwardIsRefused, 2) {
  Twins twins(world);
  const auto dict = state_dict(twins.handle(), StateDictKind::kFull);
  auto loss = squares(twins.forward(0));
  EXPECT_THAT(thrown_by([&] { load_state_dict(twins.handle(), dict); }),
              Says("whose backward has not run"));
}

// A frozen part kept whole in bf16, with its buffer: values come in the storage dtype or in theirs.
TEST_P_ON_RANKS(StateDicts, WhatIsCastOnceAfterLoadingTakesBothDtypes, GetParam().first) {
  auto policy = in_bfloat16();
  PrecisionRule rule;
  rule.match = {"affine"};
  rule.frozen = FrozenRule::kReplicate;
  policy.rules.push_back(rule);
  const auto mesh = data_mesh(world, GetParam().second);
  const Everything other(50);
  auto from = fully_shard(std::make_shared<Everything>(50), mesh, policy);
  from.set_loaded();
  for (const auto& dict : {whole_dict(other), state_dict(from, StateDictKind::kFull)}) {
    auto module = std::make_shared<Everything>(1);
    auto handle = fully_shard(module, mesh, policy);
    handle.set_loaded();
    load_state_dict(handle, dict);
    const auto x = seeded(9, {4, 7});
    EXPECT_TRUE(same_bits(handle.forward(x).detach(), from.forward(x).detach()));
    EXPECT_TRUE(same_bits(whole_parameters(handle).at("affine.weight"),
                          other.affine->weight.detach().to(at::kBFloat16)));
    EXPECT_TRUE(same_bits(module->mean, other.mean.to(at::kBFloat16)));
  }
}

TEST_ON_RANKS(StateDictsLenient, LeaveOutWhatIsMissingOrUnknownAndWidenWhatIsNarrow, 2) {
  const Everything other(50);
  auto handle = fully_shard(std::make_shared<Everything>(1), data_mesh(world));
  auto expected = whole_parameters(handle);
  StateDict dict = {whole_entry("affine.bias", other.affine->bias.detach().to(at::kBFloat16)),
                    whole_entry("head.weight", here(at::zeros({3})))};
  const auto difference = load_state_dict(handle, dict, Strict::kNo);
  EXPECT_THAT(difference.unexpected, ElementsAre("head.weight"));
  EXPECT_EQ(difference.missing.size(), 7U);
  expected["affine.bias"] = other.affine->bias.detach().to(at::kBFloat16).to(at::kFloat);
  expect_same(whole_parameters(handle), expected);
}

}  // namespace
}  // namespace tessera::test::fsdp_state_dict_test
