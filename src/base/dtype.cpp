#include "tessera/dtype.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <string>

#include "tessera/error.h"

namespace tessera {
namespace {

/// The properties that decide whether one type holds the values of another. For integers
/// `precision` is the number of value bits; for floating types it counts the implicit bit, the
/// largest finite value is below 2^(max_exponent + 1) and the smallest subnormal is 2^min_exponent.
struct Traits {
  DType dtype;
  std::string_view word;
  int bytes;
  bool floating;
  bool is_signed;
  int precision;
  int max_exponent;
  int min_exponent;
};

constexpr std::array kTraits = {
    Traits{DType::kFloat64, "float64", 8, true, true, 53, 1023, -1074},
    Traits{DType::kFloat32, "float32", 4, true, true, 24, 127, -149},
    Traits{DType::kFloat16, "float16", 2, true, true, 11, 15, -24},
    Traits{DType::kBFloat16, "bfloat16", 2, true, true, 8, 127, -133},
    Traits{DType::kFloat8E4M3, "float8_e4m3fn", 1, true, true, 4, 8, -9},
    Traits{DType::kFloat8E5M2, "float8_e5m2", 1, true, true, 3, 15, -16},
    Traits{DType::kInt64, "int64", 8, false, true, 63, 62, 0},
    Traits{DType::kInt32, "int32", 4, false, true, 31, 30, 0},
    Traits{DType::kInt16, "int16", 2, false, true, 15, 14, 0},
    Traits{DType::kInt8, "int8", 1, false, true, 7, 6, 0},
    Traits{DType::kUInt64, "uint64", 8, false, false, 64, 63, 0},
    Traits{DType::kUInt32, "uint32", 4, false, false, 32, 31, 0},
    Traits{DType::kUInt16, "uint16", 2, false, false, 16, 15, 0},
    Traits{DType::kUInt8, "uint8", 1, false, false, 8, 7, 0},
    Traits{DType::kBool, "bool", 1, false, false, 1, 0, 0},
};

const Traits& traits(DType dtype) {
  const auto index = static_cast<std::size_t>(dtype);
  TESSERA_INVARIANT(index < kTraits.size() && kTraits[index].dtype == dtype, "dtype number ", index,
                    " does not exist");
  return kTraits[index];
}

/// Whether c10 knows the type as storage only: uint16, uint32, uint64.
bool is_storage_only(const Traits& type) {
  return !type.floating && !type.is_signed && type.bytes > 1;
}

DType promote_floating(const Traits& a, const Traits& b) {
  if (a.bytes == b.bytes) return DType::kFloat32;  // float16 with bfloat16: neither holds the other
  return a.bytes > b.bytes ? a.dtype : b.dtype;
}

DType promote_integers(const Traits& a, const Traits& b) {
  if (a.dtype == DType::kBool) return b.dtype;
  if (b.dtype == DType::kBool) return a.dtype;
  if (a.bytes != b.bytes) return a.bytes > b.bytes ? a.dtype : b.dtype;
  return DType::kInt16;  // int8 with uint8: the next signed type holds both
}

[[noreturn]] void refuse(DType a, DType b) {
  throw Error(ErrorKind::kContract,
              concat("dtypes: found ", to_string(a), " with ", to_string(b),
                     ", which have no common type; convert one of them explicitly"));
}

}  // namespace

std::int64_t size_of(DType dtype) { return traits(dtype).bytes; }

bool is_floating(DType dtype) { return traits(dtype).floating; }

bool is_float8(DType dtype) { return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2; }

std::string_view to_string(DType dtype) { return traits(dtype).word; }

std::optional<DType> parse_dtype(std::string_view word) {
  std::string lower(word);
  std::transform(lower.begin(), lower.end(), lower.begin(), [](char c) {
    return static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  });
  for (const Traits& type : kTraits) {
    if (type.word == lower) return type.dtype;
  }
  return std::nullopt;
}

DType promote(DType a, DType b) {
  if (a == b) return a;
  if (is_float8(a) || is_float8(b)) refuse(a, b);
  const Traits& left = traits(a);
  const Traits& right = traits(b);
  if (left.floating && right.floating) return promote_floating(left, right);
  if (left.floating) return a;
  if (right.floating) return b;
  if (is_storage_only(left) || is_storage_only(right)) refuse(a, b);
  return promote_integers(left, right);
}

bool represents(DType wide, DType narrow) {
  if (wide == narrow) return true;
  const Traits& w = traits(wide);
  const Traits& n = traits(narrow);
  if (n.floating && !w.floating) return false;
  if (n.is_signed && !w.is_signed) return false;
  // A signed integer has one more power of two on the negative side.
  const int top = n.floating ? n.max_exponent : n.max_exponent + (n.is_signed ? 1 : 0);
  const int reach = w.floating ? w.max_exponent : w.max_exponent + (w.is_signed ? 1 : 0);
  return w.precision >= n.precision && reach >= top && w.min_exponent <= n.min_exponent;
}

}  // namespace tessera
