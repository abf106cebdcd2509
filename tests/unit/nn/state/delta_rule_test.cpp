// The chunked gated delta rule against its definition, a position at a time in fp64: drawn sizes,
// heads, gates and documents, outputs and every gradient.
#include "nn/state/delta_rule.h"

#include <ATen/ATen.h>

#include "dry/fake_operations.h"
#include "nn/state/delta_chunks.h"
#include "support/test.h"
#include "unit/nn/compare.h"
#include "unit/nn/drawn_documents.h"

namespace tessera::nn::delta_rule_test {
namespace {

using packed::documents_of;
using packed::drawn_rows;
using packed::Lengths;
using packed::one_by_one;
using Tensors = std::vector<at::Tensor>;

/// fp64 has 2^-53 a rounding, sums have some hundred terms, and chunks add in another order.
constexpr Bound kFloat64{0, 1e-12};
/// Sums of at most 64 positions and 24 columns, three in a row, each term rounded to 2^-24.
constexpr Bound kSumsInFloat32{0, 3 * (64 + 24) / 16777216.0};
/// One rounding of the result; inputs are compared as they have been rounded.
constexpr Bound kBFloat16{1.0 / 256, kSumsInFloat32.absolute};

enum class Decays : std::uint8_t { kWeak, kMixed, kStrong };

struct Case {
  std::int64_t rows, positions, key_heads, repeat, key_dim, value_dim;
  Decays decays;
  double alike;  ///< how much keys have in common
  bool packed;
};

Case drawn_case(std::mt19937_64& random) {
  const auto up_to = [&](std::uint64_t most) {
    return static_cast<std::int64_t>(1 + random() % most);
  };
  const std::int64_t positions = random() % 3 == 0 ? up_to(70) : up_to(200);
  return {up_to(2),
          positions,
          up_to(2),
          up_to(3),
          up_to(24),
          up_to(24),
          static_cast<Decays>(random() % 3),
          random() % 3 == 0 ? 3.0 : 0.0,
          random() % 2 == 0};
}

std::ostream& operator<<(std::ostream& out, const Case& of) {
  return out << "B " << of.rows << " T " << of.positions << " G " << of.key_heads << " R "
             << of.repeat << " K " << of.key_dim << " V " << of.value_dim << " decays "
             << static_cast<int>(of.decays) << " alike " << of.alike << " packed " << of.packed;
}

/// q, k, v, decay and beta in fp64.
Tensors drawn_inputs(const Case& of) {
  const auto options = at::TensorOptions(at::kDouble);
  const std::int64_t heads = of.key_heads * of.repeat;
  const std::vector<std::int64_t> keys{of.rows, of.positions, of.key_heads, of.key_dim};
  const at::Tensor k = at::randn(keys, options) + of.alike * at::randn({of.key_dim}, options);
  const std::vector<std::int64_t> gates{of.rows, of.positions, heads};
  at::Tensor decay = at::rand(gates, options).mul_(-0.02);
  if (of.decays != Decays::kWeak) {
    const double strong = of.decays == Decays::kMixed ? -8.0 : -200.0;
    decay = at::where(at::rand(gates, options) < 0.3, decay * -50.0 * strong, decay);
  }
  // A third of the betas is near 0, a third near 1.
  const at::Tensor beta =
      at::sigmoid(at::randint(-1, 2, gates, options).mul_(8) + at::randn(gates, options));
  return {at::randn(keys, options), k,
          at::randn({of.rows, of.positions, heads, of.value_dim}, options), decay, beta};
}

/// The rule on one document, a position at a time; autograd differentiates it.
at::Tensor recurrent(const Tensors& in) {
  const std::int64_t repeat = in[2].size(2) / in[0].size(2);
  const auto normalized = [&](const at::Tensor& x) {
    return (x / (x.square().sum(-1, true) + 1e-6).sqrt()).repeat_interleave(repeat, 2);
  };
  const at::Tensor q = normalized(in[0]) / std::sqrt(static_cast<double>(in[0].size(3)));
  const at::Tensor k = normalized(in[1]), v = in[2];
  at::Tensor state = at::zeros({v.size(0), v.size(2), k.size(3), v.size(3)}, v.options());
  Tensors read;
  for (std::int64_t t = 0; t < v.size(1); ++t) {
    const at::Tensor key = k.select(1, t).unsqueeze(-1), query = q.select(1, t).unsqueeze(-1);
    state = state * in[3].select(1, t).exp().unsqueeze(-1).unsqueeze(-1);
    const at::Tensor found = (state * key).sum(2);
    const at::Tensor written = in[4].select(1, t).unsqueeze(-1) * (v.select(1, t) - found);
    state = state + key * written.unsqueeze(2);
    read.push_back((state * query).sum(2));
  }
  return at::stack(read, 1);
}

at::Tensor chunked(const Tensors& in, const Documents& documents) {
  return gated_delta_rule({in[0], in[1], in[2], in[3], in[4]}, documents);
}

/// Outputs and gradients of a drawn case, where q, k, v have `dtype` and the gates have `gates`.
void compare_with_recurrent(const Case& of, std::mt19937_64& random, at::ScalarType dtype,
                            at::ScalarType gates, const Bound& bound) {
  SCOPED_TRACE(::testing::Message() << of);
  Tensors in = drawn_inputs(of);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = in[i].to(i < 3 ? dtype : gates);
  const std::vector<Lengths> rows =
      of.packed ? drawn_rows(random, of.rows, of.positions)
                : std::vector<Lengths>(static_cast<std::size_t>(of.rows), {of.positions});
  const Documents documents = of.packed ? documents_of(rows) : Documents{};
  const auto found = [&](const Tensors& x) { return chunked(x, documents); };
  const auto expected = [&](const Tensors& x) { return one_by_one(x, rows, recurrent); };
  Tensors wide;
  for (const at::Tensor& x : in) wide.push_back(x.to(at::kDouble));
  const at::Tensor grad = at::randn(in[2].sizes()).to(at::kBFloat16);
  const Tensors a = run(found, in, grad), b = run(expected, wide, grad);
  const std::vector<std::string> names = {"output", "q", "k", "v", "decay", "beta"};
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].scalar_type(), i == 0 ? dtype : in[i - 1].scalar_type());
    expect_close(a[i], b[i], bound, names[i]);
  }
}

