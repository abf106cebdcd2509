#include "grad/torch_dtype.h"

#include <array>
#include <utility>

#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::array<std::pair<DType, c10::ScalarType>, 15> kPairs{{
    {DType::kFloat64, c10::ScalarType::Double},
    {DType::kFloat32, c10::ScalarType::Float},
    {DType::kFloat16, c10::ScalarType::Half},
    {DType::kBFloat16, c10::ScalarType::BFloat16},
    {DType::kFloat8E4M3, c10::ScalarType::Float8_e4m3fn},
    {DType::kFloat8E5M2, c10::ScalarType::Float8_e5m2},
    {DType::kInt64, c10::ScalarType::Long},
    {DType::kInt32, c10::ScalarType::Int},
    {DType::kInt16, c10::ScalarType::Short},
    {DType::kInt8, c10::ScalarType::Char},
    {DType::kUInt64, c10::ScalarType::UInt64},
    {DType::kUInt32, c10::ScalarType::UInt32},
    {DType::kUInt16, c10::ScalarType::UInt16},
    {DType::kUInt8, c10::ScalarType::Byte},
    {DType::kBool, c10::ScalarType::Bool},
}};

}  // namespace

c10::ScalarType to_scalar_type(DType dtype) {
  for (const auto& [ours, theirs] : kPairs) {
    if (ours == dtype) return theirs;
  }
  TESSERA_INVARIANT(false, "dtype ", to_string(dtype), " has no c10 type");
}

DType to_dtype(c10::ScalarType type) {
  for (const auto& [ours, theirs] : kPairs) {
    if (theirs == type) return ours;
  }
  TESSERA_CHECK(false, ErrorKind::kContract, "found a tensor of type ", c10::toString(type),
                ", expected a plain floating, integer or bool type; convert it before sharding");
  std::abort();  // TESSERA_CHECK(false) throws
}

}  // namespace tessera
