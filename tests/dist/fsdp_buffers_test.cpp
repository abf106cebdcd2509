// Buffers in the contract: which are cast once after loading, which never, and what ranks agree on.
// Without that a float32 buffer makes float32 of a bfloat16 part's activations (fact file, 5).
#include <torch/nn/modules/batchnorm.h>

#include <limits>

#include "support/plain.h"
#include "support/ranks.h"
#include "support/test.h"
#include "tessera/state_dict.h"

namespace tessera::test::fsdp_buffers_test {
namespace {

constexpr std::int64_t kWidth = 6;
constexpr float kFine = 1.0F + 1.0F / 1024;  // no bfloat16

/// (x w - bias) s with buffers of every kind; notes the dtype of its result.
struct Tower : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const auto y = (x * weight - std_bias) * std_scale;
    seen = y.scalar_type();
    return y;
  }
  at::ScalarType seen = at::kLong;
  at::Tensor weight = register_parameter("weight", seeded(1, {kWidth}));
  at::Tensor std_bias = register_buffer("std_bias", here(at::full({kWidth}, kFine)));
  at::Tensor std_scale = register_buffer("std_scale", seeded(2, {kWidth}));
  at::Tensor inv_freq = register_buffer("inv_freq", here(at::full({3}, kFine)));
  at::Tensor count = register_buffer("count", here(at::tensor({1, 2, 3}, at::kLong)));
};

struct Model : torch::nn::Module {
  Model() { tower->weight.set_requires_grad(false); }
  at::Tensor forward(const at::Tensor& x) {
    return head->forward(handle ? handle->forward(x) : tower->forward(x));
  }
  void shard_tower(const Mesh& mesh, const PrecisionPolicy& policy) {
    handle = std::make_shared<Sharded<Tower>>(fully_shard(tower, mesh, policy));
    replace_module("tower", handle);
  }
  std::shared_ptr<Tower> tower = register_module("tower", std::make_shared<Tower>());
  std::shared_ptr<Tower> head = register_module("head", std::make_shared<Tower>());
  std::shared_ptr<Sharded<Tower>> handle;
};

DType compute_of(const ShardedBase& handle, const std::string& name) {
  for (const auto& view : handle.buffers()) {
    if (view.contract->name == name) return view.contract->compute;
  }
  ADD_FAILURE() << "no buffer " << name;
  return DType::kBool;
}

/// Ranks, and whether the tower is a unit of its own.
class BuffersOnRanks : public ::testing::TestWithParam<std::pair<int, bool>> {
 protected:
  static Sharded<Model> shard(World& world, const std::shared_ptr<Model>& model,
                              const PrecisionPolicy& policy = in_bfloat16()) {
    if (GetParam().second) model->shard_tower(data_mesh(world), policy);
    return fully_shard(model, data_mesh(world), policy);
  }
};
INSTANTIATE_TEST_SUITE_P(Layouts, BuffersOnRanks,
                         ::testing::Values(std::pair{1, false}, std::pair{1, true},
                                           std::pair{2, false}, std::pair{2, true},
                                           std::pair{3, true}, std::pair{4, false}));

// Naive: std_bias and std_scale stay float32, and so does all that the frozen tower gives.
TEST_P_ON_RANKS(BuffersOnRanks, OfAFrozenPartAreCastOnceAndPromoteNothing, GetParam().first) {
  auto model = std::make_shared<Model>();
  const auto* object = model->tower->std_bias.unsafeGetTensorImpl();
  auto handle = shard(world, model);
  const auto x = input_of(world.rank(), 0, kWidth);
  backward(squares(handle.forward(x)));
  EXPECT_EQ(model->tower->seen, at::kBFloat16);
  EXPECT_EQ(model->tower->std_bias.unsafeGetTensorImpl(), object) << "the module's own tensor";
  EXPECT_TRUE(same_bits(model->tower->std_bias, here(at::full({kWidth}, kFine)).to(at::kBFloat16)));
  EXPECT_EQ(model->tower->inv_freq.scalar_type(), at::kFloat) << "tables keep their digits";
  EXPECT_EQ(model->tower->count.scalar_type(), at::kLong);
  EXPECT_EQ(model->head->std_bias.scalar_type(), at::kFloat) << "a trained part's are the user's";
  EXPECT_EQ(model->head->seen, at::kFloat);
  for (const auto& view : handle.buffers()) {
    EXPECT_EQ(to_string(view.contract->compute), view.tensor.scalar_type() == at::kFloat ? "float32"
                                                 : view.tensor.scalar_type() == at::kBFloat16
                                                     ? "bfloat16"
                                                     : "int64");
  }
}

