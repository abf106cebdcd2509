// [Note: watched kernels] of operations.h: every function of the list gives the same when it is
// watched; on meta tensors it has the real sizes; in given memory it has the same bits.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "kernels/implementations.h"
#include "kernels/operations.h"
#include "kernels/results.h"
#include "kernels/seen_blocks.h"
#include "support/tensors.h"
#include "support/test.h"

namespace tessera::kernels::watched_test {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr double kEps = 1e-6;

// ------------------------------------------------------------------------------------- watching

/// Records the operations of this thread.
struct Watch final : Watcher {
  Watch() : Watcher(SeesKernels::kYes) {}

  void run(const c10::OperatorHandle& operation, c10::DispatchKeySet below,
           c10::Stack* stack) override {
    const c10::impl::ExcludeDispatchKeyGuard once(kWatchKey);
    seen.push_back(c10::toString(operation.operator_name()));
    const auto& arguments = operation.schema().arguments();
    std::vector<std::pair<at::Tensor, at::Tensor>> unchanged;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      if (alias != nullptr && alias->isWrite()) continue;
      const auto& value = torch::jit::peek(*stack, i, arguments.size());
      if (value.isTensor() && value.toTensor().defined()) {
        unchanged.emplace_back(value.toTensor(), value.toTensor().clone());
      } else if (value.isTensorList()) {
        for (const at::Tensor& each : value.toTensorVector())
          unchanged.emplace_back(each, each.clone());
      }
    }
    operation.redispatchBoxed(below, stack);
    for (const auto& [now, before] : unchanged) {
      if (!test::same_bits(now, before)) undeclared.push_back(seen.back());
    }
  }

  std::vector<std::string> seen;
  /// arguments that changed without a declaration in the schema
  std::vector<std::string> undeclared;
};

// ---------------------------------------------------------------------------------- the list

struct Case {
  const char* name;
  Tensors arguments;  ///< contiguous, which the call may write
  std::function<Tensors(const Tensors&)> run;
  /// How many results of cpu/ are formed where somebody has memory for them.
  std::size_t given = 0;
  /// The number of results whose sizes and dtype meta tensors know: forms that an implementation
  /// keeps for backward differ, and sums of weights' gradients are wider in cpu/.
  std::size_t known = 0;
};

at::Tensor draw(std::uint64_t seed, at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator).to(dtype);
}

template <class... Results>
Tensors listed(const std::tuple<Results...>& results) {
  Tensors all;
  const auto add = [&]<class Result>(const Result& result) {
    if constexpr (std::is_same_v<Result, at::Tensor>) {
      all.push_back(result);
    } else {
      all.insert(all.end(), result.begin(), result.end());
    }
  };
  std::apply([&](const auto&... each) { (add(each), ...); }, results);
  return all;
}
Tensors listed(const at::Tensor& result) { return {result}; }

