// Each function of the list in both implementations on CPU tensors: cpu/ is the reference, so aten/
// is right wherever ATen's operations are.

#include "kernels/implementations.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include <limits>

#include "base/test_hooks.h"
#include "kernels/seen_blocks.h"
#include "support/test.h"
#include "unit/nn/compare.h"

namespace tessera::kernels::implementations_test {
namespace {

using nn::Bound;
using Tensors = std::vector<at::Tensor>;

constexpr double kEps = 1e-6;

at::Tensor draw(std::uint64_t seed, at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator).to(dtype);
}

/// fp32: other orders of additions and fused multiply-adds, over at most some hundred terms. bf16:
/// cpu/ rounds once, aten/ after each operation, of which a few follow each other and whose terms
/// may nearly cancel.
Bound bound_of(at::ScalarType dtype) {
  return dtype == at::kFloat ? nn::kFloat32 : Bound{4.0 / 256, 4.0 / 256};
}

const at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16};

template <class... Results>
Tensors listed(const std::tuple<Results...>& results) {
  return std::apply([](const auto&... each) { return Tensors{each...}; }, results);
}
Tensors listed(const at::Tensor& result) { return {result}; }

/// Compares `function(implementation)` for both; outputs of the activations' dtype have its bound,
/// the others (sums and scales in fp32) too where activations were rounded on the way.
template <class Cpu, class Aten>
void expect_alike(const Cpu& in_cpu, const Aten& in_aten, const Bound& bound,
                  const std::string& what) {
  const Tensors expected = listed(in_cpu), found = listed(in_aten);
  ASSERT_EQ(found.size(), expected.size()) << what;
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i].defined(), expected[i].defined()) << what;
    if (found[i].defined()) {
      nn::expect_close(found[i], expected[i], bound, what + ", result " + std::to_string(i));
    }
  }
}

std::string text(const char* function, at::ScalarType dtype) {
  return std::string(function) + " of " + c10::toString(dtype);
}

TEST(Implementations, NormsAgree) {
  for (const auto dtype : kDtypes) {
    for (const bool wide_weight : {false, true}) {
      const at::Tensor x = draw(1, {3, 5, 67}, dtype), other = draw(2, {3, 5, 67}, dtype);
      const at::Tensor grad = draw(3, {3, 5, 67}, dtype), of_sum = draw(4, {3, 5, 67}, dtype);
      const at::Tensor weight = draw(5, {67}, wide_weight ? at::kFloat : dtype);
      const Bound bound = bound_of(dtype);
      for (const bool rounds_first : {false, true}) {
        const auto normed = cpu::rms_norm(x, weight, kEps, rounds_first);
        expect_alike(normed, aten::rms_norm(x, weight, kEps, rounds_first), bound,
                     text("rms_norm", dtype));
        expect_alike(cpu::add_rms_norm(x, other, weight, kEps, rounds_first),
                     aten::add_rms_norm(x, other, weight, kEps, rounds_first), bound,
                     text("add_rms_norm", dtype));
        const at::Tensor& scale = std::get<1>(normed);
        for (const auto& grad_sum : {std::optional<at::Tensor>(), std::optional(of_sum)}) {
          expect_alike(
              cpu::rms_norm_backward(grad, grad_sum, x, weight, scale, rounds_first, true),
              aten::rms_norm_backward(grad, grad_sum, x, weight, scale, rounds_first, true), bound,
              text("rms_norm_backward", dtype));
        }
      }
    }
  }
}

/// A frozen weight's gradient is not there, and that of what was normed has the same bits.
void expect_without_weight(const std::tuple<at::Tensor, at::Tensor>& found,
                           const std::tuple<at::Tensor, at::Tensor>& whole,
                           const std::string& what) {
  EXPECT_FALSE(std::get<1>(found).defined()) << what;
  EXPECT_TRUE(std::get<1>(whole).defined()) << what;
  EXPECT_TRUE(at::equal(std::get<0>(found), std::get<0>(whole))) << what;
}