// Property: the same bits as the plain module with the same tensors in bfloat16.
TEST_P_ON_RANKS(BuffersOnRanks, TheNumbersAreThoseOfThePlainModule, GetParam().first) {
  Model plain;
  for (auto* tensor : {&plain.tower->weight, &plain.tower->std_bias, &plain.tower->std_scale,
                       &plain.head->weight}) {
    tensor->set_data(tensor->to(at::kBFloat16));
  }
  auto handle = shard(world, std::make_shared<Model>());
  const auto input = [](int rank) { return input_of(rank, 0, kWidth).to(at::kBFloat16); };
  for (int step = 0; step < 2; ++step) {
    const auto loss = squares(handle.forward(input(world.rank())));
    EXPECT_TRUE(same_bits(loss.detach(), squares(plain.forward(input(world.rank()))).detach()));
    handle.zero_grad();
    backward(loss);
    const auto expected = plain_gradients(plain, world.size(), world.size(), [&](int rank) {
      backward(squares(plain.forward(input(rank))));
    });
    const auto found = whole_gradients(handle);
    EXPECT_TRUE(same_bits(found.at("head.weight").to(at::kBFloat16), expected.at("head.weight")));
  }
}

TEST_P_ON_RANKS(BuffersOnRanks, ARuleOrAPinKeepsOne, GetParam().first) {
  auto policy = in_bfloat16();
  PrecisionRule pin;
  pin.match = {"std_bias"};  // of no parameter
  pin.pin = true;
  PrecisionRule narrow;
  narrow.match = {"head.std_scale"};
  narrow.param_dtype = DType::kBFloat16;
  policy.rules = {pin};
  auto model = std::make_shared<Model>();
  if (GetParam().second) model->shard_tower(data_mesh(world), policy);
  policy.rules.push_back(narrow);
  auto handle = fully_shard(model, data_mesh(world), policy);
  EXPECT_EQ(compute_of(handle, "tower.std_bias"), DType::kFloat32);
  EXPECT_EQ(compute_of(handle, "tower.std_scale"), DType::kBFloat16);
  EXPECT_EQ(compute_of(handle, "head.std_scale"), DType::kBFloat16);
  handle.forward(input_of(world.rank(), 0, kWidth));
  EXPECT_EQ(model->tower->std_bias.scalar_type(), at::kFloat);
  EXPECT_EQ(model->head->std_scale.scalar_type(), at::kBFloat16);
}

// A loader replaces the tensors' data by what the file holds; set_loaded casts that.
TEST_P_ON_RANKS(BuffersOnRanks, ValuesThatAreLoadedLaterAreCastBySetLoaded, GetParam().first) {
  auto model = std::make_shared<Model>();
  auto handle = shard(world, model);
  handle.forward(input_of(world.rank(), 0, kWidth));
  for (const auto& view : handle.buffers()) {
    if (view.contract->name == "tower.std_scale") {
      EXPECT_EQ(view.contract->storage, DType::kFloat32) << "as found, and as a file has it";
      view.tensor.set_data(here(at::full({kWidth}, 3 * kFine)));
    }
  }
  handle.set_loaded();
  EXPECT_TRUE(
      same_bits(model->tower->std_scale, here(at::full({kWidth}, 3 * kFine)).to(at::kBFloat16)));
}

at::Tensor stored_scale(const ShardedBase& handle) {
  for (const auto& view : handle.buffers()) {
    if (view.contract->name == "tower.std_scale") return view.stored;
  }
  throw std::runtime_error("no such buffer");
}

