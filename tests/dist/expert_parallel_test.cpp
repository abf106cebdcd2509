// Experts over ranks against all of them on one rank: the same tokens, every gradient.

#include <chrono>
#include <functional>
#include <thread>

#include "base/test_hooks.h"
#include "base/trace.h"
#include "moe/experts.h"
#include "nn/mlp.h"
#include "support/ranks.h"
#include "support/test.h"
#include "unit/moe/host_waits.h"

namespace tessera::moe::expert_parallel_test {
namespace {

using test::here;
using test::ranks;
using test::same_bits;
using test::seeded;

constexpr std::int64_t kExperts = 12;
constexpr std::int64_t kHidden = 16;
constexpr std::int64_t kInner = 8;
constexpr std::int64_t kChosen = 3;

enum class Choice { kSpread, kAllToOneRank };

/// [M, 3] ascending, by token number. kSpread leaves some experts without rows.
at::Tensor choice(std::int64_t tokens, Choice kind) {
  const at::Tensor first =
      at::arange(tokens, at::kLong).mul(kind == Choice::kSpread ? 5 : 0).remainder(6);
  return at::stack({first, first + 1, first + 2 + at::arange(tokens, at::kLong).remainder(2)}, 1);
}

struct Problem {
  at::ScalarType dtype = at::kDouble;
  std::vector<std::int64_t> tokens;  ///< of each rank
  Choice choice = Choice::kSpread;
  Score score = Score::kAfterExperts;
};

/// x, weights, gate_up, down, their biases; then the gradient of the output.
struct Inputs {
  std::vector<at::Tensor> tensors;
  at::Tensor indices;
  at::Tensor grad;
};

Inputs inputs_of(const Problem& problem) {
  std::int64_t tokens = 0;
  for (const std::int64_t count : problem.tokens) tokens += count;
  const auto drawn = [&](std::uint64_t seed, std::vector<std::int64_t> sizes) {
    return seeded(seed, sizes, at::kDouble).to(problem.dtype);
  };
  return {{drawn(1, {tokens, kHidden}), drawn(2, {tokens, kChosen}),
           drawn(3, {kExperts, 2 * kInner, kHidden}), drawn(4, {kExperts, kHidden, kInner}),
           drawn(5, {kExperts, 2 * kInner}), drawn(6, {kExperts, kHidden})},
          here(choice(tokens, problem.choice)),
          drawn(7, {tokens, kHidden})};
}

/// The output, then the gradients of the six.
std::vector<at::Tensor> run(const Inputs& inputs, const Problem& problem,
                            const parallel::Axis& axis) {
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& tensor : inputs.tensors) {
    leaves.push_back(tensor.clone().requires_grad_(true));
  }
  const at::Tensor out = experts(leaves[0], {inputs.indices, leaves[1], {}},
                                 {leaves[2], leaves[3], leaves[4], leaves[5]},
                                 {nn::swiglu_halves, problem.score, axis, "layers.0.mlp.experts"});
  out.backward(inputs.grad);
  std::vector<at::Tensor> results{out.detach()};
  for (const at::Tensor& leaf : leaves) results.push_back(leaf.grad());
  return results;
}

/// Tensors 0, 1 and the gradient by tokens, the others by experts.
std::vector<at::Tensor> own_parts(const std::vector<at::Tensor>& all, std::size_t by_tokens,
                                  const layout::Range& tokens, const layout::Range& own) {
  std::vector<at::Tensor> parts;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const layout::Range& part = i < by_tokens ? tokens : own;
    parts.push_back(all[i].narrow(0, part.begin, part.size()));
  }
  return parts;
}

Inputs here_of(Inputs inputs) {
  for (at::Tensor& tensor : inputs.tensors) tensor = here(tensor);
  return {std::move(inputs.tensors), here(inputs.indices), here(inputs.grad)};
}

