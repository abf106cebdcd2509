// debug.check_dtypes: operations whose results leave their unit's dtype are found, and by whom.
#include "tessera/dtype_watch.h"

#include <ATen/record_function.h>

#include "support/plain.h"
#include "support/ranks.h"
#include "support/test.h"

namespace tessera::test::dtype_watch_test {
namespace {

constexpr std::int64_t kWidth = 6;

/// A product with its weight, and what a test wants of it.
struct Scaled : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    auto y = at::linear(x, weight);
    return then ? then(*this, y) : y;
  }
  at::Tensor weight = register_parameter("weight", seeded(1, {kWidth, kWidth}));
  at::Tensor scale = register_buffer("scale", here(at::ones({kWidth})));
  std::function<at::Tensor(Scaled&, const at::Tensor&)> then;
};

std::vector<DtypeFinding> findings_of(
    const std::function<at::Tensor(Scaled&, const at::Tensor&)>& then,
    const PrecisionPolicy& policy = in_bfloat16()) {
  std::vector<DtypeFinding> findings;
  ranks(1).run([&](World& world) {
    auto module = std::make_shared<Scaled>();
    module->then = then;
    auto handle = fully_shard(module, data_mesh(world), policy);
    const DtypeWatch watch(handle);
    const auto y = handle.forward(here(at::ones({2, kWidth})));
    findings = watch.findings();
    backward(squares(y));
    EXPECT_EQ(watch.findings(), findings) << "backward is not looked at";
  });
  return findings;
}

DtypeFinding finding(const char* op, std::string cause, std::int64_t count = 1) {
  return {"(root)", op, DType::kBFloat16, "Float", std::move(cause), count};
}

// Row 14 of the fact file: silent elsewhere.
TEST(DtypeWatch, ABufferThatPromotesIsNamedAndSoIsWhatFollows) {
  EXPECT_THAT(
      findings_of([](Scaled& self, const at::Tensor& y) { return at::relu(y * self.scale) + y; }),
      ElementsAre(finding("aten::mul", "buffer scale"), finding("aten::relu", "buffer scale"),
                  finding("aten::add", "buffer scale")));
}

TEST(DtypeWatch, OperationsThatComeAgainAreCounted) {
  EXPECT_THAT(findings_of([](Scaled& self, const at::Tensor& y) {
                const auto once = (y * self.scale).to(at::kBFloat16);
                return (once * self.scale).to(at::kBFloat16);
              }),
              ElementsAre(finding("aten::mul", "buffer scale", 2)));
}

TEST(DtypeWatch, APinnedParameterAConstantAndACastAreNamed) {
  auto pinned = in_bfloat16();
  PrecisionRule rule;
  rule.match = {"weight"};
  rule.pin = true;
  pinned.rules = {rule};
  pinned.cast_forward_inputs = false;
  pinned.output_dtype = DType::kBFloat16;
  EXPECT_THAT(findings_of({}, pinned), ElementsAre(finding("aten::linear", "parameter weight")));
  EXPECT_THAT(findings_of([](Scaled&, const at::Tensor& y) {
                return y * at::ones({kWidth}, y.options().dtype(at::kFloat));
              }),
              ElementsAre(finding("aten::mul", "a tensor that aten::ones made in unit (root)")));
  EXPECT_THAT(findings_of([](Scaled&, const at::Tensor& y) { return y.to(at::kFloat); }),
              ElementsAre(finding("aten::to", "the operation itself")));
  at::Tensor outside;
  ranks(1).run([&](World&) { outside = here(at::ones({kWidth})); });
  EXPECT_THAT(
      findings_of(
          [&](Scaled&, const at::Tensor& y) { return at::cat({y, outside.view({1, -1})}); }),
      ElementsAre(finding("aten::cat", "a tensor that is neither parameter, buffer nor input")));
}