std::vector<Case> norms_and_gates(at::ScalarType dtype) {
  const auto x = draw(1, {3, 5, 16}, dtype), y = draw(2, {3, 5, 16}, dtype);
  const auto grad = draw(3, {3, 5, 16}, dtype), weight = draw(4, {16}, dtype);
  const auto scale = std::get<1>(rms_norm(x, weight, kEps, false));
  const auto heads = draw(5, {2, 5, 4 * 8}, dtype), angles = draw(6, {5, 4});
  const auto cos = angles.cos().to(dtype), sin = angles.sin().to(dtype);
  const auto of_head = draw(7, {8}, dtype), turned = draw(8, {2, 2, 5, 2, 8}, dtype);
  const auto head_scale = std::get<1>(rope_heads(heads, of_head, cos, sin, 4, 2, kEps, false));
  const auto both = draw(9, {3, 5, 32}, dtype);
  return {
      {"rms_norm",
       {x, weight},
       [](const Tensors& a) { return listed(rms_norm(a[0], a[1], kEps, false)); },
       2,
       2},
      {"add_rms_norm",
       {x, y, weight},
       [](const Tensors& a) { return listed(add_rms_norm(a[0], a[1], a[2], kEps, true)); },
       3,
       3},
      {"rms_norm_backward",
       {grad, y, x, weight, scale},
       [](const Tensors& a) {
         return listed(rms_norm_backward(a[0], a[1], a[2], a[3], a[4], false, true));
       },
       1,
       1},
      {"rms_norm_backward",
       {grad, y, x, weight, scale},
       [](const Tensors& a) {
         return listed(rms_norm_backward(a[0], a[1], a[2], a[3], a[4], false, false));
       },
       1,
       1},
      {"rope_heads",
       {heads, of_head, cos, sin},
       [](const Tensors& a) {
         return listed(rope_heads(a[0], a[1], a[2], a[3], 4, 2, kEps, false));
       },
       2,
       2},
      {"rope_heads",
       {heads, cos, sin},
       [](const Tensors& a) {
         return listed(rope_heads(a[0], std::nullopt, a[1], a[2], 4, 2, kEps, false));
       },
       1,
       1},
      {"rope_heads_backward",
       {turned, heads, of_head, cos, sin, head_scale},
       [](const Tensors& a) {
         return listed(rope_heads_backward(a[0], a[1], a[2], a[3], a[4], a[5], false, true));
       },
       1,
       1},
      {"swiglu", {x, y}, [](const Tensors& a) { return listed(swiglu(a[0], a[1])); }, 1, 1},
      {"swiglu_backward",
       {grad, x, y},
       [](const Tensors& a) { return listed(swiglu_backward(a[0], a[1], a[2])); },
       2,
       2},
      {"swiglu_halves", {both}, [](const Tensors& a) { return listed(swiglu_halves(a[0])); }, 1, 1},
      {"swiglu_halves_backward",
       {grad, both},
       [](const Tensors& a) { return listed(swiglu_halves_backward(a[0], a[1])); },
       1,
       1},
      {"clamped_swiglu",
       {both},
       [](const Tensors& a) { return listed(clamped_swiglu(a[0], 1.7, 3.0)); },
       1,
       1},
      {"clamped_swiglu_backward",
       {grad, both},
       [](const Tensors& a) { return listed(clamped_swiglu_backward(a[0], a[1], 1.7, 3.0)); },
       1,
       0},
  };
}

std::vector<Case> attention(at::ScalarType dtype) {
  const auto q = draw(1, {2, 2, 300, 3, 8}, dtype), k = draw(2, {2, 2, 300, 1, 8}, dtype);
  const auto v = draw(3, {2, 300, 2 * 6}, dtype), grad = draw(4, {2, 300, 6 * 6}, dtype);
  Tensors backward{grad};
  const at::Tensor begins = at::arange(300).div(7, "floor").mul(7).expand({2, 300}).contiguous();
  const auto forward = causal_attention_forward(q, k, v, begins, {}, kNoWindow, 0.4);
  backward.insert(backward.end(), std::get<1>(forward).begin(), std::get<1>(forward).end());
  backward.push_back(begins);
  const auto last = draw(5, {2, 2, 2, 3, 8}, dtype), keys = draw(6, {2, 2, 40, 8}, dtype);
  const auto values = draw(7, {2, 2, 40, 6}, dtype);
  const auto scores = draw(8, {4, 15, 12}) * 5, sinks = draw(9, {6});
  const auto rows = draw(10, {4, 15});
  const auto wide_values = draw(13, {2, 2, 300, 6}, dtype);
  // 150 queries in the middle of 300 keys.
  const auto part = q.narrow(2, 90, 150).contiguous();
  const auto of_part = begins.narrow(1, 90, 150).contiguous();
  const auto [part_mixed, part_kept] =
      part_attention_forward(part, k.squeeze(3), wide_values, of_part, {}, 90, kNoWindow, 0.4);
  Tensors part_backward{
      grad.narrow(1, 90, 150).contiguous(), part_mixed, part, k.squeeze(3), wide_values, of_part};
  part_backward.insert(part_backward.end(), part_kept.begin(), part_kept.end());
  return {
      {"causal_attention",
       {q, k, v, begins},
       [](const Tensors& a) {
         return listed(causal_attention(a[0], a[1], a[2], a[3], {}, kNoWindow, 0.4));
       },
       0,
       1},
      {"causal_attention_forward",
       {q, k, v, begins},
       [](const Tensors& a) {
         return listed(causal_attention_forward(a[0], a[1], a[2], a[3], {}, kNoWindow, 0.4));
       },
       0,
       1},
      {"causal_attention_backward", std::move(backward),
       [](const Tensors& a) {
         const Tensors kept(a.begin() + 1, a.end() - 1);
         return listed(causal_attention_backward(a[0], kept, a.back(), {}, kNoWindow, 2, 3, 0.4));
       },
       0, 0},
      {"part_attention_forward",
       {part, k.squeeze(3), wide_values, of_part},
       [](const Tensors& a) {
         return listed(part_attention_forward(a[0], a[1], a[2], a[3], {}, 90, kNoWindow, 0.4));
       },
       2,
       1},
      {"part_attention_backward", std::move(part_backward),
       [](const Tensors& a) {
         return listed(part_attention_backward(a[0], a[1], a[2], a[3], a[4],
                                               Tensors(a.begin() + 6, a.end()), a[5], {}, 90,
                                               kNoWindow, 0.4));
       },
       3, 3},
      {"cached_attention",
       {last, keys, values},
       [](const Tensors& a) { return listed(cached_attention(a[0], a[1], a[2], 0.4)); },
       0,
       1},
      {"windowed_attention",
       {q, k.squeeze(3), wide_values, sinks, begins},
       [](const Tensors& a) {
         return listed(windowed_attention(a[0], a[1], a[2], a[3], a[4], {}, 0, 9, 0.4));
       },
       0,
       0},
      {"windowed_attention_backward",
       {grad, q, k.squeeze(3), wide_values, sinks, begins},
       [](const Tensors& a) {
         return listed(windowed_attention_backward(a[0], a[1], a[2], a[3], a[4], a[5], {}, 0, 9,
                                                   0.4,
                                                   /*of_sinks=*/true));
       },
       0,
       0},
      {"window_softmax",
       {scores, sinks, at::zeros({4, 15})},
       [](const Tensors& a) {
         window_softmax(a[0], a[1], a[2], {}, {}, 7, 3, 2, 3, 0.7);
         return Tensors{};
       }},
      {"window_softmax_backward",
       {draw(11, {4, 15, 12}), scores.softmax(-1), rows},
       [](const Tensors& a) {
         window_softmax_backward(a[0], a[1], a[2], {}, {}, 7, 3, 2, 3, 0.7);
         return Tensors{};
       }},
      {"add_sink_gradients",
       {rows, draw(12, {6}, at::kDouble)},
       [](const Tensors& a) {
         add_sink_gradients(a[0], a[1], 3);
         return Tensors{};
       }},
  };
}

