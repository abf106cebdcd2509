// Other methods of a module through its handle: as forward in every respect.

#include "dist/controls.h"
#include "support/test.h"

namespace tessera::test::fsdp_method_test {
namespace {

class Norm1 : public torch::nn::Module {
 public:
  at::Tensor shared = register_parameter("shared", seeded(5, {4}));
  at::Tensor of_the_base(at::Tensor x) { return x * shared; }
};

/// An encoder and a decoder with the same weights, as a user would write them.
class Coder : public Norm1 {
 public:
  at::Tensor weight = register_parameter("weight", seeded(6, {9, 4}));
  at::Tensor forward(const at::Tensor& x) { return decode(encode(x).first, 0.5); }
  std::pair<at::Tensor, at::Tensor> encode(const at::Tensor& x) {
    seen = x.scalar_type();
    auto y = at::linear(x * shared, weight);
    return {at::relu(y), y};
  }
  at::Tensor decode(const at::Tensor& z, double scale) const {
    return at::linear(z, weight.t()) * scale;
  }
  void remember(at::Tensor&& x) { memory = std::move(x).detach().clone(); }
  at::ScalarType seen = at::kFloat;
  at::Tensor memory;
};

class Methods : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Methods, ::testing::Values(1, 2, 3, 4));

at::Tensor input(int rank) { return seeded(static_cast<std::uint64_t>(40 + rank), {3, 4}); }

TEST_P_ON_RANKS(Methods, TrainAsForwardDoes, GetParam()) {
  Coder plain;
  auto handle = fully_shard(std::make_shared<Coder>(), data_mesh(world));
  const auto loss_of = [](const at::Tensor& x, auto&& encode, auto&& decode, auto&& base) {
    const auto [z, y] = encode(x);
    return squares(decode(z)) + squares(base(y.narrow(1, 0, 4)));
  };
  for (int step = 0; step < 3; ++step) {
    handle.zero_grad();
    backward(loss_of(
        input(world.rank()), [&](const auto& x) { return handle.call(&Coder::encode, x); },
        [&](const auto& z) { return handle.call(&Coder::decode, z, 2); },
        [&](const auto& y) { return handle.call(&Coder::of_the_base, y); }));
    expect_same(whole_gradients(handle),
                plain_gradients(plain, world.size(), world.size(), [&](int rank) {
                  backward(loss_of(
                      input(rank), [&](const auto& x) { return plain.encode(x); },
                      [&](const auto& z) { return plain.decode(z, 2); },
                      [&](const auto& y) { return plain.of_the_base(y); }));
                }));
  }
  // A method may be in one loss with forward.
  handle.zero_grad();
  backward(squares(handle.forward(input(world.rank()))) +
           squares(handle.call(&Coder::of_the_base, input(world.rank()))));
  expect_same(
      whole_gradients(handle), plain_gradients(plain, world.size(), world.size(), [&](int rank) {
        backward(squares(plain.forward(input(rank))) + squares(plain.of_the_base(input(rank))));
      }));
}

TEST_P_ON_RANKS(Methods, CastGatherAndReleaseAsForwardDoes, GetParam()) {
  auto policy = in_bfloat16();
  policy.output_dtype = DType::kFloat32;
  ShardOptions options;
  options.reshard_after_forward = true;
  auto module = std::make_shared<Coder>();
  auto handle = fully_shard(module, data_mesh(world), policy, options);
  const auto [z, y] = handle.call(&Coder::encode, input(0));
  EXPECT_EQ(module->seen, at::kBFloat16);
  EXPECT_EQ(z.scalar_type(), at::kFloat);
  EXPECT_EQ(y.scalar_type(), at::kFloat);
  EXPECT_THAT(thrown_by([&] { (void)module->weight.sum(); }), Says("while they are sharded"));
  const at::NoGradGuard no_grad;
  handle.call(&Coder::remember, input(1));
  EXPECT_EQ(module->memory.scalar_type(), at::kBFloat16);
}

}  // namespace
}  // namespace tessera::test::fsdp_method_test