// Operations that compute wider on purpose and cast back; tables made on the way that meet no
// activation.
TEST(DtypeWatch, WideScopesAndTablesAreNoFindings) {
  EXPECT_THAT(findings_of([](Scaled&, const at::Tensor& y) {
                const WideScope wide;
                const auto x = y.to(at::kFloat);
                return (x * at::rsqrt(x.pow(2).mean(-1, true))).to(y.scalar_type());
              }),
              IsEmpty());
  EXPECT_THAT(findings_of([](Scaled&, const at::Tensor& y) {
                const auto angles =
                    at::outer(here(at::arange(2, at::kFloat)), here(at::ones({kWidth})));
                return y * angles.cos().to(y.scalar_type());
              }),
              IsEmpty());
  // The scope's result is not: a norm that forgets to cast back.
  EXPECT_THAT(findings_of([](Scaled&, const at::Tensor& y) {
                at::Tensor x;
                {
                  const WideScope wide;
                  x = y.to(at::kFloat);
                }
                return y + x;
              }),
              ElementsAre(finding("aten::add", "a tensor that aten::to made in unit (root)")));
}

/// An embedding in float32 in front of a bfloat16 unit that takes what comes.
struct Text : torch::nn::Module {
  explicit Text(const Mesh& mesh) {
    auto keep = in_bfloat16();
    keep.cast_forward_inputs = false;
    auto pin = keep;
    PrecisionRule rule;
    rule.match = {"scale"};
    rule.pin = true;
    pin.rules = {rule};
    auto chain = std::make_shared<Chain>(1, 1, kWidth);
    first =
        register_module("first", std::make_shared<Sharded<Chain>>(fully_shard(chain, mesh, pin)));
    second = register_module("second", std::make_shared<Sharded<Scaled>>(
                                           fully_shard(std::make_shared<Scaled>(), mesh, keep)));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = first->forward(x);
    seen = y.scalar_type();
    return second->forward(y.to(at::kBFloat16));
  }
  at::ScalarType seen = at::kLong;
  std::shared_ptr<Sharded<Chain>> first;
  std::shared_ptr<Sharded<Scaled>> second;
};

class WatchOnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Counts, WatchOnRanks, ::testing::Values(1, 2, 3));

TEST_P_ON_RANKS(WatchOnRanks, EveryRankFindsTheSameInItsUnits, GetParam()) {
  auto model = std::make_shared<Text>(data_mesh(world));
  auto handle = fully_shard(model, data_mesh(world), in_bfloat16());
  const DtypeWatch watch(handle);
  handle.forward(here(at::ones({2, kWidth})));
  EXPECT_EQ(model->seen, at::kFloat);
  const auto found = watch.findings();
  ASSERT_FALSE(found.empty());
  EXPECT_EQ(found.front().unit, "first");
  EXPECT_EQ(found.front().op, "aten::mul");
  EXPECT_EQ(found.front().cause, "parameter first.scale");
  EXPECT_TRUE(std::ranges::none_of(found, [](const auto& each) { return each.unit == "second"; }));
  EXPECT_THAT(to_string(found), Says("unit first: aten::mul gave Float, expected bfloat16, "
                                     "because of parameter first.scale"));
}

// Property: a forward in one dtype has no findings, plain fp32 included, for all its units.
TEST_P(WatchOnRanks, AForwardInOneDtypeIsClean) {
  for (const bool narrow : {false, true}) {
    ranks(GetParam()).run([&](World& world) {
      ShardedChain model(data_mesh(world), 1, 3, kWidth,
                         narrow ? in_bfloat16() : PrecisionPolicy{});
      const DtypeWatch watch(model.handle);
      model.handle.forward(input_of(world.rank(), 0, kWidth));
      EXPECT_EQ(to_string(watch.findings()), "");
    });
  }
}

TEST_ON_RANKS(DtypeWatch, LeavesNothingBehindAndIsOneAThread, 1) {
  auto handle = fully_shard(std::make_shared<Scaled>(), data_mesh(world), in_bfloat16());
  {
    const DtypeWatch watch(handle);
    EXPECT_TRUE(at::hasThreadLocalCallbacks());
    EXPECT_THAT(thrown_by([&] { const DtypeWatch second(handle); }), Says("on this thread"));
  }
  EXPECT_FALSE(at::hasThreadLocalCallbacks());
  EXPECT_FALSE(at::hasCallbacks());
}

}  // namespace
}  // namespace tessera::test::dtype_watch_test