// Naive: what a checkpoint saves is the cast values, widened again.
TEST_P_ON_RANKS(BuffersOnRanks, TheDigitsThatACastDroppedAreStillThereUntilSomebodyWrites,
                GetParam().first) {
  auto model = std::make_shared<Model>();
  auto handle = shard(world, model);
  auto& scale = model->tower->std_scale;
  const auto loaded = seeded(2, {kWidth});
  const auto fine = here(at::full({kWidth}, 3 * kFine));
  EXPECT_TRUE(same_bits(stored_scale(handle), loaded)) << "not yet cast";
  handle.forward(input_of(world.rank(), 0, kWidth));
  EXPECT_EQ(scale.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(same_bits(stored_scale(handle), loaded));
  handle.set_loaded();
  EXPECT_TRUE(same_bits(stored_scale(handle), loaded)) << "nothing new was loaded";

  scale.set_data(fine.clone());
  EXPECT_TRUE(same_bits(stored_scale(handle), fine)) << "before set_loaded()";
  handle.set_loaded();
  EXPECT_TRUE(same_bits(stored_scale(handle), fine));

  scale.mul_(2);
  EXPECT_TRUE(same_bits(stored_scale(handle), scale.to(at::kFloat))) << "written in place";
  scale.set_data(here(at::full({kWidth}, 5.0, at::kBFloat16)));
  handle.set_loaded();
  EXPECT_TRUE(same_bits(stored_scale(handle), here(at::full({kWidth}, 5.0F)))) << "already cast";
}

StateTensor entry_of_scale(const ShardedBase& handle, StateDictKind kind) {
  for (const auto& entry : state_dict(handle, kind)) {
    if (entry.name == "tower.std_scale") return entry;
  }
  throw std::runtime_error("no such entry");
}

// Naive: a state dict holds what the cast left of them, and loading one drops the digits for good.
TEST_P_ON_RANKS(BuffersOnRanks, AStateDictHasTheDigitsThatWereLoaded, GetParam().first) {
  auto model = std::make_shared<Model>();
  auto handle = shard(world, model);
  auto& scale = model->tower->std_scale;
  const auto* object = scale.unsafeGetTensorImpl();
  const auto x = input_of(world.rank(), 0, kWidth);
  const auto expect = [&](const at::Tensor& value, const char* when) {
    for (const auto kind : {StateDictKind::kSharded, StateDictKind::kFull}) {
      EXPECT_TRUE(same_bits(entry_of_scale(handle, kind).values, value)) << when;
    }
  };
  expect(seeded(2, {kWidth}), "before the cast");
  handle.forward(x);
  EXPECT_EQ(scale.scalar_type(), at::kBFloat16);
  expect(seeded(2, {kWidth}), "after the cast");

  const auto fine = here(at::full({kWidth}, 3 * kFine));
  const StateDict loaded = {whole_entry("tower.std_scale", fine)};
  load_state_dict(handle, loaded, Strict::kNo);
  EXPECT_TRUE(same_bits(scale, fine.to(at::kBFloat16)));
  EXPECT_EQ(scale.unsafeGetTensorImpl(), object) << "the module's own tensor";
  expect(fine, "after a load");
  handle.forward(x);
  expect(fine, "after a forward");

  auto other = std::make_shared<Model>();
  auto copy = shard(world, other);
  load_state_dict(copy, state_dict(handle, StateDictKind::kFull));
  EXPECT_TRUE(same_bits(other->tower->std_scale, fine)) << "not yet cast";
  copy.forward(x);
  EXPECT_TRUE(same_bits(stored_scale(copy), fine));

  scale.mul_(2);
  expect(scale.to(at::kFloat), "written in place, as it is now, in the dtype that was loaded");
  load_state_dict(handle,
                  {whole_entry("tower.std_scale", here(at::full({kWidth}, 5, at::kBFloat16)))},
                  Strict::kNo);
  expect(here(at::full({kWidth}, 5.0F)), "loaded from narrower ones");
}

/// A frozen part whose statistics every forward in train mode writes, past version counters.
struct Normed : torch::nn::Module {
  Normed() {
    for (auto& parameter : norm->parameters()) parameter.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    return at::batch_norm(x.to(norm->weight.scalar_type()), norm->weight, norm->bias,
                          norm->running_mean, norm->running_var, norm->is_training(), 0.5, 1e-5,
                          /*cudnn_enabled=*/false) *
           trained;
  }
  torch::nn::BatchNorm1d norm =
      register_module("norm", torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(kWidth)));
  at::Tensor trained = register_parameter("trained", here(at::ones({1})));
};