TEST(Implementations, NormsFormNoGradientOfAWeightThatIsFrozen) {
  const auto both = [](const char* name, at::ScalarType dtype, const auto& cpu_form,
                       const auto& aten_form) {
    expect_without_weight(cpu_form(false), cpu_form(true), text(name, dtype));
    expect_without_weight(aten_form(false), aten_form(true), text(name, dtype));
  };
  for (const auto dtype : kDtypes) {
    const at::Tensor x = draw(1, {3, 50, 67}, dtype), grad = draw(2, {3, 50, 67}, dtype);
    const at::Tensor weight = draw(3, {67}, dtype);
    const at::Tensor scale = std::get<1>(cpu::rms_norm(x, weight, kEps, false));
    for (const bool rounds_first : {false, true}) {
      const auto by = [&](auto* function) {
        return [&, function](bool of_weight) {
          return function(grad, std::nullopt, x, weight, scale, rounds_first, of_weight);
        };
      };
      both("rms_norm_backward", dtype, by(&cpu::rms_norm_backward), by(&aten::rms_norm_backward));
    }
    const at::Tensor heads = draw(4, {2, 50, 4 * 22}, dtype), angles = draw(5, {50, 11}) * 3;
    const at::Tensor cos = angles.cos().to(dtype), sin = angles.sin().to(dtype);
    const at::Tensor of_head = draw(6, {22}, dtype), turned = draw(7, {2, 2, 50, 2, 22}, dtype);
    const at::Tensor of_heads =
        std::get<1>(cpu::rope_heads(heads, of_head, cos, sin, 4, 2, kEps, false));
    const auto by = [&](auto* function) {
      return [&, function](bool of_weight) {
        return function(turned, heads, of_head, cos, sin, of_heads, false, of_weight);
      };
    };
    both("rope_heads_backward", dtype, by(&cpu::rope_heads_backward),
         by(&aten::rope_heads_backward));
  }
}

// Grouped queries and single keys, with the heads' norm and without.
TEST(Implementations, RopeAgrees) {
  constexpr std::int64_t kRows = 2, kPositions = 5, kHeads = 4, kHeadDim = 22;
  for (const auto dtype : kDtypes) {
    const at::Tensor x = draw(1, {kRows, kPositions, kHeads * kHeadDim}, dtype);
    const at::Tensor angles = draw(2, {kPositions, kHeadDim / 2}) * 3;
    const at::Tensor cos = angles.cos().to(dtype), sin = angles.sin().to(dtype);
    const at::Tensor factors = draw(3, {kHeadDim}, dtype);
    for (const std::int64_t repeat : {1, 2}) {
      const at::Tensor grad =
          draw(4, {kRows, kHeads / repeat, kPositions, repeat, kHeadDim}, dtype);
      for (const auto& weight : {std::optional<at::Tensor>(), std::optional(factors)}) {
        const auto turned = cpu::rope_heads(x, weight, cos, sin, kHeads, repeat, kEps, false);
        expect_alike(turned, aten::rope_heads(x, weight, cos, sin, kHeads, repeat, kEps, false),
                     bound_of(dtype), text("rope_heads", dtype));
        const auto scale = weight ? std::optional(std::get<1>(turned)) : std::nullopt;
        const auto of_norm = weight ? std::optional(x) : std::nullopt;
        expect_alike(cpu::rope_heads_backward(grad, of_norm, weight, cos, sin, scale, false, true),
                     aten::rope_heads_backward(grad, of_norm, weight, cos, sin, scale, false, true),
                     bound_of(dtype), text("rope_heads_backward", dtype));
      }
    }
  }
}

