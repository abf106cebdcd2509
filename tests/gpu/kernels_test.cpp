// What the list of kernels picks on a CUDA device, against the composites in fp64 on the CPU: sizes
// of a model, within the rounding of the dtype.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>

#include "base/test_hooks.h"
#include "kernels/implementations.h"
#include "kernels/seen_blocks.h"
#include "support/test.h"
#include "tensors_of.h"

namespace tessera::gpu_kernels_test {
namespace {

using results::add_to;
using results::Tensors;

at::Tensor drawn(std::uint64_t seed, at::IntArrayRef shape, at::ScalarType dtype) {
  return at::randn(shape, at::make_generator<at::CPUGeneratorImpl>(seed)).to(dtype);
}

/// Of the whole tensor: |found - expected| / |expected|. A bf16 result alone is 2^-9 / sqrt(3) off;
/// each rounding on the way adds as much.
double bound_of(at::ScalarType dtype) { return dtype == at::kFloat ? 2e-6 : 1.2e-2; }

/// call(function, inputs) on the device and with fp64 inputs of the same values on the CPU: `results`
/// first ones of what it returns, or the inputs where it returns nothing.
template <class Function, class Call>
void compare(const char* name, Function* picked, Function* composite, const Tensors& inputs,
             const Call& call, std::size_t results = 1) {
  const auto run = [&](Function* function, bool on_card) {
    Tensors given, all;
    for (const at::Tensor& input : inputs) {
      const bool widened = !on_card && input.is_floating_point();
      given.push_back(input.to(on_card ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU),
                               widened ? at::kDouble : input.scalar_type(), false, /*copy=*/true));
    }
    if constexpr (std::is_void_v<decltype(call(function, given))>) {
      call(function, given);
      all = given;
    } else {
      add_to(all, call(function, given));
    }
    return all;
  };
  const Tensors expected = run(composite, false), found = run(picked, true);
  ASSERT_GE(found.size(), results) << name;
  for (std::size_t i = 0; i < results; ++i) {
    ASSERT_TRUE(found[i].is_cuda()) << name;
    const at::Tensor values = found[i].cpu().to(at::kDouble);
    ASSERT_EQ(values.sizes(), expected[i].sizes()) << name;
    const double error =
        (values - expected[i]).norm().item<double>() / expected[i].norm().item<double>();
    EXPECT_LE(error, bound_of(inputs.front().scalar_type())) << name << ", tensor " << i;
  }
}

#define TESSERA_COMPARE(name, ...) compare(#name, &kernels::name, &kernels::aten::name, __VA_ARGS__)

class OnCard : public testing::TestWithParam<at::ScalarType> {
 protected:
  at::Tensor draw(std::uint64_t seed, at::IntArrayRef shape) const {
    return drawn(seed, shape, GetParam());
  }
};

TEST_P(OnCard, NormsAndRopeAreThoseOfFp64) {
  const at::Tensor x = draw(1, {2, 64, 1024}), other = draw(2, {2, 64, 1024});
  const at::Tensor weight = draw(3, {1024});
  TESSERA_COMPARE(rms_norm, {x, weight},
                  [&](auto* f, const Tensors& in) { return f(in[0], in[1], 1e-6, true); });
  TESSERA_COMPARE(
      add_rms_norm, {x, other, weight},
      [&](auto* f, const Tensors& in) { return f(in[0], in[1], in[2], 1e-6, true); }, 2);
  const at::Tensor angles = drawn(5, {64, 32}, at::kFloat);
  const at::Tensor cos = angles.cos().to(GetParam()), sin = angles.sin().to(GetParam());
  TESSERA_COMPARE(rope_heads, {x, draw(6, {64}), cos, sin}, [&](auto* f, const Tensors& in) {
    return f(in[0], std::optional(in[1]), in[2], in[3], 16, 4, 1e-6, false);
  });
  const at::Tensor scale =
      std::get<1>(kernels::rms_norm(x.to(at::kFloat), weight.to(at::kFloat), 1e-6, false));
  for (const bool of_weight : {false, true}) {
    TESSERA_COMPARE(
        rms_norm_backward, {x, other, weight, scale},
        [&](auto* f, const Tensors& in) {
          return f(in[1], std::nullopt, in[0], in[2], in[3], false, of_weight);
        },
        of_weight ? 2 : 1);
  }
}

TEST_P(OnCard, AttentionIsThatOfFp64ForwardAndBackward) {
  // 2 rows, 4 key heads of 4 query heads each, 300 positions: no multiple of a tile.
  const at::Tensor q = draw(1, {2, 4, 300, 4, 64}), k = draw(2, {2, 4, 300, 1, 64});
  const at::Tensor v = draw(3, {2, 300, 4 * 64}), grad = draw(4, {2, 300, 16 * 64});
  TESSERA_COMPARE(causal_attention, {q, k, v}, [](auto* f, const Tensors& in) {
    return f(in[0], in[1], in[2], {}, {}, kernels::kNoWindow, 0.125);
  });
  TESSERA_COMPARE(
      causal_attention_forward, {q, k, v, grad},
      [](auto* f, const Tensors& in) {
        const bool on_card = in[0].is_cuda();
        auto [out, kept] = f(in[0], in[1], in[2], {}, {}, kernels::kNoWindow, 0.125);
        auto* backward = on_card ? &kernels::causal_attention_backward
                                 : &kernels::aten::causal_attention_backward;
        Tensors all{out};
        add_to(all, backward(in[3], kept, {}, {}, kernels::kNoWindow, 4, 4, 0.125));
        return all;
      },
      4);
}

TEST_P(OnCard, AttentionOfAPartIsThatOfFp64ForwardAndBackward) {
  // 200 queries, the first at place 70 of 300 keys: some keys lie behind the last query.
  const at::Tensor q = draw(1, {2, 4, 200, 4, 64}), keys = draw(2, {2, 4, 300, 64});
  const at::Tensor values = draw(3, {2, 4, 300, 64}), grad = draw(4, {2, 200, 16 * 64});
  TESSERA_COMPARE(
      part_attention_forward, {q, keys, values, grad},
      [](auto* f, const Tensors& in) {
        const bool on_card = in[0].is_cuda();
        auto [out, kept] = f(in[0], in[1], in[2], {}, {}, 70, kernels::kNoWindow, 0.125);
        auto* backward =
            on_card ? &kernels::part_attention_backward : &kernels::aten::part_attention_backward;
        Tensors all{out};
        add_to(all, backward(in[3], out, in[0], in[1], in[2], kept, {}, {}, 70, kernels::kNoWindow,
                             0.125));
        return all;
      },
      4);
}

TEST_P(OnCard, GatesAreThoseOfFp64) {
  const at::Tensor gate = draw(1, {300, 512}), up = draw(2, {300, 512}), grad = draw(3, {300, 512});
  TESSERA_COMPARE(swiglu, {gate, up}, [](auto* f, const Tensors& in) { return f(in[0], in[1]); });
  TESSERA_COMPARE(
      swiglu_backward, {grad, gate, up},
      [](auto* f, const Tensors& in) { return f(in[0], in[1], in[2]); }, 2);
}

TEST_P(OnCard, LossIsThatOfFp64) {
  const at::Tensor logits = draw(1, {2, 150, 5000});
  const at::Tensor targets =
      at::randint(0, 5000, {2, 150}, at::make_generator<at::CPUGeneratorImpl>(2), at::kLong);
  TESSERA_COMPARE(cross_entropy_sum, {logits, targets},
                  [](auto* f, const Tensors& in) { return f(in[0], in[1]); });
}

// Several blocks of rows, which have to meet (a block is 2^26 elements on a device).
TEST_P(OnCard, LossInBlocksIsThatOfFp64) {
  const test_hooks::Set in_blocks(test_hooks::elements_at_a_time, [] { return 70 * 5000; });
  const at::Tensor logits = draw(1, {2, 150, 5000});
  const at::Tensor targets =
      at::randint(0, 5000, {2, 150}, at::make_generator<at::CPUGeneratorImpl>(2), at::kLong);
  TESSERA_COMPARE(cross_entropy_sum, {logits, targets},
                  [](auto* f, const Tensors& in) { return f(in[0], in[1]); });
  const at::Tensor grad = at::scalar_tensor(0.25);
  const at::Tensor log_sum = at::logsumexp(logits.to(at::kFloat), 2);
  TESSERA_COMPARE(cross_entropy_sum_backward, {logits, targets, grad, log_sum},
                  [](auto* f, const Tensors& in) { return f(in[2], in[0], in[1], in[3]); });
}

TEST_P(OnCard, NormsOfGradientsAreThoseOfFp64) {
  const Tensors gradients{draw(1, {100003}), draw(2, {1}), draw(3, {64, 1000}) * 1e-12,
                          at::zeros({17}, GetParam())};
  Tensors there;
  for (const at::Tensor& gradient : gradients) there.push_back(gradient.to(at::kCUDA));
  for (const double p : {1.0, 2.0, 3.5}) {
    const at::Tensor found = kernels::sums_of_powers(there, p, 5.0).cpu();
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const at::Tensor wide = gradients[i].to(at::kDouble).abs();
      const double expected =
          (p == 1.0 || p == 2.0 ? wide : wide / 5.0).pow(p).sum().item<double>();
      EXPECT_NEAR(found[static_cast<std::int64_t>(i)].item<double>(), expected, 1e-12 * expected)
          << "p " << p << ", tensor " << i;
    }
  }
}