void compare_drawn(std::uint64_t seed, at::ScalarType dtype, at::ScalarType gates,
                   const Bound& bound) {
  std::mt19937_64 random(seed);
  at::manual_seed(seed);
  const Case of = drawn_case(random);
  compare_with_recurrent(of, random, dtype, gates, bound);
}

TEST(DeltaRule, ChunksAreTheRecurrentRule) {
  for (std::uint64_t seed = 0; seed < 16; ++seed) {
    compare_drawn(seed, at::kDouble, at::kDouble, kFloat64);
  }
}

// So large that the CPU takes key heads in two parts.
TEST(DeltaRule, HeadsMayBeComputedInParts) {
  std::mt19937_64 random(90);
  at::manual_seed(90);
  compare_with_recurrent({2, 70, 3, 3, 128, 128, Decays::kMixed, 0, true}, random, at::kDouble,
                         at::kDouble, kFloat64);
}

TEST(DeltaRule, InFloat32IsOffBySumsOfRoundings) {
  for (std::uint64_t seed = 100; seed < 108; ++seed) {
    compare_drawn(seed, at::kFloat, at::kFloat, kSumsInFloat32);
  }
}

TEST(DeltaRule, RoundsBFloat16Once) {
  for (std::uint64_t seed = 200; seed < 204; ++seed) {
    compare_drawn(seed, at::kBFloat16, at::kFloat, kBFloat16);
  }
}

TEST(DeltaRule, APackedRowIsItsDocumentsAlone) {
  for (std::uint64_t seed = 300; seed < 312; ++seed) {
    std::mt19937_64 random(seed);
    at::manual_seed(seed);
    const Case of = drawn_case(random);
    SCOPED_TRACE(::testing::Message() << of);
    const std::vector<Lengths> rows = drawn_rows(random, of.rows, of.positions);
    const Tensors in = drawn_inputs(of);
    const at::Tensor grad = at::randn(in[2].sizes(), at::kDouble);
    const Tensors packed =
        run([&](const Tensors& x) { return chunked(x, documents_of(rows)); }, in, grad);
    const Tensors alone = run(
        [&](const Tensors& x) {
          return one_by_one(x, rows, [](const Tensors& one) { return chunked(one, {}); });
        },
        in, grad);
    for (std::size_t i = 0; i < packed.size(); ++i) {
      expect_close(packed[i], alone[i], kFloat64, "tensor " + std::to_string(i));
    }
  }
}