/// Where the ranks are: kernels of the CPU and of devices round in places of their own.
std::vector<at::Tensor> on_one_rank(const Inputs& inputs, const Problem& problem) {
  std::vector<at::Tensor> results;
  ranks(1).run([&](World&) {
    for (const at::Tensor& result : run(here_of(inputs), problem, {})) {
      results.push_back(result.cpu());
    }
  });
  return results;
}

void expect_as_on_one_rank(const Problem& problem, double bound, ThreadBackend backend) {
  const Inputs inputs = inputs_of(problem);
  const std::vector<at::Tensor> whole = on_one_rank(inputs, problem);
  const int size = static_cast<int>(problem.tokens.size());
  ranks(size, backend).run([&](World& world) {
    parallel::Axis axis =
        parallel::axis_of(world.mesh(MeshShape::sparse(1, 1, 1, world.size(), 1)), axis::kExpert);
    layout::Range tokens;
    for (int rank = 0; rank <= axis.rank; ++rank) {
      tokens = {tokens.end, tokens.end + problem.tokens[static_cast<std::size_t>(rank)]};
    }
    const layout::Range own = layout::part_of(kExperts, size, axis.rank);
    const Inputs mine{own_parts(inputs.tensors, 2, tokens, own),
                      inputs.indices.narrow(0, tokens.begin, tokens.size()),
                      inputs.grad.narrow(0, tokens.begin, tokens.size())};
    const std::vector<at::Tensor> found = run(here_of(mine), problem, axis);
    const std::vector<at::Tensor> expected = own_parts(whole, 3, tokens, own);
    for (std::size_t i = 0; i < found.size(); ++i) {
      if (bound == 0) {
        EXPECT_TRUE(same_bits(found[i], expected[i])) << "result " << i << " over " << size;
      } else {
        EXPECT_TRUE(at::allclose(found[i].cpu(), expected[i], bound, bound)) << "result " << i;
      }
    }
  });
}

/// Uneven, a rank without tokens, fewer tokens than ranks, none at all.
const std::vector<std::vector<std::int64_t>>& token_counts() {
  static const std::vector<std::vector<std::int64_t>> all{
      {16, 16}, {9, 4}, {0, 7}, {7, 0}, {1, 0}, {0, 0}, {5, 0, 11}, {0, 1, 0, 0}, {8, 3, 0, 13}};
  return all;
}

TEST(ExpertParallel, EveryGradientIsThatOfOneRank) {
  for (const auto& tokens : token_counts()) {
    for (const Choice kind : {Choice::kSpread, Choice::kAllToOneRank}) {
      for (const Score score : {Score::kAfterExperts, Score::kBeforeExperts}) {
        expect_as_on_one_rank({at::kDouble, tokens, kind, score}, 1e-13, ThreadBackend::kInProcess);
      }
    }
  }
}

TEST(ExpertParallel, TheSameOverGloo) {
  for (const auto& tokens : token_counts()) {
    expect_as_on_one_rank({at::kDouble, tokens}, 1e-13, ThreadBackend::kGloo);
  }
}

TEST(ExpertParallel, InFloat32BitwiseThatOfOneRank) {
  // Tokens keep their order, so experts see the same rows in the same order.
  for (const auto& tokens : token_counts()) {
    for (const Score score : {Score::kAfterExperts, Score::kBeforeExperts}) {
      expect_as_on_one_rank({at::kFloat, tokens, Choice::kSpread, score}, 0,
                            ThreadBackend::kInProcess);
    }
  }
}

TEST_ON_RANKS(ExpertParallel, ARankWhoseTokensNeedNoGradientStillMeetsTheOthers, 2) {
  const parallel::Axis axis =
      parallel::axis_of(world.mesh(MeshShape::sparse(1, 1, 1, 2, 1)), axis::kExpert);
  const Inputs inputs = inputs_of({at::kFloat, {4}});
  const at::Tensor x = inputs.tensors[0].clone().requires_grad_(axis.rank == 0);
  const at::Tensor gate_up = inputs.tensors[2].narrow(0, 6 * axis.rank, 6);
  const at::Tensor down = inputs.tensors[3].narrow(0, 6 * axis.rank, 6);
  // Frozen experts: on rank 1 nothing else requires a gradient.
  const at::Tensor out = experts(x, {inputs.indices, inputs.tensors[1], {}}, {gate_up, down},
                                 {nn::swiglu_halves, Score::kAfterExperts, axis});
  EXPECT_TRUE(out.requires_grad());
  out.backward(inputs.grad);
  EXPECT_EQ(x.grad().defined(), axis.rank == 0);
}