TEST(Implementations, GatesAgree) {
  for (const auto dtype : kDtypes) {
    const at::Tensor gate = draw(1, {7, 33}, dtype), up = draw(2, {7, 33}, dtype);
    const at::Tensor both = draw(3, {7, 66}, dtype) * 4, grad = draw(4, {7, 33}, dtype);
    const Bound bound = bound_of(dtype);
    expect_alike(cpu::swiglu(gate, up), aten::swiglu(gate, up), bound, text("swiglu", dtype));
    expect_alike(cpu::swiglu_backward(grad, gate, up), aten::swiglu_backward(grad, gate, up), bound,
                 text("swiglu_backward", dtype));
    expect_alike(cpu::swiglu_halves(both), aten::swiglu_halves(both), bound,
                 text("swiglu_halves", dtype));
    expect_alike(cpu::swiglu_halves_backward(grad, both), aten::swiglu_halves_backward(grad, both),
                 bound, text("swiglu_halves_backward", dtype));
    expect_alike(cpu::clamped_swiglu(both, 1.702, 3.0), aten::clamped_swiglu(both, 1.702, 3.0),
                 bound, text("clamped_swiglu", dtype));
    expect_alike(cpu::clamped_swiglu_backward(grad, both, 1.702, 3.0),
                 aten::clamped_swiglu_backward(grad, both, 1.702, 3.0), bound,
                 text("clamped_swiglu_backward", dtype));
  }
}

/// Queries, the first of which is at position `first` of so many keys.
struct Seen {
  std::optional<at::Tensor> begins, ends;
  std::int64_t window = kNoWindow;
};

/// All that are not behind; windows; documents of random lengths; and ends behind the queries.
std::vector<Seen> seen_of(std::int64_t rows, std::int64_t queries, std::int64_t first,
                          std::int64_t keys) {
  const at::Tensor own = at::arange(first, first + queries).expand({rows, queries});
  const at::Tensor before = (draw(21, {rows, queries}).abs() * 9).to(at::kLong);
  const at::Tensor after = (draw(22, {rows, queries}).abs() * 9).to(at::kLong);
  const at::Tensor begins = (own - before).clamp_min(0), ends = (own + 1 + after).clamp_max(keys);
  at::Tensor starts = at::where(draw(23, {rows, queries}) > 1.5, own, at::zeros_like(own));
  starts = std::get<0>(at::cummax(starts, 1)).contiguous();
  return {{}, {{}, {}, 7}, {starts, {}}, {begins, {}}, {begins, ends}, {{}, ends, 5}};
}

// More positions than a block of cpu/ has, and values of another head_dim.
TEST(Implementations, CausalAttentionAgrees) {
  constexpr std::int64_t kRows = 2, kGroups = 2, kRepeat = 3, kHeadDim = 8, kValueDim = 6;
  for (const auto dtype : kDtypes) {
    for (const std::int64_t positions : {1, 9, 300}) {
      const at::Tensor q = draw(1, {kRows, kGroups, positions, kRepeat, kHeadDim}, dtype);
      const at::Tensor k = draw(2, {kRows, kGroups, positions, 1, kHeadDim}, dtype);
      const at::Tensor v = draw(3, {kRows, positions, kGroups * kValueDim}, dtype);
      const at::Tensor grad = draw(4, {kRows, positions, kGroups * kRepeat * kValueDim}, dtype);
      const Bound bound = bound_of(dtype);
      for (const auto& [begins, ends, window] : seen_of(kRows, positions, 0, positions)) {
        const auto in_cpu = cpu::causal_attention_forward(q, k, v, begins, ends, window, 0.4);
        const auto in_aten = aten::causal_attention_forward(q, k, v, begins, ends, window, 0.4);
        const at::Tensor& mixed = std::get<0>(in_cpu);
        expect_alike(mixed, std::get<0>(in_aten), bound, text("causal_attention_forward", dtype));
        EXPECT_TRUE(at::equal(cpu::causal_attention(q, k, v, begins, ends, window, 0.4), mixed))
            << "nothing else is kept";
        EXPECT_TRUE(at::equal(aten::causal_attention(q, k, v, begins, ends, window, 0.4),
                              std::get<0>(in_aten)));
        expect_alike(cpu::causal_attention_backward(grad, std::get<1>(in_cpu), begins, ends, window,
                                                    kGroups, kRepeat, 0.4),
                     aten::causal_attention_backward(grad, std::get<1>(in_aten), begins, ends,
                                                     window, kGroups, kRepeat, 0.4),
                     bound, text("causal_attention_backward", dtype));
      }
    }
    const at::Tensor last = draw(5, {kRows, kGroups, 2, kRepeat, kHeadDim}, dtype);
    const at::Tensor keys = draw(6, {kRows, kGroups, 40, kHeadDim}, dtype);
    const at::Tensor values = draw(7, {kRows, kGroups, 40, kValueDim}, dtype);
    expect_alike(cpu::cached_attention(last, keys, values, 0.4),
                 aten::cached_attention(last, keys, values, 0.4), bound_of(dtype),
                 text("cached_attention", dtype));
  }
}

