// A range of a box of a tensor, read from wherever the tensor lies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>

#include "io/tensor_source.h"
#include "layout/tensor_box.h"

namespace tessera {

/// Elements [begin, end) of a flattened box of a tensor.
struct RangeOfBox {
  std::span<const std::int64_t> shape;  ///< of the tensor
  std::int64_t element_bytes = 1;
  const TensorBox& box;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// Copies them to `out`, which has exactly their bytes; `read(first, last, out)` copies elements of
/// the flattened tensor. Rows that lie close together are read in one go, with what stands between
/// them. Errors: those of `read`; kInternal for a box that is not inside the tensor.
void read_box(const RangeOfBox& wanted, std::span<std::byte> out,
              const std::function<void(std::int64_t, std::int64_t, std::span<std::byte>)>& read);

/// Copies the elements [begin, end) of the flattened box; `out` has exactly their bytes. Errors:
/// as TensorSource::read(); kInternal for a box that is not inside the tensor.
void read_box(const TensorSource& source, std::string_view name, const TensorBox& box,
              std::int64_t begin, std::int64_t end, std::span<std::byte> out);

}  // namespace tessera
