// The header of a safetensors file as a value: the place of each tensor.
//
// A file is an 8-byte little-endian length, that many bytes of JSON, and the tensors' bytes one
// after the other without a gap. Everything about it is checked here, before a byte of data is
// accessed, using only the header and the file's size; safetensors.h reads the file itself. Source:
// github.com/huggingface/safetensors, README, "Format".
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/dtype.h"
#include "tessera/error.h"

namespace tessera {

/// The largest header that the reference reader accepts, in bytes.
inline constexpr std::int64_t kMaxSafetensorsHeaderBytes = 100'000'000;
/// No real tensor has more dims; without a cap one header could declare millions.
inline constexpr std::size_t kMaxTensorDims = 64;

struct TensorInfo {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0;  ///< offset in the file (not in its data part)
  std::int64_t end = 0;

  std::int64_t numel() const { return (end - begin) / size_of(dtype); }
  std::int64_t size_bytes() const { return end - begin; }
  bool operator==(const TensorInfo&) const = default;
};

struct SafetensorsHeader {
  std::map<std::string, std::string> metadata;
  std::vector<TensorInfo> tensors;                          ///< in the order of their bytes
  std::map<std::string, std::size_t, std::less<>> by_name;  ///< index into `tensors`

  const TensorInfo* find(std::string_view name) const;  ///< nullptr where there is none
};

/// Returns "F32", "BF16", ... as the format spells them.
std::string_view safetensors_name(DType dtype);

/// Returns the number of elements of a shape. Errors: `kind` for a negative dim or where elements x
/// size do not fit into 63 bits; `what` names the tensor.
std::int64_t checked_numel(std::span<const std::int64_t> shape, DType dtype, ErrorKind kind,
                           std::string_view what);

/// `first_bytes` holds at least the whole header (more is ignored), `file_size` is the file's true
/// size, `where` names the file in messages. Errors: kFormat for anything that the format forbids:
/// tensors must cover the data part exactly, in bounds, without overlap or gap, keys are unique.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> first_bytes,
                                           std::int64_t file_size, std::string_view where);

}  // namespace tessera