/// The outputs of a window's softmax: its result and the sinks' shares of it.
struct Windowed {
  at::Tensor scores;
  std::optional<at::Tensor> shares;
};

TEST(Implementations, WindowsAgree) {
  constexpr std::int64_t kRows = 2, kGroups = 2, kRepeat = 3, kQueries = 5, kKeys = 12, kFirst = 7;
  const at::Tensor drawn = draw(1, {kRows * kGroups, kQueries * kRepeat, kKeys}) * 5;
  const at::Tensor grads = draw(2, drawn.sizes());
  const at::Tensor some = draw(3, {kGroups * kRepeat}) * 3;
  for (const auto& sinks : {std::optional<at::Tensor>(), std::optional(some)}) {
    for (const auto& [begins, ends, window] : seen_of(kRows, kQueries, kFirst, kKeys)) {
      const auto fresh = [&](const at::Tensor& like) {
        return Windowed{like.clone(),
                        sinks ? std::optional(at::zeros(like.sizes().slice(0, 2))) : std::nullopt};
      };
      Windowed one = fresh(drawn), other = fresh(drawn);
      cpu::window_softmax(one.scores, sinks, one.shares, begins, ends, kFirst, window, kGroups,
                          kRepeat, 0.7);
      aten::window_softmax(other.scores, sinks, other.shares, begins, ends, kFirst, window, kGroups,
                           kRepeat, 0.7);
      expect_alike(one.scores, other.scores, nn::kFloat32, "window_softmax");
      if (sinks) expect_alike(*one.shares, *other.shares, nn::kFloat32, "shares");
      const at::Tensor grad = grads.clone(), same_grad = grads.clone();
      if (sinks) other.shares = one.shares->clone();
      cpu::window_softmax_backward(grad, one.scores, one.shares, begins, ends, kFirst, window,
                                   kGroups, kRepeat, 0.7);
      aten::window_softmax_backward(same_grad, one.scores, other.shares, begins, ends, kFirst,
                                    window, kGroups, kRepeat, 0.7);
      expect_alike(grad, same_grad, nn::kFloat32, "window_softmax_backward");
      if (!sinks) continue;
      expect_alike(*one.shares, *other.shares, nn::kFloat32, "gradients of rows' sinks");
      const at::Tensor sum = draw(4, {kGroups * kRepeat}, at::kDouble), same_sum = sum.clone();
      cpu::add_sink_gradients(*one.shares, sum, kRepeat);
      aten::add_sink_gradients(*one.shares, same_sum, kRepeat);
      expect_alike(sum, same_sum, {1e-13, 1e-13}, "add_sink_gradients");
    }
  }
}

// Tokens that repeat, and one that gets no gradient. Sums of bf16 rows are formed in bf16 by ATen.
TEST(Implementations, EmbeddingsAgree) {
  const at::Tensor ids = at::tensor({3, 1, 4, 1, 5, 2, 6, 5, 3, 5}, at::kLong).view({2, 5});
  for (const auto dtype : kDtypes) {
    const at::Tensor weight = draw(1, {8, 9}, dtype), grad = draw(2, {2, 5, 9}, dtype);
    for (const std::int64_t padding : {-1, 5}) {
      EXPECT_TRUE(
          at::equal(cpu::embedding(ids, weight, padding), aten::embedding(ids, weight, padding)));
      expect_alike(cpu::embedding_backward(grad, ids, 8, padding),
                   aten::embedding_backward(grad, ids, 8, padding), bound_of(dtype),
                   text("embedding_backward", dtype));
    }
  }
}