// Naive: version counters see no write to them; a state dict has the values that were loaded.
TEST_P_ON_RANKS(BuffersOnRanks, StatisticsThatAForwardWritesAreInTheStateDict, GetParam().first) {
  auto model = std::make_shared<Normed>();
  const auto loaded = here(at::full({kWidth}, kFine));
  model->norm->running_mean.copy_(loaded);
  auto handle = fully_shard(model, data_mesh(world), in_bfloat16());
  const auto mean = [&](StateDictKind kind) {
    for (const auto& entry : state_dict(handle, kind)) {
      if (entry.name == "norm.running_mean") return entry.values;
    }
    throw std::runtime_error("no such entry");
  };
  const auto x = input_of(0, 0, kWidth) + 10;
  model->eval();
  handle.forward(x);
  EXPECT_EQ(model->norm->running_mean.scalar_type(), at::kBFloat16);
  model->train();
  for (const auto kind : {StateDictKind::kFull, StateDictKind::kSharded}) {
    EXPECT_TRUE(same_bits(mean(kind), loaded)) << "evaluation writes nothing";
    handle.forward(x);
    EXPECT_GT(mean(kind).min().item<float>(), 4);
    EXPECT_TRUE(same_bits(mean(kind), model->norm->running_mean.to(at::kFloat)));
    load_state_dict(handle, {whole_entry("norm.running_mean", loaded)}, Strict::kNo);
  }
}

// Naive: written in halves of a load that another tensor refuses, or silently rounded twice.
TEST_P_ON_RANKS(BuffersOnRanks, ValuesThatItsDtypesCannotHoldAreNotLoaded, GetParam().first) {
  auto policy = in_bfloat16();
  policy.param_dtype = DType::kFloat16;
  policy.loss_scaling = true;
  auto model = std::make_shared<Model>();
  auto handle = shard(world, model, policy);
  handle.forward(input_of(world.rank(), 0, kWidth));
  const auto refusal = [&](const at::Tensor& value) {
    return thrown_by(
        [&] { load_state_dict(handle, {whole_entry("tower.std_scale", value)}, Strict::kNo); });
  };
  EXPECT_THAT(refusal(here(at::full({kWidth}, 7e4F))), Says("found the value 70000"));
  EXPECT_THAT(refusal(here(at::full({kWidth}, 1.0, at::kDouble))), Says("found the dtype Double"));
  EXPECT_TRUE(same_bits(stored_scale(handle), seeded(2, {kWidth})));
}

TEST_P(BuffersOnRanks, OneThatWasConvertedAfterwardsIsFound) {
  const auto errors = errors_of(GetParam().first, [](World& world) {
    auto model = std::make_shared<Model>();
    auto handle = shard(world, model);
    handle.forward(input_of(world.rank(), 0, kWidth));
    model->tower->std_bias.set_data(model->tower->std_bias.to(at::kDouble));
    handle.forward(input_of(world.rank(), 0, kWidth));
  });
  EXPECT_THAT(errors, Contains(Says("buffer tower.std_bias: found dtype Double",
                                    "expected bfloat16", "of a frozen part")));
}

TEST_P_ON_RANKS(BuffersOnRanks, StandInTheContractWithTheirReasons, GetParam().first) {
  auto handle = shard(world, std::make_shared<Model>());
  const auto buffers = handle.contract().buffers;
  EXPECT_EQ(buffers.size(), 8U);
  EXPECT_THAT(handle.contract_table(),
              Says("tower.std_bias", "head.count", "[precision] param_dtype, of a frozen",
                   "a computed table: never cast"));
}

/// Returns what both ranks say when rank 1's model is another.
std::string disagreement(const std::function<void(Tower&)>& change) {
  return thrown_by([&] {
    ranks(2).run([&](World& world) {
      auto tower = std::make_shared<Tower>();
      if (world.rank() == 1) change(*tower);
      fully_shard(tower, data_mesh(world), in_bfloat16());
    });
  });
}

