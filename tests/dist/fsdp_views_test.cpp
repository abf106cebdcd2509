// Parameters that lie in one storage: views of one flat tensor, as fused initialisers make them.

#include "support/plain.h"
#include "support/test.h"

namespace tessera::test::fsdp_views_test {
namespace {

constexpr std::int64_t kWidth = 4;

/// y = (x a) b + c in one storage: `a` and `b` as they are given, `c` behind them.
struct Fused : torch::nn::Module {
  Fused(const at::Tensor& first, const at::Tensor& second, const at::Tensor& third)
      : a(register_parameter("a", first)),
        b(register_parameter("b", second)),
        c(register_parameter("c", third)) {}
  at::Tensor forward(const at::Tensor& x) { return at::matmul(at::matmul(x, a), b) + c; }
  at::Tensor a, b, c;
};

/// Row blocks of one storage, one after the other.
std::shared_ptr<Fused> in_rows() {
  const auto flat = seeded(3, {2 * kWidth + 1, kWidth});
  return std::make_shared<Fused>(flat.narrow(0, 0, kWidth), flat.narrow(0, kWidth, kWidth),
                                 flat[2 * kWidth]);
}

/// Column blocks: each lies between the elements of the other.
std::shared_ptr<Fused> in_columns() {
  const auto flat = seeded(3, {kWidth, 2 * kWidth + 1});
  return std::make_shared<Fused>(flat.narrow(1, 0, kWidth), flat.narrow(1, kWidth, kWidth),
                                 flat.select(1, 2 * kWidth));
}

/// Copies the module, with memory of its own for each.
std::shared_ptr<Fused> separate(const Fused& fused) {
  const auto own = [](const at::Tensor& tensor) {
    return tensor.detach().clone(at::MemoryFormat::Contiguous);
  };
  return std::make_shared<Fused>(own(fused.a), own(fused.b), own(fused.c));
}

class ViewsOnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ViewsOnRanks, ::testing::Values(1, 2, 3));

void expect_trains(World& world, const std::shared_ptr<Fused>& module) {
  const auto plain = separate(*module);
  auto handle = fully_shard(module, data_mesh(world));
  for (int step = 0; step < 2; ++step) {
    handle.zero_grad();
    backward(squares(handle.forward(input_of(world.rank(), step, kWidth))));
    expect_same(whole_gradients(handle), gradients_of_squares(*plain, world.size(), step, kWidth));
  }
}

// Naive: the first of them takes the storage with it, and the others are read from what is gone,
// in the middle of laying the module out.
TEST_P_ON_RANKS(ViewsOnRanks, DisjointOnesTrainAsUnsharded, GetParam()) {
  expect_trains(world, in_rows());
  expect_trains(world, in_columns());
}

// A unit of several buckets, each of which is laid out by itself.
TEST_P_ON_RANKS(ViewsOnRanks, OfSeveralBucketsTrainToo, GetParam()) {
  PrecisionPolicy policy;
  PrecisionRule rule;
  rule.match = {"b"};
  rule.reduce_dtype = DType::kFloat64;
  rule.accumulate_dtype = DType::kFloat64;
  policy.rules = {rule};
  auto handle = fully_shard(in_rows(), data_mesh(world), policy);
  const auto plain = in_rows();
  const auto x = input_of(world.rank(), 0, kWidth);
  EXPECT_TRUE(same_bits(handle.forward(x).detach(), plain->forward(x).detach()));
}

// Somebody outside still looks at the storage: told at the access, as for any parameter.
TEST_ON_RANKS(Views, ATensorOutsideThrowsAfterwards, 2) {
  const auto flat = seeded(3, {2 * kWidth + 1, kWidth});
  auto module = std::make_shared<Fused>(flat.narrow(0, 0, kWidth), flat.narrow(0, kWidth, kWidth),
                                        flat[2 * kWidth]);
  auto handle = fully_shard(module, data_mesh(world));
  EXPECT_THAT(thrown_by([&] { (void)flat.sum(); }), Says("shared its storage"));
}

/// Nothing of the module may have changed by a refusal: it still computes what it did.
void expect_refused(World& world, const std::shared_ptr<Fused>& module, const char* what,
                    const ShardOptions& options = {}) {
  const auto x = input_of(0, 0, kWidth);
  const auto before = module->forward(x).detach();
  EXPECT_THAT(thrown_by([&] { fully_shard(module, data_mesh(world), {}, options); }), Says(what));
  EXPECT_TRUE(same_bits(module->forward(x).detach(), before)) << what;
}

// Naive: refused in the middle, or what stays plain is lost.
TEST_ON_RANKS(Views, OverlapsAndNeighboursThatStayPlainAreRefusedBeforeAnythingChanges, 1) {
  const auto flat = seeded(3, {2 * kWidth, kWidth});
  const auto overlapping = [&] {
    return std::make_shared<Fused>(flat.narrow(0, 0, kWidth), flat.narrow(0, kWidth - 1, kWidth),
                                   seeded(4, {kWidth}));
  };
  expect_refused(world, overlapping(), "parameters a and b: found two views of the same memory");
  auto with_buffer = in_rows();
  with_buffer->register_buffer("row", with_buffer->a.detach()[1]);
  expect_refused(world, with_buffer, "memory that it shares with buffer row");
  auto with_ignored = in_rows();
  ShardOptions options;
  options.ignored_parameters = {with_ignored->b};
  expect_refused(world, with_ignored, "ShardOptions::ignored_parameters", options);
}

// Naive: an assert or a message about an access, with half of the outer module laid out.
TEST(Views, OfAParameterThatIsShardedAlreadyAreRefusedBeforeAnythingChanges) {
  for (const int count : {1, 2}) {
    ranks(count).run([](World& world) {
      const auto flat = seeded(3, {2 * kWidth, kWidth});
      auto first = std::make_shared<Scale>(here(at::ones({kWidth})));
      first->weight.set_data(flat[0]);
      auto second = std::make_shared<Fused>(seeded(5, {kWidth, kWidth}), flat.narrow(0, 1, kWidth),
                                            seeded(6, {kWidth}));
      auto inner = fully_shard(first, data_mesh(world));
      EXPECT_THAT(thrown_by([&] { fully_shard(second, data_mesh(world)); }),
                  Says("parameter b: found that the memory which it shared", "clone()"));
      EXPECT_TRUE(same_bits(second->a.detach(), seeded(5, {kWidth, kWidth})));
    });
  }
}

}  // namespace
}  // namespace tessera::test::fsdp_views_test