TEST(Implementations, LossesAgree) {
  const at::Tensor targets = at::tensor({3, -100, 0, 16, 9, -100}, at::kLong).view({2, 3});
  const at::Tensor grad = at::scalar_tensor(0.25);
  for (const auto dtype : kDtypes) {
    const at::Tensor logits = draw(1, {2, 3, 17}, dtype) * 5;
    const auto in_cpu = cpu::cross_entropy_sum(logits, targets);
    const auto in_aten = aten::cross_entropy_sum(logits, targets);
    expect_alike(std::get<0>(in_cpu), std::get<0>(in_aten), nn::kFloat32,
                 text("cross_entropy_sum", dtype));
    const at::Tensor expected =
        cpu::cross_entropy_sum_backward(grad, logits, targets, std::get<1>(in_cpu));
    const at::Tensor found =
        aten::cross_entropy_sum_backward(grad, logits, targets, std::get<1>(in_aten));
    expect_alike(expected, found, bound_of(dtype), text("cross_entropy_sum_backward", dtype));
    const at::Tensor over = logits.clone(), also_over = logits.clone();
    cpu::cross_entropy_sum_backward_over(grad, targets, std::get<1>(in_cpu), over);
    aten::cross_entropy_sum_backward_over(grad, targets, std::get<1>(in_aten), also_over);
    EXPECT_TRUE(at::equal(over, expected)) << dtype;
    EXPECT_TRUE(at::equal(also_over, found)) << dtype;
  }
}

// Same additions in the same order: same bits, for every pair of dtypes that can be added.
TEST(Implementations, SumsInRankOrderHaveTheSameBits) {
  const at::ScalarType dtypes[] = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf,
                                   at::kLong,   at::kInt,   at::kByte};
  for (const auto from : dtypes) {
    for (const auto to : dtypes) {
      if (!can_sum(from, to)) continue;
      Tensors addends;
      for (std::uint64_t rank = 0; rank < 4; ++rank) {
        addends.push_back((draw(rank, {2049}) * 7).abs().to(from));
      }
      for (const bool adds : {false, true}) {
        const at::Tensor result = (draw(9, {2049}) * 7).abs().to(to), same = result.clone();
        const at::Tensor in_parts = result.clone();
        cpu::sum_in_rank_order(addends, result, adds);
        aten::sum_in_rank_order(addends, same, adds);
        EXPECT_TRUE(at::equal(result, same)) << from << " in " << to << (adds ? ", added" : "");
        const test_hooks::Set parts(test_hooks::elements_at_a_time, [] { return 1000; });
        aten::sum_in_rank_order(addends, in_parts, adds);
        EXPECT_TRUE(at::equal(result, in_parts)) << from << " in " << to << ", in parts";
      }
      const Tensors one{addends[0]};
      const at::Tensor copied = at::empty_like(one[0], one[0].options().dtype(to));
      aten::sum_in_rank_order(one, copied, /*adds=*/false);
      EXPECT_TRUE(at::equal(copied, one[0].to(to))) << "of one rank";
      if (from != to) continue;
      Tensors first = addends, second = addends;
      first[1] = addends[1].clone();
      second[1] = addends[1].clone();
      cpu::sum_in_rank_order(first, first[1], /*adds=*/false);
      aten::sum_in_rank_order(second, second[1], /*adds=*/false);
      EXPECT_TRUE(at::equal(first[1], second[1])) << from << " into one of the addends";
    }
  }
}

// A gradient of any dtype and strides in a slot of any: what ATen makes of it, in one pass or not.
TEST(Implementations, WhatIsAddedIntoASlotHasTheSameBits) {
  const at::ScalarType dtypes[] = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf};
  for (const auto from : dtypes) {
    for (const auto to : dtypes) {
      const at::Tensor wide = (draw(1, {300, 311}) * 7).to(from);
      const at::Tensor turned = (draw(2, {311, 300}) * 7).to(from).t();
      for (const at::Tensor& addend : {wide, turned, wide.narrow(0, 0, 0)}) {
        const at::Tensor result = (draw(9, addend.sizes()) * 7).to(to), same = result.clone();
        cpu::add_into(result, addend);
        aten::add_into(same, addend);
        EXPECT_TRUE(at::equal(result, same)) << from << " in " << to << ' ' << addend.strides();
      }
    }
  }
}

