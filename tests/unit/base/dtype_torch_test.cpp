// The dtype tables against libtorch itself, over all pairs and, for narrow types, over all values.
#include <ATen/ATen.h>

#include <optional>

#include "base/text/printable.h"
#include "support/test.h"
#include "tessera/dtype.h"

namespace tessera::dtype_torch_test {
namespace {

const std::vector<std::pair<DType, at::ScalarType>> kPairs = {
    {DType::kFloat64, at::kDouble},
    {DType::kFloat32, at::kFloat},
    {DType::kFloat16, at::kHalf},
    {DType::kBFloat16, at::kBFloat16},
    {DType::kFloat8E4M3, at::kFloat8_e4m3fn},
    {DType::kFloat8E5M2, at::kFloat8_e5m2},
    {DType::kInt64, at::kLong},
    {DType::kInt32, at::kInt},
    {DType::kInt16, at::kShort},
    {DType::kInt8, at::kChar},
    {DType::kUInt64, at::kUInt64},
    {DType::kUInt32, at::kUInt32},
    {DType::kUInt16, at::kUInt16},
    {DType::kUInt8, at::kByte},
    {DType::kBool, at::kBool},
};

std::optional<at::ScalarType> theirs(at::ScalarType a, at::ScalarType b) {
  try {
    return c10::promoteTypes(a, b);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

std::optional<at::ScalarType> ours(DType a, DType b) {
  try {
    const DType both = promote(a, b);
    for (const auto& [dtype, scalar] : kPairs) {
      if (dtype == both) return scalar;
    }
  } catch (const Error&) {
  }
  return std::nullopt;
}

TEST(DTypeTorch, PromotionEqualsC10ForAllPairs) {
  for (const auto& [a, scalar_a] : kPairs) {
    for (const auto& [b, scalar_b] : kPairs) {
      EXPECT_EQ(ours(a, b), theirs(scalar_a, scalar_b)) << to_string(a) << " " << to_string(b);
    }
  }
}

TEST(DTypeTorch, SizesEqualC10) {
  for (const auto& [dtype, scalar] : kPairs) {
    EXPECT_EQ(size_of(dtype), static_cast<std::int64_t>(c10::elementSize(scalar)));
    EXPECT_EQ(is_floating(dtype), c10::isFloatingType(scalar));
  }
}

/// All finite values of a type of one or two bytes, as float64, which holds each of them.
at::Tensor all_values(at::ScalarType scalar) {
  if (scalar == at::kBool) return at::tensor({0.0, 1.0}, at::kDouble);
  const bool one_byte = c10::elementSize(scalar) == 1;
  const at::Tensor bits = one_byte ? at::arange(0, 256, at::kInt).to(at::kByte)
                                   : at::arange(-32768, 32768, at::kInt).to(at::kShort);
  const at::Tensor values = bits.view(scalar).to(at::kDouble);
  return values.masked_select(values.isfinite());
}

TEST(DTypeTorch, RepresentsEqualsARoundTripOfEveryNarrowValue) {
  for (const auto& [narrow, narrow_scalar] : kPairs) {
    if (size_of(narrow) > 2) continue;
    const at::Tensor values = all_values(narrow_scalar);
    for (const auto& [wide, wide_scalar] : kPairs) {
      // A float that an integer type takes exactly is chance (the values of bool, say), not
      // meaning.
      if (is_floating(narrow) && !is_floating(wide)) continue;
      if (wide == DType::kBool || narrow == wide) continue;
      const at::Tensor back = values.to(wide_scalar).to(at::kDouble);
      const bool same = at::equal(back, values);
      // Converting a negative number to an unsigned type wraps and comes back changed.
      EXPECT_EQ(represents(wide, narrow), same) << to_string(wide) << " " << to_string(narrow);
    }
  }
}

// An error of libtorch itself, with the stack that it carries.
TEST(OneLine, ErrorsOfLibtorchLoseTheirStackOnly) {
  try {
    at::empty({-1});
    FAIL() << "no error was thrown";
  } catch (const c10::Error& error) {
    ASSERT_THAT(error.what(), Says("Exception raised from"));
    const std::string line = one_line(error.what());
    EXPECT_EQ(line, one_line(error.what_without_backtrace()));
    EXPECT_THAT(line, Says("-1"));
    EXPECT_EQ(line.find('\n'), std::string::npos);
  }
}

}  // namespace
}  // namespace tessera::dtype_torch_test
