// Every function of the kernels' list on a simulated device: the bits of the same implementations
// on the CPU (test_hooks::kernels_of_devices), no host pointer into device memory, and no view that
// the device does not know.
#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <limits>
#include <optional>
#include <tuple>

#include "base/test_hooks.h"
#include "kernels/implementations.h"
#include "kernels/seen_blocks.h"
#include "sim/streams.h"
#include "support/test.h"
#include "tensors_of.h"
#include "unit/nn/compare.h"

namespace tessera::sim::kernels_test {
namespace {

using results::add_to;
using results::Tensors;

class Comparison {
 public:
  std::set<std::string> compared;

  /// call(function, inputs) on the device with what the list picks there, and on the CPU with the
  /// same: results and all inputs, of which some are written.
  template <class Function, class Call>
  void compare(const char* name, Function* function, const Tensors& inputs, const Call& call) {
    const auto run = [&](const at::Device& where) {
      Tensors given;
      for (const at::Tensor& input : inputs) {
        given.push_back(input.defined() ? input.to(where, input.scalar_type(), false, /*copy=*/true)
                                        : input);
      }
      Tensors results;
      if constexpr (std::is_void_v<decltype(call(function, given))>) {
        call(function, given);
      } else {
        add_to(results, call(function, given));
      }
      add_to(results, given);
      return results;
    };
    const test_hooks::Set as_on_device(test_hooks::kernels_of_devices, [] { return true; });
    const Tensors expected = run(at::kCPU), found = run(device(0));
    ASSERT_EQ(found.size(), expected.size()) << name;
    for (std::size_t i = 0; i < found.size(); ++i) {
      expect_same_bits(found[i], expected[i], std::string(name) + ", tensor " + std::to_string(i));
    }
    compared.insert(name);
  }
};

#define TESSERA_COMPARE(name, ...) comparison.compare(#name, &kernels::name, __VA_ARGS__)

const at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16};

void norm_and_rope(Comparison& comparison) {
  for (const auto dtype : kDtypes) {
    const at::Tensor x = drawn(1, {2, 5, 24}, dtype), other = drawn(2, {2, 5, 24}, dtype);
    const at::Tensor weight = drawn(3, {24}, dtype), scale = drawn(4, {2, 5}).abs();
    for (const bool first : {false, true}) {
      TESSERA_COMPARE(rms_norm, {x, weight},
                      [&](auto* f, const Tensors& in) { return f(in[0], in[1], 1e-6, first); });
      TESSERA_COMPARE(add_rms_norm, {x, other, weight}, [&](auto* f, const Tensors& in) {
        return f(in[0], in[1], in[2], 1e-6, first);
      });
      for (const bool of_weight : {false, true}) {
        TESSERA_COMPARE(rms_norm_backward, {other, x, weight, scale},
                        [&](auto* f, const Tensors& in) {
                          return f(in[0], in[0], in[1], in[2], in[3], first, of_weight);
                        });
      }
    }
    const at::Tensor angles = drawn(5, {5, 3});
    const at::Tensor cos = angles.cos().to(dtype), sin = angles.sin().to(dtype);
    const at::Tensor of_head = drawn(6, {6}, dtype), of_heads = drawn(7, {10, 4}).abs();
    const at::Tensor grad = drawn(8, {2, 2, 5, 2, 6}, dtype);
    for (const bool normed : {false, true}) {
      TESSERA_COMPARE(rope_heads, {x, of_head, cos, sin}, [&](auto* f, const Tensors& in) {
        return f(in[0], normed ? std::optional(in[1]) : std::nullopt, in[2], in[3], 4, 2, 1e-6,
                 false);
      });
      TESSERA_COMPARE(rope_heads_backward, {grad, x, of_head, cos, sin, of_heads},
                      [&](auto* f, const Tensors& in) {
                        const auto some = [&](std::size_t i) {
                          return normed ? std::optional(in[i]) : std::nullopt;
                        };
                        return f(in[0], some(1), some(2), in[3], in[4], some(5), false, true);
                      });
    }
  }
}

void gates(Comparison& comparison) {
  for (const auto dtype : kDtypes) {
    const at::Tensor gate = drawn(1, {3, 10}, dtype), up = drawn(2, {3, 10}, dtype);
    const at::Tensor grad = drawn(3, {3, 10}, dtype), both = drawn(4, {3, 20}, dtype);
    TESSERA_COMPARE(swiglu, {gate, up}, [](auto* f, const Tensors& in) { return f(in[0], in[1]); });
    TESSERA_COMPARE(swiglu_backward, {grad, gate, up},
                    [](auto* f, const Tensors& in) { return f(in[0], in[1], in[2]); });
    TESSERA_COMPARE(swiglu_halves, {both}, [](auto* f, const Tensors& in) { return f(in[0]); });
    TESSERA_COMPARE(swiglu_halves_backward, {grad, both},
                    [](auto* f, const Tensors& in) { return f(in[0], in[1]); });
    TESSERA_COMPARE(clamped_swiglu, {both},
                    [](auto* f, const Tensors& in) { return f(in[0], 1.702, 3.0); });
    TESSERA_COMPARE(clamped_swiglu_backward, {grad, both},
                    [](auto* f, const Tensors& in) { return f(in[0], in[1], 1.702, 3.0); });
  }
}

/// 4 queries, the first at place 3 of 9 keys: merely causal (flash attention, in 16 bits, of 7 of
/// the keys), and of documents.
void parts_of_attention(Comparison& comparison, at::ScalarType dtype) {
  const at::Tensor q = drawn(1, {2, 2, 4, 3, 16}, dtype), keys = drawn(2, {2, 2, 9, 16}, dtype);
  const at::Tensor values = drawn(3, {2, 2, 9, 8}, dtype), grad = drawn(4, {2, 4, 48}, dtype);
  const at::Tensor starts = at::tensor({0, 2, 2, 6}, at::kLong).repeat({2, 1});
  for (const auto& begins : {std::optional<at::Tensor>(), std::optional(starts)}) {
    const auto attend = [&](auto* f, const Tensors& in) {
      return f(in[0], in[1], in[2], in.size() > 3 ? std::optional(in[3]) : std::nullopt, {}, 3,
               kernels::kNoWindow, 0.4);
    };
    Tensors given{q, keys, values};
    if (begins) given.push_back(*begins);
    TESSERA_COMPARE(part_attention_forward, given, attend);
    Tensors all{grad, q, keys, values};
    {
      const test_hooks::Set as_on_device(test_hooks::kernels_of_devices, [] { return true; });
      const auto [mixed, kept] = attend(&kernels::part_attention_forward, given);
      all.push_back(mixed);
      all.insert(all.end(), kept.begin(), kept.end());
    }
    if (begins) all.push_back(*begins);
    TESSERA_COMPARE(part_attention_backward, all, [&](auto* f, const Tensors& in) {
      const std::size_t kept = in.size() - 5 - (begins ? 1 : 0);
      return f(in[0], in[4], in[1], in[2], in[3], at::TensorList(in).slice(5, kept),
               begins ? std::optional(in.back()) : std::nullopt, {}, 3, kernels::kNoWindow, 0.4);
    });
  }
}

void attention(Comparison& comparison) {
  for (const auto dtype : kDtypes) {
    for (const std::int64_t of_values : {6, 8, 16}) {  // 8 and 16: flash attention, in 16 bits
      const at::Tensor q = drawn(1, {2, 2, 9, 3, 16}, dtype), k = drawn(2, {2, 2, 9, 1, 16}, dtype);
      const at::Tensor v = drawn(3, {2, 9, 2 * of_values}, dtype);
      const at::Tensor grad = drawn(4, {2, 9, 6 * of_values}, dtype);
      const auto attend = [](auto* f, const Tensors& in) {
        const auto begins = in.size() > 3 ? std::optional(in[3]) : std::nullopt;
        return f(in[0], in[1], in[2], begins, {}, kernels::kNoWindow, 0.4);
      };
      const at::Tensor starts = at::tensor({0, 0, 2, 2, 2, 2, 6, 7, 7}, at::kLong).repeat({2, 1});
      for (const Tensors& in : {Tensors{q, k, v}, Tensors{q, k, v, starts}}) {
        TESSERA_COMPARE(causal_attention, in, attend);
        TESSERA_COMPARE(causal_attention_forward, in, attend);
      }
      Tensors given{grad};
      {
        const test_hooks::Set as_on_device(test_hooks::kernels_of_devices, [] { return true; });
        add_to(given, std::get<1>(kernels::causal_attention_forward(q, k, v, {}, {},
                                                                    kernels::kNoWindow, 0.4)));
      }
      TESSERA_COMPARE(causal_attention_backward, given, [](auto* f, const Tensors& in) {
        return f(in[0], at::TensorList(in).slice(1), {}, {}, kernels::kNoWindow, 2, 3, 0.4);
      });
    }
    parts_of_attention(comparison, dtype);
    TESSERA_COMPARE(cached_attention,
                    {drawn(5, {2, 2, 2, 3, 8}, dtype), drawn(6, {2, 2, 12, 8}, dtype),
                     drawn(7, {2, 2, 12, 6}, dtype)},
                    [](auto* f, const Tensors& in) { return f(in[0], in[1], in[2], 0.4); });
  }
  const at::Tensor scores = drawn(1, {4, 15, 12}), grad = drawn(2, {4, 15, 12});
  const at::Tensor sinks = drawn(3, {6}), shares = at::zeros({4, 15});
  for (const std::int64_t window : {std::int64_t{3}, std::numeric_limits<std::int64_t>::max()}) {
    TESSERA_COMPARE(window_softmax, {scores, sinks, shares}, [&](auto* f, const Tensors& in) {
      f(in[0], in[1], in[2], {}, {}, 7, window, 2, 3, 0.7);
    });
    TESSERA_COMPARE(
        window_softmax_backward, {grad, scores.softmax(2), drawn(4, {4, 15}).abs()},
        [&](auto* f, const Tensors& in) { f(in[0], in[1], in[2], {}, {}, 7, window, 2, 3, 0.7); });
  }
  TESSERA_COMPARE(add_sink_gradients, {drawn(5, {4, 15}), drawn(6, {6}, at::kDouble)},
                  [](auto* f, const Tensors& in) { f(in[0], in[1], 3); });
}

void tokens_and_loss(Comparison& comparison) {
  const at::Tensor ids = at::tensor({3, 1, 4, 1, 5, 2, 6, 5, 3, 5}, at::kLong).view({2, 5});
  const at::Tensor targets = at::tensor({3, -100, 0, 16, 9, -100}, at::kLong).view({2, 3});
  for (const auto dtype : kDtypes) {
    TESSERA_COMPARE(embedding, {ids, drawn(1, {8, 9}, dtype)},
                    [](auto* f, const Tensors& in) { return f(in[0], in[1], 5); });
    TESSERA_COMPARE(embedding_backward, {drawn(2, {2, 5, 9}, dtype), ids},
                    [](auto* f, const Tensors& in) { return f(in[0], in[1], 8, 5); });
    const at::Tensor logits = drawn(3, {2, 3, 17}, dtype), grad = at::scalar_tensor(0.25);
    const at::Tensor log_sum = at::logsumexp(logits.to(at::kFloat), 2);
    TESSERA_COMPARE(cross_entropy_sum, {logits, targets},
                    [](auto* f, const Tensors& in) { return f(in[0], in[1]); });
    TESSERA_COMPARE(cross_entropy_sum_backward, {grad, logits, targets, log_sum},
                    [](auto* f, const Tensors& in) { return f(in[0], in[1], in[2], in[3]); });
    TESSERA_COMPARE(cross_entropy_sum_backward_over, {grad, targets, log_sum, logits},
                    [](auto* f, const Tensors& in) { f(in[0], in[1], in[2], in[3]); });
  }
}

void sums_quotients_masters_and_adamw(Comparison& comparison) {
  for (const auto dtype : kDtypes) {
    const Tensors addends{drawn(1, {65}, dtype), drawn(2, {65}, dtype), drawn(3, {65}, dtype)};
    for (const bool adds : {false, true}) {
      TESSERA_COMPARE(
          sum_in_rank_order, {addends[0], addends[1], addends[2], drawn(4, {65})},
          [&](auto* f, const Tensors& in) { f(at::TensorList(in).slice(0, 3), in[3], adds); });
    }
    TESSERA_COMPARE(add_into, {drawn(4, {65}), addends[0]},
                    [](auto* f, const Tensors& in) { f(in[0], in[1]); });
    TESSERA_COMPARE(divide_into, {at::zeros({65}, dtype), drawn(5, {65})},
                    [](auto* f, const Tensors& in) { f(in[0], in[1], 3.0); });
    for (const double p : {1.0, 2.0, 3.5}) {
      TESSERA_COMPARE(add_powers, {addends[0], at::full({1}, 2.0, at::kDouble)},
                      [&](auto* f, const Tensors& in) { f(in[0], p, 5.0, in[1]); });
    }
  }
  const at::Tensor values = drawn(6, {65}), shard = at::zeros({65}, at::kBFloat16);
  const at::Tensor rest = at::zeros({65}, at::kShort);
  TESSERA_COMPARE(split_master, {values, shard, rest},
                  [](auto* f, const Tensors& in) { f(in[0], in[1], in[2]); });
  TESSERA_COMPARE(join_master, {drawn(7, {65}, at::kBFloat16), rest + 77, values},
                  [](auto* f, const Tensors& in) { f(in[0], in[1], in[2]); });
  TESSERA_COMPARE(round_half_away, {values, shard},
                  [](auto* f, const Tensors& in) { f(in[0], in[1]); });
  TESSERA_COMPARE(take_over_changes, {drawn(8, {65}, at::kHalf), values},
                  [](auto* f, const Tensors& in) { f(in[0], in[1]); });
  const Tensors steps{at::full({}, 3.0), at::full({}, 4.0)};  // on the host
  TESSERA_COMPARE(adamw,
                  {drawn(1, {9}), drawn(2, {5}), drawn(3, {9}), drawn(4, {5}), drawn(5, {9}),
                   drawn(6, {5}), drawn(7, {9}).abs(), drawn(8, {5}).abs()},
                  [&](auto* f, const Tensors& in) {
                    const at::TensorList all(in);
                    f(all.slice(0, 2), all.slice(2, 2), all.slice(4, 2), all.slice(6, 2), steps,
                      1e-2, 0.9, 0.95, 0.1, 1e-8);
                  });
}

TEST(KernelsOnSim, TheWholeListHasItsBitsOfTheCpu) {
  Comparison comparison;
  norm_and_rope(comparison);
  gates(comparison);
  attention(comparison);
  tokens_and_loss(comparison);
  sums_quotients_masters_and_adamw(comparison);
#define TESSERA_LISTED(name) EXPECT_EQ(comparison.compared.count(#name), 1U) << #name;
  TESSERA_KERNELS(TESSERA_LISTED)
#undef TESSERA_LISTED
}

// Property: flash attention of a part, with values shorter than keys and keys behind the part, is
// that of ATen's operations. Bound: a few roundings to bf16 (unit/kernels/implementations_test.cpp).
TEST(KernelsOnSim, FlashAttentionOfAPartIsThatOfAten) {
  const auto dtype = at::kBFloat16;
  const at::Tensor q = drawn(1, {2, 2, 40, 3, 16}, dtype), keys = drawn(2, {2, 2, 90, 16}, dtype);
  const at::Tensor values = drawn(3, {2, 2, 90, 8}, dtype), grad = drawn(4, {2, 40, 48}, dtype);
  const auto run = [&](auto* forward, auto* backward) {
    const test_hooks::Set as_on_device(test_hooks::kernels_of_devices, [] { return true; });
    const auto [mixed, kept] = forward(q, keys, values, {}, {}, 30, kernels::kNoWindow, 0.4);
    EXPECT_EQ(kept.size(), forward == &kernels::aten::part_attention_forward
                               ? 0
                               : kernels::fused::kFlashKeptOfPart);
    Tensors all{mixed};
    add_to(all, backward(grad, mixed, q, keys, values, kept, {}, {}, 30, kernels::kNoWindow, 0.4));
    return all;
  };
  const Tensors found = run(&kernels::part_attention_forward, &kernels::part_attention_backward);
  const Tensors expected =
      run(&kernels::aten::part_attention_forward, &kernels::aten::part_attention_backward);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(found[i].scalar_type(), expected[i].scalar_type());
    nn::expect_close(found[i], expected[i], {4.0 / 256, 4.0 / 256}, "tensor " + std::to_string(i));
  }
}