// Naive: buffers are not compared, and the ranks compute different numbers.
TEST(BuffersOfRanks, ThatDifferAreRefusedWithTheFirstDifference) {
  EXPECT_THAT(
      disagreement([](Tower& tower) { tower.std_bias.set_data(tower.std_bias.to(at::kBFloat16)); }),
      Says("contracts differ between ranks", "buffer std_bias storage float32",
           "buffer std_bias storage bfloat16"));
  EXPECT_THAT(
      disagreement([](Tower& tower) { tower.register_buffer("more", here(at::zeros({1}))); }),
      Says("buffer more"));
  EXPECT_EQ(disagreement([](Tower&) {}), "");
}

// Row 6: a cast that loses a value. Upstream: a warning.
TEST_ON_RANKS(FiniteCasts, AValueThatTheDtypeCannotHoldIsAnErrorThatNamesTheTensor, 1) {
  PrecisionPolicy half;
  half.param_dtype = DType::kFloat16;
  const auto large = [] {
    auto tower = std::make_shared<Tower>();
    tower->weight.set_requires_grad(false);
    tower->std_bias.fill_(7e4);
    return tower;
  };
  auto handle = fully_shard(large(), data_mesh(world), half);
  EXPECT_THAT(thrown_by([&] { handle.forward(here(at::ones({kWidth}))); }),
              Says("buffer std_bias: found the value 70000", "float16 can hold", "pin"));
  PrecisionRule whole;
  whole.match = {"weight"};
  whole.frozen = FrozenRule::kReplicate;
  half.rules = {whole};
  auto tower = large();
  {
    const at::NoGradGuard no_grad;
    tower->weight[kWidth - 1] = -1e5;
  }
  EXPECT_THAT(thrown_by([&] { fully_shard(tower, data_mesh(world), half); }),
              Says("parameter weight: found the value -100000"));
  auto infinite = large();
  infinite->std_bias.fill_(std::numeric_limits<float>::infinity());
  auto as_it_is = fully_shard(infinite, data_mesh(world), half);
  as_it_is.forward(here(at::ones({kWidth})));
  EXPECT_EQ(infinite->std_bias.scalar_type(), at::kHalf) << "what was infinite stays so";
}

// Naive: who casts it first has the digits, and the dict's other name of it what is left.
TEST(SharedBuffers, OfTwoUnitsHaveTheirDigitsUnderBothNames) {
  for (const int count : {1, 2}) {
    ranks(count).run([](World& world) {
      auto model = std::make_shared<Model>();
      model->head->weight.set_requires_grad(false);
      model->head->std_scale = model->tower->std_scale;
      model->head->register_buffer("same_scale", model->tower->std_scale);
      model->register_parameter("trained", here(at::ones({1})));
      model->shard_tower(data_mesh(world), in_bfloat16());
      auto policy = in_bfloat16();
      PrecisionRule narrow;
      narrow.match = {"head.same_scale"};
      narrow.param_dtype = DType::kBFloat16;
      policy.rules = {narrow};
      auto handle = fully_shard(model, data_mesh(world), policy);
      handle.set_loaded();
      const auto expect = [&](const at::Tensor& value) {
        int names = 0;
        for (const auto& entry : state_dict(handle, StateDictKind::kFull)) {
          if (entry.name != "tower.std_scale" && entry.name != "head.same_scale") continue;
          EXPECT_TRUE(same_bits(entry.values, value)) << entry.name;
          ++names;
        }
        EXPECT_EQ(names, 2);
      };
      expect(seeded(2, {kWidth}));
      const auto fine = here(at::full({kWidth}, 3 * kFine));
      load_state_dict(handle,
                      {whole_entry("tower.std_scale", fine), whole_entry("head.same_scale", fine)},
                      Strict::kNo);
      expect(fine);
      EXPECT_EQ(model->tower->std_scale.scalar_type(), at::kBFloat16);
    });
  }
}

TEST_ON_RANKS(SharedBuffers, OfAFrozenAndATrainedPartAreRefusedWithBothNames, 1) {
  auto model = std::make_shared<Model>();
  model->register_buffer("table", model->tower->std_bias);
  const auto message = thrown_by([&] {
    model->shard_tower(data_mesh(world), in_bfloat16());
    fully_shard(model, data_mesh(world), in_bfloat16());
  });
  EXPECT_THAT(message, Says("table", "tower.std_bias", "found one tensor", "bfloat16", "float32"));
}

}  // namespace
}  // namespace tessera::test::fsdp_buffers_test
