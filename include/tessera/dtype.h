// Element types without libtorch, so that contracts, plans and file formats are pure values.
//
// The promotion table is c10's (a test compares all pairs); Encoding is what a parameter's bytes
// look like on the wire, today always a plain dtype. Next: precision.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace tessera {

enum class DType : std::uint8_t {
  kFloat64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat8E4M3,
  kFloat8E5M2,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUInt64,
  kUInt32,
  kUInt16,
  kUInt8,
  kBool,
};

/// Bytes an element.
std::int64_t size_of(DType dtype);
bool is_floating(DType dtype);
/// "float32", "bfloat16", ...: the words of the config and of messages.
std::string_view to_string(DType dtype);
/// The inverse of to_string, case ignored; none for any other word.
std::optional<DType> parse_dtype(std::string_view word);

/// float8: a payload that needs a scale to mean anything, never a type to compute in.
bool is_float8(DType dtype);
/// Result type of an operation on both, as c10::promoteTypes. Errors: kContract for pairs that c10
/// refuses (float8 with another type; uint16, uint32 or uint64 with another integer).
DType promote(DType a, DType b);
/// Whether every finite value of `narrow` is exactly a value of `wide` (bfloat16 and float16:
/// neither way; a type represents itself).
bool represents(DType wide, DType narrow);

/// What a value halfway between two of the payload becomes.
enum class Rounding : std::uint8_t {
  kNearestEven,  ///< the one with an even last bit, as every cast of libtorch
  kHalfAway,     ///< the one away from zero; float32 to bfloat16 only
};

/// How the elements of a tensor are written into a payload.
struct Encoding {
  DType dtype = DType::kFloat32;
  Rounding rounding = Rounding::kNearestEven;
  std::int64_t payload_bytes(std::int64_t numel) const { return numel * size_of(dtype); }
  bool operator==(const Encoding&) const = default;
};

}  // namespace tessera
