// Weight gradients that backwards leave for later: the same bits as in one backward, and pending
// ones are named.

#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/unit.h"
#include "nn/grouped_linear.h"
#include "nn/linear.h"
#include "nn/parameter.h"
#include "support/plain.h"
#include "support/test.h"
#include "tessera/clip.h"

namespace tessera::test::weight_grad_store_test {
namespace {

constexpr std::int64_t kWidth = 6;
constexpr std::int64_t kExperts = 3;

at::Tensor small(std::uint64_t seed, at::IntArrayRef shape) { return seeded(seed, shape) * 0.25; }

/// A linear layer, then experts; the one in the middle has no rows.
class Layer : public torch::nn::Module {
 public:
  Layer(std::uint64_t seed, RecomputeMode mode) : mode_(mode) {
    const at::NoGradGuard no_grad;
    linear_ =
        register_module("linear", std::make_shared<nn::Linear>(kWidth, kWidth, nn::Bias::kYes));
    linear_->weight.set_data(small(seed, {kWidth, kWidth}));
    linear_->bias.set_data(small(seed + 1, {kWidth}));
    experts_ = register_parameter("experts", small(seed + 2, {kExperts, kWidth, kWidth}));
    bias_ = register_parameter("bias", small(seed + 3, {kExperts, kWidth}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto run = [this](const std::vector<at::Tensor>& in) {
      const at::Tensor y = linear_->forward(in[0]);
      const nn::GroupOffsets offsets{0, 2, 2, y.size(0)};
      return at::tanh(nn::grouped_linear(y, {experts_, bias_}, offsets));
    };
    return mode_ == RecomputeMode::kNone ? run({x}) : checkpoint(run, {x}, mode_);
  }

 private:
  RecomputeMode mode_;
  std::shared_ptr<nn::Linear> linear_;
  at::Tensor experts_, bias_;
};

class Layers : public torch::nn::Module {
 public:
  Layers(const Mesh& mesh, const PrecisionPolicy& policy, RecomputeMode mode) {
    for (std::uint64_t i = 0; i < 2; ++i) {
      layers_.push_back(register_module(concat("layer", i),
                                        std::make_shared<Sharded<Layer>>(fully_shard(
                                            std::make_shared<Layer>(10 * i, mode), mesh, policy))));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : layers_) x = layer->forward(x);
    return x;
  }

 private:
  std::vector<std::shared_ptr<Sharded<Layer>>> layers_;
};

enum class Weights : std::uint8_t { kAtOnce, kAfterEach, kAfterAll };

Tensors gradients(World& world, const PrecisionPolicy& policy, RecomputeMode mode,
                  Weights weights) {
  auto handle = fully_shard(std::make_shared<Layers>(data_mesh(world), policy, mode),
                            data_mesh(world), policy);
  handle.set_defer_weight_gradients(weights != Weights::kAtOnce);
  constexpr int kMicroBatches = 3;
  for (int i = 0; i < kMicroBatches; ++i) {
    handle.set_requires_gradient_sync(i + 1 == kMicroBatches);
    const at::Tensor x = input_of(world.rank(), i, kWidth);
    backward(squares(handle.forward(x)));
    if (weights == Weights::kAfterEach) handle.run_weight_gradients();
  }
  if (weights == Weights::kAfterAll) handle.run_weight_gradients();
  return whole_gradients(handle);
}

class DeferredWeightsOnRanks : public ::testing::TestWithParam<std::tuple<int, RecomputeMode>> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DeferredWeightsOnRanks,
                         ::testing::Combine(::testing::Values(1, 2, 3),
                                            ::testing::Values(RecomputeMode::kNone,
                                                              RecomputeMode::kSelective,
                                                              RecomputeMode::kFull)));

TEST_P(DeferredWeightsOnRanks, AreTheBitsOfOneBackward) {
  const int count = std::get<0>(GetParam());
  const RecomputeMode mode = std::get<1>(GetParam());
  ranks(count).run([&](World& world) {
    for (const auto& policy : {PrecisionPolicy{}, in_bfloat16()}) {
      const auto expected = gradients(world, policy, mode, Weights::kAtOnce);
      ASSERT_EQ(expected.size(), 8U);
      for (const auto& [name, gradient] : expected) {
        EXPECT_TRUE(gradient.ne(0).any().item<bool>()) << name;
      }
      expect_same(gradients(world, policy, mode, Weights::kAfterEach), expected, "after each");
      expect_same(gradients(world, policy, mode, Weights::kAfterAll), expected, "after all");
    }
  });
}

// Naive: a norm of what has arrived so far.
TEST_ON_RANKS(DeferredWeights, PendingGradientsAreNamed, 1) {
  const auto mesh = data_mesh(world);
  auto handle =
      fully_shard(std::make_shared<Layers>(mesh, PrecisionPolicy{}, RecomputeMode::kNone), mesh);
  handle.set_defer_weight_gradients(true);
  const auto pass = [&] { backward(squares(handle.forward(input_of(0, 0, kWidth)))); };
  pass();
  pass();
  EXPECT_THAT(
      thrown_by([&] { clip_grad_norm(handle, 1.0); }),
      Says("12 deferred gradients", "layer0.linear.weight (layer layer0.linear", "micro-batch 1"));
  EXPECT_THAT(thrown_by([&] { handle.set_defer_weight_gradients(false); }),
              Says("set_defer_weight_gradients"));
  handle.run_weight_gradients();
  EXPECT_GT(clip_grad_norm(handle, 1.0), 0);
}

// Naive: a rank that forms its gradients at once reduces while the others do not.
TEST(DeferredWeights, RanksThatDifferAreNamed) {
  const auto errors = errors_of(2, [](World& world) {
    const auto mesh = data_mesh(world);
    auto handle =
        fully_shard(std::make_shared<Layers>(mesh, PrecisionPolicy{}, RecomputeMode::kNone), mesh);
    handle.set_defer_weight_gradients(world.rank() == 1);
    handle.forward(input_of(0, 0, kWidth));
  });
  EXPECT_THAT(errors, Contains(Says("set_defer_weight_gradients(true)")));
}

/// Two results: of a unit that defers, and of one that does not.
struct TwoResults : torch::nn::Module {
  explicit TwoResults(const Mesh& mesh) {
    auto layer = std::make_shared<nn::Linear>(kWidth, kWidth, nn::Bias::kNo);
    layer->weight.set_data(small(20, {kWidth, kWidth}));
    linear = register_module(
        "linear", std::make_shared<Sharded<nn::Linear>>(fully_shard(std::move(layer), mesh)));
    affine = register_module("affine", std::make_shared<Sharded<Affine>>(fully_shard(
                                           std::make_shared<Affine>(21, kWidth, kWidth), mesh)));
  }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    auto first = linear->forward(x);
    return {first, affine->forward(x)};
  }
  std::shared_ptr<Sharded<nn::Linear>> linear;
  std::shared_ptr<Sharded<Affine>> affine;
};

// Naive: a rank without tickets shows its gradients at once, and waits for the others, which have
// gone on to the next forward, to show theirs.
TEST(DeferredWeights, MayBeOfSomeRanksOnly) {
  for (const int count : {2, 3}) {
    ranks(count).run([](World& world) {
      std::vector<Tensors> found;
      for (const bool defers : {false, true}) {
        const auto mesh = data_mesh(world);
        auto handle = fully_shard(std::make_shared<TwoResults>(mesh), mesh);
        handle.set_defer_weight_gradients(defers);
        for (int step = 0; step < 2; ++step) {
          handle.zero_grad();
          for (int i = 0; i < 3; ++i) {
            handle.set_requires_gradient_sync(i == 2);
            const auto both = handle.forward(input_of(world.rank(), i, kWidth));
            backward(squares(world.rank() == i % 2 ? both.first : both.second));
          }
          if (defers) {
            EXPECT_NE(thrown_by([&] { whole_gradients(handle); }), "");
            handle.run_weight_gradients();
          }
          found.push_back(whole_gradients(handle));
        }
      }
      expect_same(found[2], found[0], "first step");
      expect_same(found[3], found[1], "second step");
    });
  }
}

}  // namespace
}  // namespace tessera::test::weight_grad_store_test