/// Numbers over many magnitudes, ties of bfloat16 and float16, and what is not finite.
at::Tensor all_kinds(at::ScalarType dtype) {
  const at::Tensor magnitudes = (draw(1, {4099}, at::kDouble) * 40).exp2();
  at::Tensor values = draw(2, {4099}, at::kDouble) * magnitudes;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::vector<double> special{
      0.0,   -0.0,   1.0 + 1.0 / 256, -1.0 - 3.0 / 256, 1.0 + 1.0 / 2048, 1e-41,
      -6e-8, 3.4e38, 3.3961e38,       -3.4e38,          kInfinity,        -kInfinity};
  values.narrow(0, 0, static_cast<std::int64_t>(special.size()))
      .copy_(at::tensor(special, at::kDouble));
  return values.to(dtype);
}

/// NaN equals NaN, and zeros have signs.
bool same_values(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a.isnan(), b.isnan()) &&
         at::equal(a.nan_to_num(7, 8, 9), b.nan_to_num(7, 8, 9)) &&
         at::equal(a.signbit().masked_fill(a.isnan(), false),
                   b.signbit().masked_fill(b.isnan(), false));
}

TEST(Implementations, QuotientsHaveTheSameBits) {
  const at::ScalarType dtypes[] = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf};
  for (const auto from : dtypes) {
    for (const auto to : dtypes) {
      for (const double factor : {1.0, 3.0, 257.0, 0.1}) {
        at::Tensor sum = all_kinds(from);
        sum[20] = std::numeric_limits<double>::quiet_NaN();
        const at::Tensor result = at::empty_like(sum, sum.options().dtype(to));
        const at::Tensor same = at::empty_like(result), in_parts = at::empty_like(result);
        cpu::divide_into(result, sum, factor);
        aten::divide_into(same, sum, factor);
        EXPECT_TRUE(same_values(result, same)) << from << " to " << to << " over " << factor;
        const test_hooks::Set parts(test_hooks::elements_at_a_time, [] { return 1000; });
        aten::divide_into(in_parts, sum, factor);
        EXPECT_TRUE(same_values(result, in_parts)) << from << " to " << to << ", in parts";
      }
    }
  }
}

TEST(Implementations, PowersAgree) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor values = draw(1, {70001}, dtype);
    for (const double p : {1.0, 2.0, 3.5}) {
      const at::Tensor sum = at::full({1}, 2.0, at::kDouble), same = sum.clone();
      cpu::add_powers(values, p, 5.0, sum);
      aten::add_powers(values, p, 5.0, same);
      expect_alike(sum, same, {1e-13, 0.0}, text("add_powers", dtype));
    }
  }
}

TEST(Implementations, SplitMastersHaveTheSameBits) {
  at::Tensor values = all_kinds(at::kFloat);
  values[20] = std::numeric_limits<double>::quiet_NaN();
  values[21] = -std::numeric_limits<double>::quiet_NaN();
  const auto empty = [&](at::ScalarType dtype) {
    return at::empty(values.sizes(), values.options().dtype(dtype));
  };
  const at::Tensor shard = empty(at::kBFloat16), same_shard = empty(at::kBFloat16);
  const at::Tensor rest = empty(at::kShort), same_rest = empty(at::kShort);
  cpu::split_master(values, shard, rest);
  aten::split_master(values, same_shard, same_rest);
  EXPECT_TRUE(at::equal(shard.view(at::kShort), same_shard.view(at::kShort)));
  EXPECT_TRUE(at::equal(rest, same_rest));
  const at::Tensor rounded = empty(at::kBFloat16);
  aten::round_half_away(values, rounded);
  EXPECT_TRUE(at::equal(rounded.view(at::kShort), shard.view(at::kShort)));
  cpu::round_half_away(values, same_shard);
  EXPECT_TRUE(at::equal(same_shard.view(at::kShort), shard.view(at::kShort)));
  const at::Tensor joined = empty(at::kFloat), same_joined = empty(at::kFloat);
  cpu::join_master(shard, rest, joined);
  aten::join_master(shard, rest, same_joined);
  EXPECT_TRUE(at::equal(joined.view(at::kInt), same_joined.view(at::kInt)));
}

