// A product whose input is a gate against the same product of the gate's result: the bits of both,
// and what they keep for backward.
#include "nn/gates.h"

#include <ATen/ATen.h>
#include <malloc.h>

#include <string>
#include <vector>

#include "nn/grouped_linear.h"
#include "nn/linear.h"
#include "unit/nn/compare.h"

namespace tessera::nn::gates_test {
namespace {

using Kind = ProductInput::Kind;
using Tensors = std::vector<at::Tensor>;

constexpr std::int64_t kInner = 24, kOut = 16;

ProductInput input_of(Kind kind, const Tensors& in) {
  if (kind == Kind::kSwiglu) return {kind, in[0], in[1]};
  return {kind, in[0]};
}

/// The gate's tensors, then weight and bias of a linear layer, in these dtypes.
Tensors drawn(Kind kind, at::ScalarType dtype, at::ScalarType weight, bool bias) {
  Tensors in;
  if (kind == Kind::kSwiglu) {
    in = {at::randn({3, 5, kInner}).to(dtype), at::randn({3, 5, kInner}).to(dtype)};
  } else {
    in = {at::randn({3, 5, 2 * kInner}).to(dtype)};
  }
  in.push_back(at::randn({kOut, kInner}).to(weight));
  if (bias) in.push_back(at::randn({kOut}).to(weight));
  return in;
}

/// The result of function(inputs) and the gradients of inputs that are not frozen.
template <class Function>
Tensors run(const Function& function, const Tensors& inputs, const std::vector<bool>& frozen) {
  Tensors in;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    in.push_back(inputs[i].clone().requires_grad_(!frozen[i]));
  }
  const at::Tensor y = function(in);
  Tensors all{y.detach()};
  if (!y.requires_grad()) return all;
  at::manual_seed(5);
  y.backward(at::randn(y.sizes()).to(y.scalar_type()));
  for (const at::Tensor& one : in) all.push_back(one.grad());
  return all;
}

void expect_bits(const Tensors& found, const Tensors& expected, const std::string& what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i].defined(), expected[i].defined()) << what << ", " << i;
    if (found[i].defined()) EXPECT_TRUE(at::equal(found[i], expected[i])) << what << ", " << i;
  }
}

/// Compares the two over each choice of frozen inputs.
template <class Product>
void expect_product_of_result(Kind kind, const Tensors& inputs, const std::string& what,
                              const Product& product) {
  const auto inside = [&](const Tensors& in) { return product(input_of(kind, in), in); };
  const auto outside = [&](const Tensors& in) {
    return product(ProductInput(input_of(kind, in).formed()), in);
  };
  for (std::size_t choice = 0; choice < std::size_t{1} << inputs.size(); ++choice) {
    std::vector<bool> frozen;
    for (std::size_t i = 0; i < inputs.size(); ++i) frozen.push_back((choice >> i & 1) != 0);
    expect_bits(run(inside, inputs, frozen), run(outside, inputs, frozen),
                what + ", frozen " + std::to_string(choice));
  }
}

struct Dtypes {
  at::ScalarType gate, weight;
};
constexpr Dtypes kDtypes[] = {{at::kFloat, at::kFloat},
                              {at::kFloat, at::kBFloat16},
                              {at::kBFloat16, at::kBFloat16},
                              {at::kBFloat16, at::kFloat},
                              {at::kDouble, at::kDouble}};

class Gates : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(23); }
};

// Formed again, a gate has the bits that it had: so has everything that is computed from it.
TEST_F(Gates, AProductThatFormsItsInputAgainHasTheBitsOfOneThatKeepsIt) {
  for (const Kind kind : {Kind::kSwiglu, Kind::kSwigluHalves}) {
    const std::size_t first = kind == Kind::kSwiglu ? 2 : 1;
    for (const Dtypes& dtypes : kDtypes) {
      for (const bool bias : {false, true}) {
        expect_product_of_result(kind, drawn(kind, dtypes.gate, dtypes.weight, bias),
                                 std::string(c10::toString(dtypes.gate)),
                                 [&](const ProductInput& input, const Tensors& in) {
                                   return linear(input, in[first],
                                                 bias ? in[first + 1] : at::Tensor());
                                 });
      }
    }
  }
}