/// Runs a layer whose shared experts are computed while rows travel, or after all else: the output,
/// and the gradients of x, of the routing's weights, of both experts' weights and of the shared
/// ones.
std::vector<at::Tensor> with_shared(const Inputs& inputs, const parallel::Axis& axis,
                                    bool while_rows_travel,
                                    const std::function<void()>& in_backward = {}) {
  std::vector<at::Tensor> leaves;
  for (std::size_t i = 0; i < 4; ++i) {
    leaves.push_back(inputs.tensors[i].clone().requires_grad_(true));
  }
  leaves.push_back(
      here(seeded(9, {kHidden, kHidden}, leaves[0].scalar_type())).requires_grad_(true));
  at::Tensor shared;
  const auto compute = [&] {
    // x meets the shared experts twice, so that sums of gradients have an order.
    shared = at::silu(at::linear(leaves[0], leaves[4])) * leaves[0];
    if (in_backward) {
      shared.register_hook([in_backward](const at::Tensor& /*grad*/) { in_backward(); });
    }
  };
  ExpertOptions options{nn::swiglu_halves, Score::kAfterExperts, axis, "layers.0.mlp.experts"};
  if (while_rows_travel) options.meanwhile = compute;
  at::Tensor out =
      experts(leaves[0], {inputs.indices, leaves[1], {}}, {leaves[2], leaves[3]}, options);
  if (!while_rows_travel) compute();
  out = out + shared;
  out.backward(inputs.grad);
  std::vector<at::Tensor> results{out.detach()};
  for (const at::Tensor& leaf : leaves) results.push_back(leaf.grad());
  return results;
}

Inputs part_of(const Inputs& inputs, const parallel::Axis& axis, std::int64_t tokens) {
  const layout::Range mine{axis.rank * tokens, (axis.rank + 1) * tokens};
  return {own_parts(inputs.tensors, 2, mine, layout::part_of(kExperts, axis.size, axis.rank)),
          inputs.indices.narrow(0, mine.begin, tokens), inputs.grad.narrow(0, mine.begin, tokens)};
}

// Sums of gradients keep their order: the shared experts' addends at x come before those of the
// rows, at any place of their computation.
TEST(ExpertParallel, WhatIsComputedWhileRowsTravelChangesNoBit) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const int size : {1, 2, 4}) {
      const Inputs inputs =
          inputs_of({dtype, std::vector<std::int64_t>(static_cast<std::size_t>(size), 6)});
      ranks(size).run([&](World& world) {
        parallel::Axis axis;
        if (size > 1) {
          axis = parallel::axis_of(world.mesh(MeshShape::sparse(1, 1, 1, size, 1)), axis::kExpert);
        }
        const Inputs mine = here_of(part_of(inputs, axis, 6));
        const auto apart = with_shared(mine, axis, true), behind = with_shared(mine, axis, false);
        for (std::size_t i = 0; i < apart.size(); ++i) {
          EXPECT_TRUE(same_bits(apart[i], behind[i])) << "result " << i << " over " << size;
        }
      });
    }
  }
}