TEST(Implementations, ChangesAreTakenOverAlike) {
  const at::Tensor master = draw(1, {1001});
  at::Tensor shard = master.to(at::kHalf);
  shard[3] = 17.0;
  shard[5] = std::numeric_limits<double>::infinity();
  const at::Tensor expected = master.clone(), found = master.clone();
  cpu::take_over_changes(shard, expected);
  aten::take_over_changes(shard, found);
  EXPECT_TRUE(at::equal(found, expected));
  EXPECT_EQ(found[3].item<double>(), 17.0);
  EXPECT_TRUE(at::equal(found.narrow(0, 6, 900), master.narrow(0, 6, 900)));
}

// Ten steps of two parameters; the fused kernel rounds less often.
TEST(Implementations, AdamWAgrees) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    struct State {
      Tensors parameters, first, second, steps;
    };
    const auto begin = [&] {
      State state;
      for (std::uint64_t i = 0; i < 2; ++i) {
        state.parameters.push_back(draw(i, {257}, dtype));
        state.first.push_back(at::zeros({257}, dtype));
        state.second.push_back(at::zeros({257}, dtype));
        state.steps.push_back(at::zeros({}, at::kFloat));
      }
      return state;
    };
    const State fused = begin(), plain = begin();
    for (int step = 1; step <= 10; ++step) {
      Tensors grads{draw(10 + static_cast<std::uint64_t>(step), {257}, dtype),
                    draw(50 + static_cast<std::uint64_t>(step), {257}, dtype)};
      for (const State* state : {&fused, &plain}) {
        for (const auto& steps : state->steps) steps.fill_(step);
      }
      cpu::adamw(fused.parameters, grads, fused.first, fused.second, fused.steps, 1e-2, 0.9, 0.95,
                 0.1, 1e-8);
      aten::adamw(plain.parameters, grads, plain.first, plain.second, plain.steps, 1e-2, 0.9, 0.95,
                  0.1, 1e-8);
    }
    // A step is at most lr long: its own rounding, and the parameter's.
    const Bound bound = dtype == at::kFloat ? Bound{4e-6, 1e-6} : Bound{1e-13, 1e-14};
    for (std::size_t i = 0; i < 2; ++i) {
      expect_alike(fused.parameters[i], plain.parameters[i], bound, text("adamw", dtype));
      expect_alike(fused.first[i], plain.first[i], bound, text("adamw's first moment", dtype));
      expect_alike(fused.second[i], plain.second[i], bound, text("adamw's second moment", dtype));
    }
  }
}

// The list has only types that libtorch's dispatcher takes, so that code that records operations
// can register it unchanged.
TEST(Operations, TheWholeListCanBeRegistered) {
  torch::Library library(torch::Library::FRAGMENT, "tessera_list", std::nullopt, __FILE__,
                         __LINE__);
#define TESSERA_REGISTERED(name) library.def(#name, &kernels::name);
  TESSERA_KERNELS(TESSERA_REGISTERED)
#undef TESSERA_REGISTERED
  const auto operation = c10::Dispatcher::singleton().findSchemaOrThrow("tessera_list::swiglu", "");
  const at::Tensor gate = at::arange(12, at::kFloat), up = gate - 5;
  torch::jit::Stack stack{gate, up};
  operation.callBoxed(stack);
  EXPECT_TRUE(at::equal(stack.at(0).toTensor(), kernels::swiglu(gate, up)));
}

}  // namespace
}  // namespace tessera::kernels::implementations_test