// Nothing of a document comes over its border, not even as a rounding.
TEST(DeltaRule, NothingComesOverABorder) {
  at::manual_seed(7);
  const Case of{1, 150, 2, 2, 8, 8, Decays::kWeak, 0, true};
  Tensors in = drawn_inputs(of);
  const Documents documents = documents_of({{70, 1, 79}});
  const at::Tensor before = chunked(in, documents);
  for (const std::size_t i : {0U, 1U, 2U, 4U}) {
    in[i] = in[i].clone();
    in[i].narrow(1, 0, 70).mul_(0.5);
  }
  const at::Tensor after = chunked(in, documents);
  EXPECT_TRUE(at::equal(before.narrow(1, 70, 80), after.narrow(1, 70, 80)));
  EXPECT_FALSE(at::equal(before.narrow(1, 0, 70), after.narrow(1, 0, 70)));
}

TEST(DeltaRule, StrongDecaysHaveFiniteGradientsAndTheirOwnIsNone) {
  for (const double strong : {-1e4, -1e30, -std::numeric_limits<double>::infinity()}) {
    at::manual_seed(11);
    Tensors in = drawn_inputs({1, 130, 1, 2, 16, 16, Decays::kWeak, 0, false});
    // One head forgets everything now and then, the other one at each position.
    in[3].select(2, 0).slice(1, 0, 130, 9).fill_(strong);
    in[3].select(2, 1).fill_(strong);
    for (at::Tensor& x : in) x = x.to(at::kFloat);
    const at::Tensor grad = at::randn(in[2].sizes());
    const Tensors found = run([](const Tensors& x) { return chunked(x, {}); }, in, grad);
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(found[i].isfinite().all().item<bool>()) << i << " at " << strong;
    }
    EXPECT_TRUE(found[4].select(2, 0).slice(1, 0, 130, 9).eq(0).all().item<bool>());
    EXPECT_TRUE(found[4].select(2, 1).eq(0).all().item<bool>());
  }
}

// The decays behind a strong one keep their precision: they are not differences of large sums.
TEST(DeltaRule, AStrongDecayCostsTheWeakOnesNoDigits) {
  at::manual_seed(13);
  Tensors in = drawn_inputs({1, 64, 1, 1, 16, 16, Decays::kWeak, 0, false});
  in[3].select(1, 3).fill_(-1e5);
  for (at::Tensor& x : in) x = x.to(at::kFloat);
  Tensors wide;
  for (const at::Tensor& x : in) wide.push_back(x.to(at::kDouble));
  const at::Tensor grad = at::randn(in[2].sizes());
  const Tensors found = run([](const Tensors& x) { return chunked(x, {}); }, in, grad);
  const Tensors expected = run(recurrent, wide, grad);
  for (std::size_t i = 0; i < found.size(); ++i) {
    expect_close(found[i], expected[i], kSumsInFloat32, "tensor " + std::to_string(i));
  }
}

TEST(DeltaRule, DecodesInStepsOfAnySize) {
  for (std::uint64_t seed = 400; seed < 408; ++seed) {
    std::mt19937_64 random(seed);
    at::manual_seed(seed);
    const Case of = drawn_case(random);
    SCOPED_TRACE(::testing::Message() << of);
    const Tensors in = drawn_inputs(of);
    at::Tensor state;
    Tensors parts;
    for (std::int64_t begin = 0; begin < of.positions;) {
      const auto most = static_cast<std::uint64_t>(of.positions - begin);
      const auto count = random() % 2 == 0 ? 1 : static_cast<std::int64_t>(1 + random() % most);
      const auto part = [&](std::size_t i) { return in[i].narrow(1, begin, count); };
      const at::Tensor before = state, bits = state.defined() ? state.clone() : state;
      parts.push_back(gated_delta_rule_after({part(0), part(1), part(2), part(3), part(4)}, state));
      // It is replaced: a holder of the one before may step again from there.
      if (before.defined()) EXPECT_TRUE(at::equal(before, bits));
      begin += count;
    }
    EXPECT_EQ(state.sizes(),
              at::IntArrayRef({of.rows, of.key_heads * of.repeat, of.key_dim, of.value_dim}));
    expect_close(at::cat(parts, 1), chunked(in, {}), kFloat64, "output");
  }
}