// Both ways: rows are under way before the shared experts begin and are waited for behind them.
TEST(ExpertParallel, RowsTravelWhileSharedExpertsAreComputed) {
  constexpr auto kDelay = std::chrono::milliseconds(50);
  const test_hooks::Set late(test_hooks::exchange_delay, [&](const std::string& where) {
    return std::chrono::microseconds(
        where.find("dispatch") == std::string::npos ? std::chrono::microseconds(0) : kDelay);
  });
  const Inputs inputs = inputs_of({at::kFloat, {6, 6}});
  ranks(2).run([&](World& world) {
    const auto axis =
        parallel::axis_of(world.mesh(MeshShape::sparse(1, 1, 1, 2, 1)), axis::kExpert);
    const auto trace = std::make_shared<Trace>();
    std::vector<TraceClock::time_point> moments;
    const auto now = [&] { moments.push_back(TraceClock::now()); };
    {
      const TraceHere traced(trace);
      ExpertOptions options{nn::swiglu_halves, Score::kAfterExperts, axis, "experts"};
      const Inputs mine = here_of(part_of(inputs, axis, 6));
      const at::Tensor x = mine.tensors[0].clone().requires_grad_(true);
      at::Tensor shared;
      options.meanwhile = [&] {
        now();
        shared = at::silu(x);
        shared.register_hook([&](const at::Tensor& /*grad*/) { now(); });
        // Longer than the rows need: who waits afterwards finds them there.
        std::this_thread::sleep_for(2 * kDelay);
      };
      const at::Tensor out = experts(x, {mine.indices, mine.tensors[1], {}},
                                     {mine.tensors[2], mine.tensors[3]}, options);
      (out + shared).backward(mine.grad);
    }
    ASSERT_EQ(moments.size(), 2U);
    const auto spans = trace->take();
    const auto span = [&](const std::string& name) {
      return *std::ranges::find(spans, name, &TraceSpan::name);
    };
    const TraceSpan there = span("experts dispatch"), back = span("experts dispatch backward");
    EXPECT_LT(there.begin, moments[0]);
    EXPECT_LT(moments[0] + 2 * kDelay, there.end);
    EXPECT_LT(back.begin, moments[1]);
    EXPECT_LT(moments[1], back.end);
    const auto waited = [](const TraceSpan& of) {
      const auto found = std::ranges::find(of.arguments, "waited_ms", &TraceSpan::Argument::first);
      return std::get<double>(found->second);
    };
    // The wait begins when the shared experts are there.
    using Ms = std::chrono::duration<double, std::milli>;
    EXPECT_LE(waited(there), Ms(there.end - there.begin - 2 * kDelay).count());
    EXPECT_LE(waited(back), Ms(back.end - back.begin).count());
  });
}

TEST_ON_RANKS(ExpertParallel, ExpertsThatDoNotDivideAreRefused, 2) {
  const parallel::Axis axis =
      parallel::axis_of(world.mesh(MeshShape::sparse(1, 1, 1, 2, 1)), axis::kExpert);
  const DispatchOptions dispatch_options{false, axis, "experts"};
  EXPECT_THROW(exchange_counts({}, at::zeros({3, 1}, at::kLong), 3, dispatch_options), Error);
  EXPECT_THROW(
      plan_dispatch({0, 1, 2, 3}, at::zeros({2, 2}, at::kLong), dispatch_options, at::kCPU), Error);
}

TEST_ON_RANKS(ExpertParallel, TheHostReadsOnceFromTheScoresToTheGradients, 2) {
  const parallel::Axis axis =
      parallel::axis_of(world.mesh(MeshShape::sparse(1, 1, 1, 2, 1)), axis::kExpert);
  // fp64 takes our own products: libtorch's read where groups end, which lies on the host here.
  const Inputs inputs = inputs_of({at::kDouble, {4}});
  const at::Tensor x = inputs.tensors[0].clone().requires_grad_(true);
  const at::Tensor scores = seeded(8, {4, kExperts}, at::kDouble).requires_grad_(true);
  const HostWaits waits;
  const Routing routing = route(scores, {.experts_per_token = kChosen});
  experts(x, routing,
          {inputs.tensors[2].narrow(0, 6 * axis.rank, 6),
           inputs.tensors[3].narrow(0, 6 * axis.rank, 6)},
          {nn::swiglu_halves, Score::kAfterExperts, axis})
      .sum()
      .backward();
  EXPECT_EQ(waits.reads(), 1);
  EXPECT_EQ(waits.others(), 0);
}

}  // namespace
}  // namespace tessera::moe::expert_parallel_test