/// Returns the peak of the memory that a kernel takes in addition to its arguments.
template <class Kernel>
std::int64_t extra_bytes(const Kernel& kernel) {
  at::getDeviceAllocator(c10::DeviceType::PrivateUse1)->resetPeakStats(0);
  const std::int64_t before = live_bytes(0);
  kernel();
  return peak_bytes(0) - before;
}

constexpr std::int64_t kOfBucket = 1 << 18, kAtATime = 1 << 12;

// A bucket of a layer has hundreds of millions of elements. Naive: two copies of it in fp64.
TEST(KernelsOnSim, QuotientsAreFormedInParts) {
  const test_hooks::Set parts(test_hooks::elements_at_a_time, [] { return kAtATime; });
  const at::Tensor sum = drawn(1, {kOfBucket}).to(device(0));
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const double factor : {3.0, 0.1}) {
      const at::Tensor result = at::empty({kOfBucket}, on(0, dtype));
      const auto bytes = extra_bytes([&] { kernels::divide_into(result, sum, factor); });
      // A division of fp32 is one.
      const bool alike = dtype == at::kFloat && factor == 3.0;
      EXPECT_LE(bytes, alike ? 1024 : 10 * 8 * kAtATime) << dtype << " over " << factor;
    }
  }
}

// Naive: as many copies as ranks, one after the other, and two of them at once.
TEST(KernelsOnSim, SumsOverRanksAreFormedInParts) {
  const test_hooks::Set parts(test_hooks::elements_at_a_time, [] { return kAtATime; });
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    Tensors addends;
    for (std::uint64_t rank = 0; rank < 4; ++rank) {
      addends.push_back(drawn(rank, {kOfBucket}, dtype).to(device(0)));
    }
    const at::Tensor result = at::zeros({kOfBucket}, on(0));
    for (const bool adds : {false, true}) {
      const auto bytes = extra_bytes([&] { kernels::sum_in_rank_order(addends, result, adds); });
      EXPECT_LE(bytes, 3 * 4 * kAtATime) << dtype << (adds ? ", added" : "");
    }
  }
}

}  // namespace
}  // namespace tessera::sim::kernels_test
