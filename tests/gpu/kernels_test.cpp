// What the list of kernels picks on a CUDA device, beside the composites in fp64 on the CPU: sizes
// of a model, within the rounding of the dtype.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "kernels/implementations.h"
#include "kernels/seen_blocks.h"
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

INSTANTIATE_TEST_SUITE_P(Dtypes, OnCard, testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& drawn) { return std::string(c10::toString(drawn.param)); });

}  // namespace
}  // namespace tessera::gpu_kernels_test
