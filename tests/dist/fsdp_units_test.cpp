// The casts of a unit's call: its inputs, its outputs, and what ranks agree on about that.

#include "support/plain.h"
#include "support/ranks.h"
#include "support/test.h"

namespace tessera::test::fsdp_units_test {
namespace {

constexpr std::int64_t kWidth = 6;
constexpr double kFine = 1.0 + 1.0 / 1024;  // no bfloat16

class UnitsOnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Counts, UnitsOnRanks, ::testing::Values(1, 2, 3));

/// Notes the dtype that it sees; a product with its weight in the weight's dtype.
struct Sees : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    seen = x.scalar_type();
    return x.to(weight.scalar_type()) * weight;
  }
  at::ScalarType seen = at::kLong;
  at::Tensor weight = register_parameter("weight", here(at::ones({kWidth})));
};

PrecisionPolicy with_pin(PrecisionPolicy policy) {
  PrecisionRule rule;
  rule.match = {"weight"};
  rule.pin = true;
  policy.rules = {rule};
  return policy;
}

// Naive: fp32 is rounded to the policy's bf16 at the door of a unit that computes in fp32.
TEST_P_ON_RANKS(UnitsOnRanks, AUnitThatComputesWiderThanThePolicyGetsItsInputsUnrounded,
                GetParam()) {
  auto module = std::make_shared<Sees>();
  auto handle = fully_shard(module, data_mesh(world), with_pin(in_bfloat16()));
  EXPECT_EQ(handle.contract().units.at(0).input, std::nullopt);
  const auto y = handle.forward(here(at::full({kWidth}, kFine)));
  EXPECT_EQ(module->seen, at::kFloat);
  EXPECT_TRUE(same_bits(y.detach(), here(at::full({kWidth}, static_cast<float>(kFine)))));
  backward(y.sum());

  auto narrow = std::make_shared<Sees>();
  auto other = fully_shard(narrow, data_mesh(world), in_bfloat16());
  backward(other.forward(here(at::full({kWidth}, kFine))).sum());
  EXPECT_EQ(narrow->seen, at::kBFloat16);
}

/// Two units in one.
struct Two : torch::nn::Module {
  Two(const Mesh& mesh, const PrecisionPolicy& policy, const ShardOptions& first = {})
      : one(register_module("one", std::make_shared<Sharded<Sees>>(fully_shard(
                                       std::make_shared<Sees>(), mesh, policy, first)))),
        two(register_module("two", std::make_shared<Sharded<Sees>>(
                                       fully_shard(std::make_shared<Sees>(), mesh, policy)))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto y = one->forward(x);
    between = y.scalar_type();
    return two->forward(y);
  }
  at::ScalarType between = at::kLong;
  std::shared_ptr<Sharded<Sees>> one, two;
};

// Naive: output_dtype = float32 makes the activations between inner units float32, twice as large.
TEST_P_ON_RANKS(UnitsOnRanks, InnerUnitsLeaveTheirOutputsAndTheOutermostCastsThem, GetParam()) {
  auto policy = in_bfloat16();
  policy.output_dtype = DType::kFloat32;
  auto module = std::make_shared<Two>(data_mesh(world), policy);
  EXPECT_EQ(module->one->contract().units.at(0).output, DType::kFloat32) << "while it stands alone";
  auto handle = fully_shard(module, data_mesh(world), policy);
  const auto y = handle.forward(here(at::ones({kWidth})));
  EXPECT_EQ(module->between, at::kBFloat16);
  EXPECT_EQ(y.scalar_type(), at::kFloat);
  backward(y.sum());
  const auto units = handle.contract().units;
  ASSERT_EQ(units.size(), 3U);
  EXPECT_EQ(units[0].output, DType::kFloat32);
  EXPECT_EQ(units[1].name, "one");
  EXPECT_TRUE(units[1].nested && units[2].nested && !units[0].nested);
  EXPECT_EQ(units[1].output, std::nullopt);
  EXPECT_EQ(units[1].activation, DType::kBFloat16);
}

TEST_P_ON_RANKS(UnitsOnRanks, AUnitsOwnOutputDtypeHoldsWhereverItStands, GetParam()) {
  ShardOptions wide;
  wide.output_dtype = DType::kFloat32;
  auto module = std::make_shared<Two>(data_mesh(world), in_bfloat16(), wide);
  auto handle = fully_shard(module, data_mesh(world), in_bfloat16());
  const auto y = handle.forward(here(at::ones({kWidth})));
  EXPECT_EQ(module->between, at::kFloat);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  backward(y.to(at::kFloat).sum());
}

/// Returns what both ranks say when rank 1 shards with `change`d policy.
std::string disagreement(const std::function<void(PrecisionPolicy&)>& change) {
  return thrown_by([&] {
    ranks(2).run([&](World& world) {
      auto policy = in_bfloat16();
      if (world.rank() == 1) change(policy);
      fully_shard(std::make_shared<Sees>(), data_mesh(world), policy);
    });
  });
}

// Naive: only what decides over collectives is compared, and ranks compute different numbers.
TEST(UnitsOfRanks, ThatCastDifferentlyAreRefusedWithTheFirstDifference) {
  EXPECT_THAT(disagreement([](auto& policy) { policy.output_dtype = DType::kFloat32; }),
              Says("contracts differ between ranks", "unit (root) output none",
                   "unit (root) output float32"));
  EXPECT_THAT(disagreement([](auto& policy) { policy.cast_forward_inputs = false; }),
              Says("unit (root) input bfloat16", "unit (root) input none"));
  EXPECT_THAT(disagreement([](auto& policy) { policy.optimizer.no_decay = {"weight"}; }),
              Says("parameter weight decays none", "parameter weight decays false"));
  EXPECT_EQ(disagreement([](auto&) {}), "");
}

}  // namespace
}  // namespace tessera::test::fsdp_units_test
