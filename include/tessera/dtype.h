// Element types without libtorch, so that contracts, plans and file formats are pure values.
//
// The promotion table is c10's (a test compares all pairs). Encoding says how elements become
// bytes; today that is always a plain dtype. Next: precision.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace tessera {

/// The type of an element.
enum class DType : std::uint8_t {
  kFloat64,     ///< "float64"
  kFloat32,     ///< "float32"
  kFloat16,     ///< "float16"
  kBFloat16,    ///< "bfloat16"
  kFloat8E4M3,  ///< "float8_e4m3fn"
  kFloat8E5M2,  ///< "float8_e5m2"
  kInt64,       ///< "int64"
  kInt32,       ///< "int32"
  kInt16,       ///< "int16"
  kInt8,        ///< "int8"
  kUInt64,      ///< "uint64"
  kUInt32,      ///< "uint32"
  kUInt16,      ///< "uint16"
  kUInt8,       ///< "uint8"
  kBool,        ///< "bool"
};

/// Returns the bytes of an element.
std::int64_t size_of(DType dtype);
/// Returns whether the type is a floating one, float8 included.
bool is_floating(DType dtype);
/// Returns "float32", "bfloat16", ...: the words of the config and of messages.
std::string_view to_string(DType dtype);
/// The inverse of to_string, case ignored; none for any other word.
std::optional<DType> parse_dtype(std::string_view word);

/// Returns whether the type is float8: a storage type that needs a scale, never a compute type.
bool is_float8(DType dtype);
/// Returns the result type of an operation on both, as c10::promoteTypes. Errors: kContract for
/// pairs that c10 refuses (float8 with another type; uint16, uint32 or uint64 with another
/// integer).
DType promote(DType a, DType b);
/// Returns whether every finite value of `narrow` is exactly a value of `wide`. A type represents
/// itself; bfloat16 and float16 do not represent each other.
bool represents(DType wide, DType narrow);

/// How a value halfway between two values of the target type is rounded.
enum class Rounding : std::uint8_t {
  kNearestEven,  ///< to the one with an even last bit, as every cast of libtorch
  kHalfAway,     ///< to the one away from zero; float32 to bfloat16 only
};

/// How the elements of a tensor are written as bytes.
struct Encoding {
  DType dtype = DType::kFloat32;               ///< type of the written elements
  Rounding rounding = Rounding::kNearestEven;  ///< applies where the cast narrows
  /// Returns the bytes of `numel` elements.
  std::int64_t payload_bytes(std::int64_t numel) const { return numel * size_of(dtype); }
  bool operator==(const Encoding&) const = default;
};

}  // namespace tessera