std::vector<Case> tokens(at::ScalarType dtype) {
  const auto ids = at::tensor({3, 1, 4, 1, 5, 2, 6, 5, 3, 5}, at::kLong).view({2, 5});
  const auto weight = draw(1, {8, 9}, dtype), grad = draw(2, {2, 5, 9}, dtype);
  const auto targets = at::tensor({3, -100, 0, 16, 9, -100}, at::kLong).view({2, 3});
  const auto logits = draw(3, {2, 3, 17}, dtype) * 5, seed = at::scalar_tensor(0.25);
  const auto log_sum = std::get<1>(cross_entropy_sum(logits, targets));
  return {
      {"embedding",
       {ids, weight},
       [](const Tensors& a) { return listed(kernels::embedding(a[0], a[1], -1)); },
       0,
       0},
      {"embedding_backward",
       {grad, ids},
       [](const Tensors& a) { return listed(kernels::embedding_backward(a[0], a[1], 8, 5)); },
       0,
       0},
      {"cross_entropy_sum",
       {logits, targets},
       [](const Tensors& a) { return listed(cross_entropy_sum(a[0], a[1])); },
       0,
       1},
      {"cross_entropy_sum_backward",
       {seed, logits, targets, log_sum},
       [](const Tensors& a) { return listed(cross_entropy_sum_backward(a[0], a[1], a[2], a[3])); },
       0,
       1},
      {"cross_entropy_sum_backward_over",
       {seed, targets, log_sum, logits},
       [](const Tensors& a) {
         cross_entropy_sum_backward_over(a[0], a[1], a[2], a[3]);
         return Tensors{};
       }},
  };
}