TEST_F(Gates, AGroupedProductThatFormsItsInputAgainHasTheBitsOfOneThatKeepsIt) {
  const GroupOffsets offsets{0, 6, 6, 17, 40};
  for (const Kind kind : {Kind::kSwiglu, Kind::kSwigluHalves}) {
    const std::size_t first = kind == Kind::kSwiglu ? 2 : 1;
    for (const Dtypes& dtypes : kDtypes) {
      for (const GroupLayout layout : {GroupLayout::kOutIn, GroupLayout::kInOut}) {
        const bool out_in = layout == GroupLayout::kOutIn;
        Tensors in{at::randn({40, first == 2 ? kInner : 2 * kInner}).to(dtypes.gate)};
        if (first == 2) in.push_back(at::randn({40, kInner}).to(dtypes.gate));
        in.push_back(
            at::randn(out_in ? std::vector{4L, kOut, kInner} : std::vector{4L, kInner, kOut})
                .to(dtypes.weight));
        in.push_back(at::randn({4, kOut}).to(dtypes.weight));
        expect_product_of_result(kind, in, std::string(c10::toString(dtypes.gate)),
                                 [&](const ProductInput& input, const Tensors& given) {
                                   return grouped_linear(
                                       input, {given[first], given[first + 1], layout}, offsets);
                                 });
      }
    }
  }
}

TEST_F(Gates, NoRowsAndStridedGatesAreTaken) {
  const auto product = [](const ProductInput& input, const Tensors& in) {
    return linear(input, in[1]);
  };
  const at::Tensor weight = at::randn({kOut, kInner});
  expect_product_of_result(Kind::kSwigluHalves, {at::randn({0, 2 * kInner}), weight}, "no rows",
                           product);
  const auto strided = [&](const ProductInput& input, const Tensors& in) {
    return product({input.kind, input.x.narrow(1, 3, 2 * kInner)}, in);
  };
  const at::Tensor wide = at::randn({7, 3 * kInner});
  const auto kept = [&](const ProductInput& input, const Tensors& in) {
    return product(ProductInput(swiglu_halves(input.x.narrow(1, 3, 2 * kInner))), in);
  };
  const std::vector<bool> none(2);
  const auto run_as = [&](const auto& function) {
    return run([&](const Tensors& in) { return function({Kind::kSwigluHalves, in[0]}, in); },
               {wide, weight}, none);
  };
  expect_bits(run_as(strided), run_as(kept), "strided");
}

/// The bytes that `make` leaves allocated while its result lives.
template <class Make>
std::int64_t bytes_kept(const Make& make) {
  const auto used = [] {
    const auto now = mallinfo2();
    return static_cast<std::int64_t>(now.uordblks + now.hblkhd);
  };
  const std::int64_t before = used();
  const auto kept = make();
  return used() - before;
}

// In addition to its result a product keeps nothing that its gate does not keep; where only the
// weight is trained it keeps the gate's result, half of what the gate is made of.
TEST_F(Gates, OnlyWhatTheGateIsMadeOfIsKept) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "AddressSanitizer's allocator does not count";
#endif
  constexpr std::int64_t kRows = 4096, kWide = 256;
  const std::int64_t result = kRows * 8 * 4, gate = kRows * kWide * 4;
  const at::Tensor weight = at::randn({8, kWide}).requires_grad_(true);
  const auto kept_by = [&](bool trained) {
    const at::Tensor g = at::randn({kRows, kWide}).requires_grad_(trained);
    const at::Tensor up = at::randn({kRows, kWide}).requires_grad_(trained);
    return bytes_kept([&] { return linear({Kind::kSwiglu, g, up}, weight); });
  };
  EXPECT_LT(kept_by(true), result + gate / 4);
  EXPECT_NEAR(static_cast<double>(kept_by(false)), static_cast<double>(result + gate),
              static_cast<double>(gate) / 4);
}

}  // namespace
}  // namespace tessera::nn::gates_test