// Bits, and no arithmetic that a device could round elsewhere.
TEST(MastersOnCard, AreSplitAndJoinedToTheBit) {
  at::Tensor values = drawn(1, {100003}, at::kFloat);
  values[0] = std::numeric_limits<float>::quiet_NaN();
  values[1] = -0.0F;
  values[2] = 1.0F + 0x1p-8F;  // halfway between two of bf16
  const auto split = [&](const at::Device& where) {
    Tensors all{values.to(where, at::kFloat, false, /*copy=*/true),
                at::zeros({100003}, at::TensorOptions(where).dtype(at::kBFloat16)),
                at::zeros({100003}, at::TensorOptions(where).dtype(at::kShort))};
    kernels::split_master(all[0], all[1], all[2]);
    all.push_back(at::zeros_like(all[0]));
    kernels::join_master(all[1], all[2], all[3]);
    all.push_back(at::zeros_like(all[1]));
    kernels::round_half_away(all[0], all[4]);
    for (at::Tensor& one : all)
      one = one.cpu().view(one.element_size() == 2 ? at::kShort : at::kInt);
    return all;
  };
  const Tensors expected = split(at::kCPU), found = split(at::Device(at::kCUDA, 0));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(at::equal(found[i], expected[i])) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, OnCard, testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& drawn) { return std::string(c10::toString(drawn.param)); });

}  // namespace
}  // namespace tessera::gpu_kernels_test