/// Those that write what they are given, and give nothing.
std::vector<Case> sums_and_steps(at::ScalarType dtype) {
  const auto some = [&](std::uint64_t seed) { return draw(seed, {257}, dtype); };
  const auto wide = draw(4, {257});
  const auto none = [](const std::function<void(const Tensors&)>& run) {
    return [run](const Tensors& a) {
      run(a);
      return Tensors{};
    };
  };
  const auto shard = wide.to(at::kBFloat16), rest = at::zeros({257}, at::kShort);
  return {
      {"sum_in_rank_order", {some(1), some(2), wide}, none([](const Tensors& a) {
         sum_in_rank_order({a[0], a[1]}, a[2], true);
       })},
      {"add_into", {wide, some(1)}, none([](const Tensors& a) { add_into(a[0], a[1]); })},
      {"divide_into", {some(1), wide}, none([](const Tensors& a) {
         divide_into(a[0], a[1], 3.0);
       })},
      {"add_powers", {some(1), at::ones({1}, at::kDouble)}, none([](const Tensors& a) {
         add_powers(a[0], 2.0, 1.0, a[1]);
       })},
      {"join_master", {shard, rest, wide}, none([](const Tensors& a) {
         join_master(a[0], a[1], a[2]);
       })},
      {"split_master", {wide, shard, rest}, none([](const Tensors& a) {
         split_master(a[0] + 0.001, a[1], a[2]);
       })},
      {"round_half_away", {wide + 0.001, shard}, none([](const Tensors& a) {
         round_half_away(a[0], a[1]);
       })},
      {"take_over_changes", {(wide + 0.5).to(at::kHalf), wide}, none([](const Tensors& a) {
         take_over_changes(a[0], a[1]);
       })},
      {"adamw",
       {wide, draw(5, {257}), at::zeros({257}), at::zeros({257}), at::ones({}, at::kFloat)},
       none([](const Tensors& a) {
         adamw({a[0]}, {a[1]}, {a[2]}, {a[3]}, {a[4]}, 1e-2, 0.9, 0.95, 0.1, 1e-8);
       })},
  };
}

std::vector<Case> all_cases() {
  std::vector<Case> all;
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const auto& some :
         {norms_and_gates(dtype), attention(dtype), tokens(dtype), sums_and_steps(dtype)}) {
      all.insert(all.end(), some.begin(), some.end());
    }
  }
  return all;
}

Tensors clones(const Tensors& tensors) {
  Tensors all;
  for (const auto& each : tensors) all.push_back(each.clone());
  return all;
}

/// Its results, and what it has made of its arguments.
Tensors run(const Case& c) {
  const Tensors arguments = clones(c.arguments);
  Tensors left = c.run(arguments);
  left.insert(left.end(), arguments.begin(), arguments.end());
  return left;
}

void expect_same(const Tensors& found, const Tensors& expected, const char* name) {
  ASSERT_EQ(found.size(), expected.size()) << name;
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(test::same_bits(found[i], expected[i])) << name << ", " << i;
  }
}

// ------------------------------------------------------------------------------------- tests

TEST(WatchedKernels, AreTheWholeList) {
  std::set<std::string> tested, listed_names;
  for (const auto& c : all_cases()) tested.insert(c.name);
#define TESSERA_NAMED(name) listed_names.insert(#name);
  TESSERA_KERNELS(TESSERA_NAMED)
  TESSERA_MADE_KERNELS(TESSERA_NAMED)
#undef TESSERA_NAMED
  EXPECT_EQ(tested, listed_names);
}

// Naive: one that is not seen, which a replay leaves out; one that writes what it does not declare.
TEST(WatchedKernels, AreSeenOnceUnderTheirNamesAndHaveTheSameBits) {
  const at::NoGradGuard no_grad;
  for (const auto& c : all_cases()) {
    const Tensors expected = run(c);
    Watch told;
    Tensors found;
    const Tensors arguments = clones(c.arguments);
    {
      const WatchScope here(told);
      found = c.run(arguments);
    }
    found.insert(found.end(), arguments.begin(), arguments.end());
    expect_same(found, expected, c.name);
    std::vector<std::string> kernels;
    std::ranges::copy_if(told.seen, std::back_inserter(kernels),
                         [](const auto& name) { return name.starts_with("tessera::"); });
    EXPECT_THAT(kernels, ElementsAre(std::string("tessera::") + c.name));
    EXPECT_THAT(told.undeclared, IsEmpty()) << c.name;
  }
}

// Under grad mode it is autograd that sees a kernel first: as what it is made of.
TEST(WatchedKernels, AreNotOperationsUnderGradMode) {
  const at::AutoGradMode grad(true);
  for (const auto& c : norms_and_gates(at::kFloat)) {
    const Tensors expected = run(c);
    Watch told;
    {
      const WatchScope here(told);
      expect_same(run(c), expected, c.name);
    }
    for (const auto& name : told.seen) EXPECT_FALSE(name.starts_with("tessera::")) << name;
  }
}

TEST(WatchedKernels, WhatIsExcludedIsNotSeen) {
  const at::NoGradGuard no_grad;
  const auto c = norms_and_gates(at::kFloat)[0];
  Watch told;
  {
    const WatchScope here(told);
    const c10::impl::ExcludeDispatchKeyGuard off(kWatchKey);
    EXPECT_FALSE(are_watched());
    run(c);
  }
  EXPECT_THAT(told.seen, IsEmpty());
}