TEST(DeltaRule, RowsMayBeMissing) {
  const Tensors in = drawn_inputs({0, 70, 2, 2, 8, 4, Decays::kWeak, 0, false});
  const at::Tensor grad = at::zeros(in[2].sizes(), at::kDouble);
  const Tensors found = run([](const Tensors& x) { return chunked(x, {}); }, in, grad);
  for (std::size_t i = 0; i < in.size(); ++i) EXPECT_EQ(found[i + 1].sizes(), in[i].sizes());
  at::Tensor state;
  gated_delta_rule_after({in[0], in[1], in[2], in[3], in[4]}, state);
  EXPECT_EQ(state.sizes(), at::IntArrayRef({0, 4, 8, 4}));
}

// Equal keys, no decay and beta 1: the inverse is 1 on the diagonal, -1 below it. Powers of this
// matrix have entries of 10^18, which a product of (1 + powers) would have to cancel.
TEST(DeltaRule, InvertsSystemsOfEqualKeysExactly) {
  for (const std::int64_t size : {1, 2, 33, 64}) {
    at::Tensor matrices = at::ones({3, size, size});
    at::Tensor expected = at::eye(size);
    if (size > 1) expected.diagonal(-1).fill_(-1);
    EXPECT_TRUE(at::equal(inverse_by_products(matrices), expected.expand_as(matrices)));
    invert_unit_lower(matrices);
    EXPECT_TRUE(at::equal(matrices, expected.expand_as(matrices)));
  }
}

TEST(DeltaRule, BothInversesSolveDrawnSystems) {
  at::manual_seed(17);
  for (const std::int64_t size : {5, 48, 64}) {
    at::Tensor matrices = at::randn({2, 4, size, size}, at::kDouble).mul_(0.3);
    const at::Tensor whole = matrices.tril(-1) + at::eye(size, at::kDouble);
    const at::Tensor by_products = inverse_by_products(matrices);
    invert_unit_lower(matrices);
    expect_close(by_products, matrices, kFloat64, "by products");
    expect_close(whole.matmul(matrices), at::eye(size, at::kDouble).expand_as(whole), {0, 1e-10},
                 "by substitution");  // of drawn systems, which have condition numbers
  }
}

// A dry step: sizes follow from sizes, nothing is read.
TEST(DeltaRule, RunsOnTensorsWithoutValues) {
  const dry::FakeScope fake;
  const auto make = [](at::IntArrayRef sizes, at::ScalarType dtype) {
    return at::empty(sizes, dtype).requires_grad_();
  };
  const Tensors in = {make({2, 100, 2, 8}, at::kBFloat16), make({2, 100, 2, 8}, at::kBFloat16),
                      make({2, 100, 4, 6}, at::kBFloat16), make({2, 100, 4}, at::kFloat),
                      make({2, 100, 4}, at::kFloat)};
  const Documents documents = documents_of({{40, 60}, {100}});
  const at::Tensor out = chunked(in, documents);
  EXPECT_TRUE(dry::is_fake(out));
  EXPECT_EQ(out.sizes(), in[2].sizes());
  out.sum().backward();
  for (const at::Tensor& x : in) EXPECT_EQ(x.grad().sizes(), x.sizes());
}

TEST(DeltaRule, RefusesSecondDerivatives) {
  Tensors in = drawn_inputs({1, 5, 1, 1, 4, 4, Decays::kWeak, 0, false});
  in[2].requires_grad_();
  EXPECT_REFUSED(kUsage, chunked(in, {}).sum().backward({}, true, /*create_graph=*/true),
                 "create_graph");
}

}  // namespace
}  // namespace tessera::nn::delta_rule_test
