// The library as a program uses it: holders, calls, torch::save, and how weights are tied.
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <sstream>

#include "support/plain.h"
#include "support/test.h"
#include "tessera/state_dict.h"

namespace tessera::test::fsdp_library_test {
namespace {

constexpr std::int64_t kWidth = 5;
constexpr std::int64_t kTokens = 11;

struct NetImpl : torch::nn::Module {
  NetImpl() : inner(register_module("inner", std::make_shared<Affine>(3, kWidth, kWidth))) {}
  at::Tensor forward(const at::Tensor& x, double factor) {
    return at::tanh(inner->forward(x)) * factor;
  }
  std::shared_ptr<Affine> inner;
};
TORCH_MODULE(Net);

/// A class of its own for the specialization below.
struct TwoWays : torch::nn::Module {
  TwoWays() : weight(register_parameter("weight", seeded(4, {kWidth}))) {}
  at::Tensor forward(const at::Tensor& x) { return x * weight; }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& y) { return x * weight + y; }
  at::Tensor weight;
};

}  // namespace
}  // namespace tessera::test::fsdp_library_test

template <>
struct tessera::ForwardSignature<tessera::test::fsdp_library_test::TwoWays> {
  using type = at::Tensor(const at::Tensor&, const at::Tensor&);
};

namespace tessera::test::fsdp_library_test {
namespace {

// A holder is sharded as the shared_ptr in it is, and its handle called as it is.
TEST_ON_RANKS(Holders, AreShardedAndCalledAsTheModuleInThem, 2) {
  Net net;
  auto handle = fully_shard(net, data_mesh(world));
  static_assert(std::is_same_v<decltype(handle), Sharded<NetImpl>>);
  EXPECT_EQ(handle.module(), net.ptr());
  Net plain;
  const auto x = input_of(world.rank(), 0, kWidth);
  EXPECT_TRUE(same_bits(handle(x, 2.0), plain(x, 2.0)));
  EXPECT_TRUE(same_bits(handle(x, 3.0), handle.forward(x, 3.0)));
  backward(squares(handle(x, 2.0)));
  expect_same(whole_gradients(handle),
              plain_gradients(*plain, world.size(), world.size(), [&](int rank) {
                backward(squares(plain(input_of(rank, 0, kWidth), 2.0)));
              }));
}

// libtorch's own holders, too; one without a module is refused as a null pointer is.
TEST_ON_RANKS(Holders, OfLibtorchAndEmptyOnes, 2) {
  torch::nn::Sequential layers(std::make_shared<Affine>(1, kWidth, kWidth),
                               std::make_shared<Affine>(2, kWidth, kWidth));
  auto handle = fully_shard(layers, data_mesh(world));
  const auto x = input_of(0, 0, kWidth);
  EXPECT_TRUE(same_bits(handle(x),
                        Affine(2, kWidth, kWidth).forward(Affine(1, kWidth, kWidth).forward(x))));
  EXPECT_THAT(thrown_by([&] { fully_shard(Net(nullptr), data_mesh(world)); }),
              Says("found no module"));
}

// Among several forwards the one that ForwardSignature names is called.
TEST_ON_RANKS(ForwardSignatures, SayWhichOfSeveralForwardsIsMeant, 2) {
  auto handle = fully_shard(std::make_shared<TwoWays>(), data_mesh(world));
  const auto x = input_of(0, 0, kWidth);
  EXPECT_TRUE(same_bits(handle(x, x), TwoWays().forward(x, x)));
}

// Where the type of the handle is lost, or a plain module holds it, torch::save is refused at run
// time.
TEST(TorchSave, IsRefusedWithTheWayToGo) {
  struct Holds : torch::nn::Module {};
  ranks(2).run([](World& world) {
    const auto handle = std::make_shared<Sharded<NetImpl>>(fully_shard(Net(), data_mesh(world)));
    const std::shared_ptr<torch::nn::Module> module = handle;
    const auto parent = std::make_shared<Holds>();
    parent->register_module("net", handle);
    const std::shared_ptr<torch::nn::Module> outer = parent;
    for (auto one : {module, outer}) {
      std::stringstream file;
      EXPECT_THAT(thrown_by([&] { torch::save(one, file); }),
                  Says("torch::save: found a sharded module", "state_dict", "save_checkpoint"));
    }
    std::stringstream file;
    std::shared_ptr<torch::nn::Module> plain = Net().ptr();
    torch::save(plain, file);
    auto one = module;
    EXPECT_THAT(thrown_by([&] { torch::load(one, file); }),
                Says("load_state_dict", "load_checkpoint"));
  });
}

// ------------------------------------------------------------------------------------------- tied

/// docs/fsdp2.md, "Tied weights": libtorch's layers over one storage.
struct Tied : torch::nn::Module {
  explicit Tied(at::ScalarType dtype) {
    embed = register_module("embed", torch::nn::Embedding(kTokens, kWidth));
    block = register_module("block", std::make_shared<Block>(5, kWidth, dtype));
    head = register_module(
        "head", torch::nn::Linear(torch::nn::LinearOptions(kWidth, kTokens).bias(false)));
    embed->weight.set_data(seeded(6, {kTokens, kWidth}, dtype));
    head->weight.set_data(embed->weight);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    const auto h = embed(tokens);
    return head(handle ? (*handle)(h) : block->forward(h));
  }
  torch::nn::Embedding embed{nullptr};
  std::shared_ptr<Block> block;
  std::shared_ptr<Sharded<Block>> handle;
  torch::nn::Linear head{nullptr};
};

at::Tensor tokens_of(int rank) {
  return (here(at::arange(6, at::kLong)) * (rank + 2)).remainder(kTokens);
}

/// The same model as one tensor that is used twice, unsharded: its gradient on one rank.
Tensors one_tensor_used_twice(int rank, at::ScalarType dtype) {
  Block block(5, kWidth, dtype);
  const auto weight = seeded(6, {kTokens, kWidth}, dtype).requires_grad_();
  backward(squares(at::linear(block.forward(at::embedding(weight, tokens_of(rank))), weight)));
  return {
      {"embed.weight", weight.grad()}, {"block.a", block.a.grad()}, {"block.b", block.b.grad()}};
}

// The gradient of weights tied over one storage is the unsharded one of a tensor that is used
// twice, with or without a unit in between; they stay tied over steps, and are one entry each in a
// full state dict.
TEST(TiedWeights, HaveTheGradientOfOneTensorThatIsUsedTwice) {
  for (const auto backend : {ThreadBackend::kInProcess, ThreadBackend::kGloo}) {
    for (const int count : {1, 2, 3}) {
      for (const bool inner : {false, true}) {
        ranks(count, backend).run([&](World& world) {
          const auto mesh = data_mesh(world);
          const auto model = std::make_shared<Tied>(at::kFloat);
          if (inner) {
            model->handle = std::make_shared<Sharded<Block>>(fully_shard(model->block, mesh));
            model->replace_module("block", model->handle);
          }
          auto handle = fully_shard(model, mesh);
          EXPECT_EQ(handle.parameters().size(), 3U) << "one shard of both";
          const auto optimizer = make_sgd(handle, sgd(0.1));
          backward(squares(handle(tokens_of(world.rank()))));
          Tensors expected;
          for (int rank = 0; rank < count; ++rank) {
            for (const auto& [name, gradient] : one_tensor_used_twice(rank, at::kFloat)) {
              auto& sum = expected[name];
              sum = sum.defined() ? sum + gradient : gradient;
            }
          }
          for (const auto& [name, gradient] : whole_gradients(handle)) {
            const auto mean = expected.at(name) / count;
            // Two uses are added in the slot or by autograd: fp32 sums of two addends, in another
            // order of ranks and uses.
            EXPECT_TRUE(at::allclose(gradient, mean, 1e-5, 1e-6)) << name << count << inner;
          }
          const auto before = whole_parameters(handle).at("embed.weight");
          optimizer->step();
          const auto after = whole_parameters(handle).at("embed.weight");
          EXPECT_TRUE(
              at::allclose(before - after, expected.at("embed.weight") * (0.1 / count), 1e-4, 1e-6))
              << "stepped once";
          Tensors dict;
          for (const auto& entry : state_dict(handle, StateDictKind::kFull))
            dict[entry.name] = entry.values;
          EXPECT_TRUE(same_bits(dict.at("embed.weight"), after));
          EXPECT_TRUE(same_bits(dict.at("head.weight"), after));
        });
      }
    }
  }
}

// In bfloat16 both uses are added in the slot unrounded: the gradient is closer to the sum in fp32
// of the uses' own gradients than autograd's sum in bfloat16.
TEST_ON_RANKS(TiedWeights, OfBFloat16AddTheirUsesUnrounded, 2) {
  PrecisionPolicy policy;
  policy.final_dtype = DType::kFloat32;
  auto handle = fully_shard(std::make_shared<Tied>(at::kBFloat16), data_mesh(world), policy);
  backward(squares(handle(tokens_of(world.rank()))));
  Tensors sums;
  for (int rank = 0; rank < world.size(); ++rank) {
    // Each use a leaf of its own: what arrives in the slot.
    Block block(5, kWidth, at::kBFloat16);
    const auto embed = seeded(6, {kTokens, kWidth}, at::kBFloat16).requires_grad_();
    const auto head = embed.detach().clone().requires_grad_();
    backward(squares(at::linear(block.forward(at::embedding(embed, tokens_of(rank))), head)));
    for (const auto& gradient : {embed.grad(), head.grad()}) {
      auto& sum = sums["embed.weight"];
      sum = sum.defined() ? sum + gradient.to(at::kFloat) : gradient.to(at::kFloat);
    }
  }
  const auto found = whole_gradients(handle).at("embed.weight");
  EXPECT_TRUE(at::allclose(found, sums.at("embed.weight") / 2, 1e-6, 1e-7));
}

}  // namespace
}  // namespace tessera::test::fsdp_library_test