// Left out: functions without results (sums, softmax in place, optimizers); the tensors that
// backward of attention reads, whose form depends on the implementation; clamped_swiglu_backward,
// windows and embeddings, for which ATen has no meta forms of abs(), logsumexp(), index_select()
// and embedding_dense_backward() without Python.
TEST(WatchedKernels, OnMetaTensorsHaveTheRealSizesAndDtypes) {
  const at::NoGradGuard no_grad;
  for (const auto& c : all_cases()) {
    if (c.known == 0) continue;
    Tensors nowhere;
    for (const auto& each : c.arguments) nowhere.push_back(each.to(at::kMeta));
    SCOPED_TRACE(c.name);
    const Tensors real = c.run(clones(c.arguments)), known = c.run(nowhere);
    for (std::size_t i = 0; i < c.known; ++i) {
      EXPECT_TRUE(known.at(i).is_meta()) << c.name;
      EXPECT_EQ(known[i].sizes(), real.at(i).sizes()) << c.name << ", " << i;
      EXPECT_EQ(known[i].scalar_type(), real[i].scalar_type()) << c.name << ", " << i;
    }
  }
}

// ------------------------------------------------------------------------------ in given memory

/// Memory like each result, of which something is different.
Tensors memory_for(const Tensors& results, std::int64_t more, bool other_dtype) {
  Tensors all;
  for (const auto& each : results) {
    if (!each.defined()) continue;
    const auto dtype = !other_dtype                        ? each.scalar_type()
                       : each.scalar_type() == at::kDouble ? at::kFloat
                                                           : at::kDouble;
    auto sizes = each.sizes().vec();
    if (sizes.empty()) sizes.push_back(1);
    sizes[0] += more;
    all.push_back(at::full(sizes, 17.0, each.options().dtype(dtype)));
  }
  return all;
}

std::size_t lie_in(const Tensors& results, const Tensors& given) {
  return static_cast<std::size_t>(std::ranges::count_if(results, [&](const at::Tensor& result) {
    return result.defined() && std::ranges::any_of(given, [&](const at::Tensor& each) {
             return result.const_data_ptr() == each.const_data_ptr();
           });
  }));
}

// Naive: a kernel that reads its result before it writes it, or that takes one memory for two.
TEST(GivenResults, HaveTheSameBitsAndLieWhereTheyWereAskedFor) {
  for (const auto& c : all_cases()) {
    const Tensors expected = c.run(clones(c.arguments));
    const Tensors given = memory_for(expected, 0, false);
    Tensors found;
    {
      const ResultsScope scope(given);
      found = c.run(clones(c.arguments));
    }
    expect_same(found, expected, c.name);
    EXPECT_GE(lie_in(found, given), c.given) << c.name;
    for (std::size_t i = 0; i < found.size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        if (!found[i].defined() || !found[j].defined()) continue;
        EXPECT_FALSE(found[i].is_alias_of(found[j]) &&
                     found[i].const_data_ptr() == found[j].const_data_ptr())
            << c.name;
      }
    }
  }
}

TEST(GivenResults, OfOtherSizesOrDtypesAreLeftAlone) {
  for (const auto& c : all_cases()) {
    const Tensors expected = c.run(clones(c.arguments));
    for (const bool other_dtype : {false, true}) {
      // Nothing else that a kernel makes has as many elements as three rows more.
      const Tensors given = memory_for(expected, other_dtype ? 0 : 3, other_dtype);
      Tensors found;
      {
        const ResultsScope scope(given);
        found = c.run(clones(c.arguments));
      }
      expect_same(found, expected, c.name);
      EXPECT_EQ(lie_in(found, given), 0U) << c.name;
      for (const auto& each : given) EXPECT_TRUE(each.eq(17.0).all().item<bool>()) << c.name;
    }
  }
}

// Two results of one size: each has its own; a third one of it is fresh.
TEST(GivenResults, EachMemoryIsTakenOnce) {
  const at::Tensor one = at::zeros({4, 3}), other = at::zeros({3, 4});
  const Tensors given{one, other};
  const ResultsScope scope(given);
  const at::Tensor first = result({3, 4}, one.options()), second = result({12}, one.options());
  const at::Tensor third = result({12}, one.options());
  EXPECT_TRUE(first.is_alias_of(other)) << "the sizes that were asked for";
  EXPECT_TRUE(second.is_alias_of(one));
  EXPECT_FALSE(third.is_alias_of(one) || third.is_alias_of(other));
  {
    const Tensors none;
    const ResultsScope inner(none);
    EXPECT_FALSE(result({3, 4}, one.options()).is_alias_of(other));
  }
}

}  // namespace
}  // namespace tessera::kernels::watched_test
