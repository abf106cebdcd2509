// Every transition, forward and backward, against one process that knows all ranks' tensors.
//
// A rank's local tensor is made from a truth of the whole: R and I hold it, S a part, P addends
// that sum to it. The loss of a rank is <weights, output>, where the weights are made so that the
// losses' sum over ranks (P, S) or each loss (I) is the truth's; R's gradient is P, so each rank
// brings an addend of the weights.
#include "parallel/transitions.h"

#include <cmath>

#include "support/ranks.h"
#include "support/test.h"

namespace tessera::parallel::transitions_test {
namespace {

using test::here;
using test::OnTheHost;
using test::ranks;
using test::same_bits;
using test::seeded;

enum class Kind { kR, kP, kI, kS };

/// The placement of a gradient: R <-> P, I <-> I, S <-> S.
Kind dual(Kind kind) {
  switch (kind) {
    case Kind::kR:
      return Kind::kP;
    case Kind::kP:
      return Kind::kR;
    case Kind::kI:
      return Kind::kI;
    case Kind::kS:
      return Kind::kS;
  }
  return kind;
}

/// An addend that differs on every rank; all sum to `whole`, exactly: they are small multiples.
at::Tensor addend(const at::Tensor& whole, int size, int rank) {
  if (rank > 0) return seeded(100 + static_cast<std::uint64_t>(rank), whole.sizes(), at::kDouble);
  at::Tensor rest = whole.clone();
  for (int other = 1; other < size; ++other) rest -= addend(whole, size, other);
  return rest;
}

at::Tensor on_the_host(const at::Tensor& whole, Kind kind, const Axis& axis, std::int64_t dim) {
  const OnTheHost there;
  if (kind == Kind::kP) return addend(whole, axis.size, axis.rank);
  if (kind != Kind::kS) return whole.clone();
  const layout::Range part = layout::part_of(whole.size(dim), axis.size, axis.rank);
  return whole.narrow(dim, part.begin, part.size()).clone();
}

at::Tensor local(const at::Tensor& whole, Kind kind, const Axis& axis, std::int64_t dim) {
  return here(on_the_host(whole, kind, axis, dim));
}

struct Case {
  std::string name;
  Kind from, to;
  std::function<at::Tensor(const at::Tensor&, const Axis&, const Shard&)> run;
};

const std::vector<Case>& cases() {
  const std::string w = "layer";
  static const std::vector<Case> all{
      {"all_reduce P->R", Kind::kP, Kind::kR,
       [=](auto& x, auto& a, auto&) { return all_reduce(x, a, To::kReplicate, w); }},
      {"all_reduce P->I", Kind::kP, Kind::kI,
       [=](auto& x, auto& a, auto&) { return all_reduce(x, a, To::kInvariant, w); }},
      {"copy I->R", Kind::kI, Kind::kR, [=](auto& x, auto& a, auto&) { return copy(x, a, w); }},
      {"all_gather S->R", Kind::kS, Kind::kR,
       [=](auto& x, auto& a, auto& c) { return all_gather(x, a, c, To::kReplicate, w); }},
      {"all_gather S->I", Kind::kS, Kind::kI,
       [=](auto& x, auto& a, auto& c) { return all_gather(x, a, c, To::kInvariant, w); }},
      {"reduce_scatter P->S", Kind::kP, Kind::kS,
       [=](auto& x, auto& a, auto& c) { return reduce_scatter(x, a, c, w); }},
      {"slice I->S", Kind::kI, Kind::kS,
       [=](auto& x, auto& a, auto& c) { return slice(x, a, c, From::kInvariant, w); }},
      {"slice R->S", Kind::kR, Kind::kS,
       [=](auto& x, auto& a, auto& c) { return slice(x, a, c, From::kReplicate, w); }},
      {"pad S->P", Kind::kS, Kind::kP, [=](auto& x, auto& a, auto& c) { return pad(x, a, c, w); }},
      {"only_first R->P", Kind::kR, Kind::kP,
       [=](auto& x, auto& a, auto&) { return only_first(x, a); }},
  };
  return all;
}

Axis axis_over(World& world, std::optional<at::ScalarType> reduce = std::nullopt) {
  return axis_of(world.mesh(MeshShape::dense(1, 1, 1, 1, world.size())), axis::kTensor, reduce);
}

/// Joins the tensors of all ranks: I and R must be equal on all.
at::Tensor whole_of_locals(const std::vector<at::Tensor>& locals, Kind kind, std::int64_t dim,
                           const std::string& what) {
  if (kind == Kind::kS) return at::cat(locals, dim);
  at::Tensor whole = locals[0].clone();
  for (std::size_t rank = 1; rank < locals.size(); ++rank) {
    if (kind == Kind::kP) {
      whole += locals[rank];
    } else {
      EXPECT_TRUE(same_bits(locals[rank], whole)) << what << ", rank " << rank;
    }
  }
  return whole;
}

struct Shape {
  std::vector<std::int64_t> sizes;
  std::int64_t dim;
  bool even;
};

void expect_as_on_one_rank(const Case& one, int size, const Shape& shape, ThreadBackend backend) {
  const at::Tensor whole = seeded(1, shape.sizes, at::kDouble);
  const at::Tensor weights = seeded(2, shape.sizes, at::kDouble);
  std::vector<at::Tensor> outputs(static_cast<std::size_t>(size));
  std::vector<at::Tensor> gradients(outputs.size());
  ranks(size, backend).run([&](World& world) {
    const Axis axis = axis_over(world);
    Shard cut{shape.dim};
    if (!shape.even) cut.total = whole.size(shape.dim);
    const at::Tensor x = local(whole, one.from, axis, shape.dim).requires_grad_(true);
    const at::Tensor y = one.run(x, axis, cut);
    y.backward(local(weights, dual(one.to), axis, shape.dim));
    outputs[static_cast<std::size_t>(axis.rank)] = y.detach().cpu();
    gradients[static_cast<std::size_t>(axis.rank)] = x.grad().cpu();
  });
  const std::string what = one.name + " over " + std::to_string(size);
  EXPECT_TRUE(at::allclose(whole_of_locals(outputs, one.to, shape.dim, what), whole, 0, 1e-14))
      << what;
  EXPECT_TRUE(at::allclose(
      whole_of_locals(gradients, dual(one.from), shape.dim, what + " gradient"), weights, 0, 1e-14))
      << what;
}

TEST(Transitions, ForwardAndBackwardAreThoseOfOneProcess) {
  for (const int size : {1, 2, 3, 4}) {
    for (const Case& one : cases()) {
      expect_as_on_one_rank(one, size, {{12, 5}, 0, true}, ThreadBackend::kInProcess);
      expect_as_on_one_rank(one, size, {{1, 12, 3}, 1, true}, ThreadBackend::kInProcess);
      expect_as_on_one_rank(one, size, {{2, 24, 3}, 1, true}, ThreadBackend::kInProcess);
      for (const std::int64_t rows : {0, 1, 3, 7}) {
        expect_as_on_one_rank(one, size, {{rows, 5}, 0, false}, ThreadBackend::kInProcess);
      }
    }
  }
}

TEST(Transitions, TheSameOverGloo) {
  for (const Case& one : cases()) {
    expect_as_on_one_rank(one, 2, {{2, 24, 3}, 1, true}, ThreadBackend::kGloo);
    expect_as_on_one_rank(one, 3, {{7, 5}, 0, false}, ThreadBackend::kGloo);
  }
}

TEST(Transitions, RowsGoToTheirRanksAndTheirGradientsComeBack) {
  for (const ThreadBackend backend : {ThreadBackend::kInProcess, ThreadBackend::kGloo}) {
    for (const int size : {2, 3, 4}) {
      ranks(size, backend).run([&](World& world) {
        const Axis axis = axis_over(world);
        // Rank r sends (r + 2 s) % 3 rows to rank s, each marked with both and its place.
        const auto rows = [](int from, int to) { return (from + 2 * to) % 3; };
        Splits splits;
        std::vector<at::Tensor> sent;
        std::vector<at::Tensor> expected;
        const auto marked = [&](int from, int to) {
          return here(at::arange(rows(from, to) * 2, at::kDouble)).view({-1, 2}) + 100 * from +
                 10 * to;
        };
        for (int peer = 0; peer < size; ++peer) {
          splits.sends.push_back(rows(axis.rank, peer));
          splits.receives.push_back(rows(peer, axis.rank));
          sent.push_back(marked(axis.rank, peer));
          expected.push_back(marked(peer, axis.rank));
        }
        const at::Tensor x = at::cat(sent, 0).requires_grad_(true);
        const at::Tensor y = all_to_all(x, axis, splits, "layer");
        EXPECT_TRUE(y.equal(at::cat(expected, 0)));
        (y * y).sum().backward();
        EXPECT_TRUE(x.grad().equal(2 * x.detach()));
      });
    }
  }
}

TEST(Transitions, OneRankGivesTheTensorItself) {
  const at::Tensor x = seeded(3, {4, 6}).requires_grad_(true);
  const Axis alone;
  for (const Case& one : cases()) {
    EXPECT_TRUE(one.run(x, alone, {0}).is_same(x)) << one.name;
  }
  EXPECT_TRUE(all_to_all(x, alone, {{4}, {4}}, "layer").is_same(x));
}

TEST_ON_RANKS(Transitions, SixteenBitAddendsAreAddedInFloat32AndRoundedOnce, 3) {
  const Axis axis = axis_over(world);
  const float small = std::ldexp(1.0F, -8);
  const float addends[] = {1.0F, small, small};
  const at::Tensor x = here(at::full({3}, addends[axis.rank])).to(at::kBFloat16);
  // 1 + 2^-8 is 1 in bf16: added one by one nothing would remain.
  const at::Tensor expected = at::full({3}, 1 + 2 * small).to(at::kBFloat16);
  EXPECT_TRUE(same_bits(all_reduce(x, axis, To::kReplicate, "sum"), expected));
  EXPECT_TRUE(same_bits(reduce_scatter(x, axis, {0}, "part"), expected.narrow(0, 0, 1)));
  const at::Tensor leaf = here(at::zeros({3}, at::kBFloat16)).requires_grad_(true);
  copy(leaf, axis, "copy").backward(x);
  EXPECT_TRUE(same_bits(leaf.grad(), expected));
  const at::Tensor part = here(at::zeros({1}, at::kBFloat16)).requires_grad_(true);
  all_gather(part, axis, {0}, To::kReplicate, "gather").backward(x);
  EXPECT_TRUE(same_bits(part.grad(), expected.narrow(0, 0, 1)));
}

TEST_ON_RANKS(Transitions, ASumMayBeKeptWiderThanItsAddends, 2) {
  const Axis axis = axis_over(world, at::kFloat);
  const float small = std::ldexp(1.0F, -10);
  const at::Tensor x =
      here(at::full({4}, axis.rank == 0 ? 1.0F : small)).to(at::kBFloat16).requires_grad_(true);
  const at::Tensor expected = at::full({4}, 1 + small);
  const at::Tensor sum = all_reduce(x, axis, To::kReplicate, "sum", at::kFloat);
  EXPECT_TRUE(same_bits(sum, expected));
  sum.backward(here(at::ones({4})));
  EXPECT_EQ(x.grad().scalar_type(), at::kBFloat16);
  const at::Tensor part = reduce_scatter(x, axis, {0}, "part", at::kFloat);
  EXPECT_TRUE(same_bits(part, expected.narrow(0, 0, 2)));
  part.backward(here(at::ones({2})));
  EXPECT_TRUE(same_bits(x.grad(), at::full({4}, 3.0F).to(at::kBFloat16)));
}

TEST_ON_RANKS(Transitions, AddendsTravelInTheReduceDtype, 2) {
  const Axis axis = axis_over(world, at::kBFloat16);
  // 1 + 2^-10 is rounded to 1 before it leaves; the sum, fp32, is exact.
  const at::Tensor x = here(at::full({2}, 1 + std::ldexp(1.0F, -10)));
  EXPECT_TRUE(same_bits(all_reduce(x, axis, To::kReplicate, "sum"), at::full({2}, 2.0F)));
}

TEST(Transitions, RanksThatMeanDifferentTransitionsAreNamed) {
  EXPECT_THAT(error_of(ErrorKind::kComm,
                       [&] {
                         ranks(2).run([](World& world) {
                           const Axis axis = axis_over(world);
                           all_reduce(here(at::ones({2})), axis, To::kReplicate,
                                      axis.rank == 0 ? "layers.0.mlp" : "layers.0.self_attn");
                         });
                       }),
              Says("layers.0.mlp", "layers.0.self_attn"));
}

TEST(Transitions, SizesThatDoNotDivideAreRefusedUnlessAllowed) {
  const auto refusal = [](const std::function<void(const Axis&)>& body) -> std::string {
    return refusal_of(ErrorKind::kUsage,
                      [&] { ranks(2).run([&](World& world) { body(axis_over(world)); }); });
  };
  EXPECT_THAT(refusal([](const Axis& a) { slice(at::ones({5}), a, {0}, From::kReplicate, "cut"); }),
              Says("cut: found 5 in dim 0, expected a multiple of 2 (axis tp)"));
  EXPECT_THAT(refusal([](const Axis& a) { reduce_scatter(at::ones({5}), a, {0}, "cut"); }),
              Says("expected a multiple of 2"));
  EXPECT_THAT(refusal([](const Axis& a) { pad(at::ones({2}), a, {0, 3}, "cut"); }),
              Says("found a part of 2, expected 1 of 3 in dim 0 (axis tp, rank 1)"));
}

TEST_ON_RANKS(Transitions, SecondDerivativesAreRefused, 2) {
  const Axis axis = axis_over(world);
  const at::Tensor x = here(at::ones({2})).requires_grad_(true);
  const at::Tensor y = copy(x, axis, "copy").sum();
  EXPECT_THROW(y.backward({}, std::nullopt, /*create_graph=*/true), Error);
}

}  // namespace
}  // namespace tessera::parallel::transitions_test
