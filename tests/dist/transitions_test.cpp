// Transitions between placements, forward and backward, against what one process computes: the type
// of a gradient follows from that of its tensor alone (R -> P, P -> R, S -> S, I -> I).
//
// A transition changes how a value lies over the ranks, never the value: what all ranks hold
// together is the same before and after, forward and backward. Values are small integers: every sum
// is exact in fp32 and the comparison is of bits.
#include "parallel/transitions.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <numeric>

#include "tessera/error.h"
#include "tessera/world.h"

namespace tessera::parallel {
namespace {

Axis axis_over(World& world, std::optional<at::ScalarType> sums = std::nullopt) {
  if (world.size() == 1) return {};
  std::vector<int> all(static_cast<std::size_t>(world.size()));
  std::iota(all.begin(), all.end(), 0);
  return Axis(world.group(all, "tp"), "tp", sums);
}

/// Integers that every rank can draw for every rank.
at::Tensor drawn(at::IntArrayRef shape, int salt) {
  std::int64_t numel = 1;
  for (const auto size : shape) numel *= size;
  return (at::arange(numel, at::kFloat).mul(37).add(salt * 11).remainder(17) - 8).view(shape);
}

enum class Type { kReplicate, kPartial, kShard, kInvariant };
Type dual(Type type) {
  if (type == Type::kReplicate) return Type::kPartial;
  return type == Type::kPartial ? Type::kReplicate : type;
}

/// What every rank holds of a tensor of a type: the parts of one value, or addends of it.
std::vector<at::Tensor> held(Type type, at::IntArrayRef shape, int ranks, std::int64_t dim,
                             int salt) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < ranks; ++rank) {
    at::Tensor value = drawn(shape, salt + (type == Type::kPartial ? 3 * rank + 1 : 0));
    if (type == Type::kShard) {
      const std::int64_t whole = value.size(dim);
      const std::int64_t longer = whole % ranks;
      const std::int64_t begin = rank * (whole / ranks) + std::min<std::int64_t>(rank, longer);
      value = value.narrow(dim, begin, whole / ranks + (rank < longer ? 1 : 0)).contiguous();
    }
    all.push_back(value);
  }
  return all;
}

/// The one value that the ranks hold together.
at::Tensor value_of(Type type, const std::vector<at::Tensor>& all, std::int64_t dim) {
  if (type == Type::kShard) return at::cat(all, dim);
  if (type != Type::kPartial) return all.front();
  at::Tensor sum = all.front().clone();
  for (std::size_t rank = 1; rank < all.size(); ++rank) sum += all[rank];
  return sum;
}

struct Case {
  const char* name;
  Type from;
  Type to;
  std::function<at::Tensor(const at::Tensor&, const Axis&, std::int64_t dim, std::int64_t whole)>
      run;
  bool uneven;  ///< parts may differ in size
};

std::vector<Case> cases() {
  using enum Type;
  return {
      {"copy_in", kInvariant, kReplicate,
       [](auto& x, auto& axis, auto, auto) { return copy_in(x, axis); }, true},
      {"all_reduce_out", kPartial, kInvariant,
       [](auto& x, auto& axis, auto, auto) { return all_reduce_out(x, axis); }, true},
      {"all_reduce", kPartial, kReplicate,
       [](auto& x, auto& axis, auto, auto) { return all_reduce(x, axis); }, true},
      {"gather_shards", kShard, kReplicate,
       [](auto& x, auto& axis, auto dim, auto) { return gather_shards(x, axis, dim); }, false},
      {"gather_invariant", kShard, kInvariant,
       [](auto& x, auto& axis, auto dim, auto whole) {
         return gather_invariant(x, axis, dim, whole);
       },
       true},
      {"reduce_scatter", kPartial, kShard,
       [](auto& x, auto& axis, auto dim, auto) { return reduce_scatter(x, axis, dim); }, false},
      {"slice_invariant", kInvariant, kShard,
       [](auto& x, auto& axis, auto dim, auto) { return slice_invariant(x, axis, dim); }, true},
      {"slice_replicated", kReplicate, kShard,
       [](auto& x, auto& axis, auto dim, auto) { return slice_replicated(x, axis, dim); }, true},
      {"pad_shards", kShard, kPartial,
       [](auto& x, auto& axis, auto dim, auto whole) { return pad_shards(x, axis, dim, whole); },
       true},
      {"only_first", kReplicate, kPartial,
       [](auto& x, auto& axis, auto, auto) { return only_first(x, axis); }, true},
  };
}

/// What every rank got, in rank order, for the thread that looks at all of them.
struct Results {
  explicit Results(int ranks) : forward(static_cast<std::size_t>(ranks)), backward(forward) {}
  std::vector<at::Tensor> forward, backward;
};

Results run_on_ranks(const Case& one, const std::vector<at::Tensor>& in,
                     const std::vector<at::Tensor>& grads, std::int64_t dim, std::int64_t whole,
                     ThreadBackend backend) {
  Results results(static_cast<int>(in.size()));
  launch_threads(static_cast<int>(in.size()), backend, [&](World& world) {
    const auto rank = static_cast<std::size_t>(world.rank());
    const at::Tensor x = in[rank].clone().set_requires_grad(true);
    const at::Tensor y = one.run(x, axis_over(world), dim, whole);
    y.backward(grads[rank]);
    results.forward[rank] = y.detach();
    results.backward[rank] = x.grad();
  });
  return results;
}

void check(const Case& one, int ranks, at::IntArrayRef shape, std::int64_t dim,
           ThreadBackend backend = ThreadBackend::kInProcess) {
  SCOPED_TRACE(concat(one.name, " over ", ranks, " ranks, dim ", dim, ", shape ", shape));
  const auto in = held(one.from, shape, ranks, dim, 1);
  const auto grads = held(dual(one.to), shape, ranks, dim, 5);
  const auto found =
      run_on_ranks(one, in, grads, dim, shape[static_cast<std::size_t>(dim)], backend);
  const at::Tensor value = value_of(one.from, in, dim);
  const at::Tensor gradient = value_of(dual(one.to), grads, dim);
  EXPECT_TRUE(at::equal(value_of(one.to, found.forward, dim), value));
  EXPECT_TRUE(at::equal(value_of(dual(one.from), found.backward, dim), gradient));
  for (int rank = 1; rank < ranks; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    const bool same_values = one.to == Type::kReplicate || one.to == Type::kInvariant;
    const bool same_gradients = one.from == Type::kPartial || one.from == Type::kInvariant;
    EXPECT_TRUE(!same_values || at::equal(found.forward[r], found.forward[0]));
    EXPECT_TRUE(!same_gradients || at::equal(found.backward[r], found.backward[0]));
  }
}

TEST(Transitions, KeepTheValueAndTheGradientOfEveryType) {
  for (const Case& one : cases()) {
    for (const int ranks : {1, 2, 3, 4}) {
      check(one, ranks, {2, 12, 3}, 1);
      check(one, ranks, {12, 3}, 0);
      check(one, ranks, {1, 12, 2}, 1);
      check(one, ranks, {0, 12, 2}, 1);
    }
  }
}

TEST(Transitions, PartsMayDifferInSizeAndBeEmpty) {
  for (const Case& one : cases()) {
    if (!one.uneven) continue;
    for (const int ranks : {2, 3, 4}) {
      check(one, ranks, {7, 3}, 0);
      check(one, ranks, {2, 3}, 0);  // fewer rows than ranks
      check(one, ranks, {0, 3}, 0);
    }
  }
}

TEST(Transitions, GlooGivesTheSame) {
  for (const Case& one : cases()) check(one, 2, {2, 4, 3}, 1, ThreadBackend::kGloo);
}

TEST(Transitions, SumsOfBfloat16InFloat32KeepWhatBfloat16WouldLose) {
  // 256 + 1 + 1 + 1 is 260 after one rounding; bf16 sums, one rank at a time, stay at 256.
  launch_threads(4, ThreadBackend::kInProcess, [](World& world) {
    const at::Tensor x = at::full({4, 2}, world.rank() == 0 ? 256.0 : 1.0, at::kBFloat16);
    for (const auto sums : {std::optional<at::ScalarType>(), std::make_optional(at::kFloat)}) {
      const Axis axis = axis_over(world, sums);
      EXPECT_TRUE(all_reduce(x, axis).eq(260).all().item<bool>());
      EXPECT_TRUE(reduce_scatter(x, axis, 0).eq(260).all().item<bool>());
      EXPECT_EQ(all_reduce(x, axis).scalar_type(), at::kBFloat16);
    }
  });
}

TEST(Transitions, InputsStayAsTheyWere) {
  launch_threads(2, ThreadBackend::kInProcess, [](World& world) {
    const at::Tensor x = drawn({4, 2}, world.rank());
    const at::Tensor before = x.clone();
    const Axis axis = axis_over(world);
    all_reduce(x, axis);
    reduce_scatter(x, axis, 0);
    gather_shards(x, axis, 0);
    EXPECT_TRUE(at::equal(x, before));
  });
}

}  // namespace
}  // namespace tessera::parallel
