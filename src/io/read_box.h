// A range of a box of a tensor, read from wherever the tensor lies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "io/tensor_source.h"
#include "layout/tensor_box.h"

namespace tessera {

/// Copies the elements [begin, end) of the flattened box; `out` has exactly their bytes. Rows that
/// lie close together are read in one go, with what stands between them. Errors: as
/// TensorSource::read(); kInternal for a box that is not inside the tensor.
void read_box(const TensorSource& source, std::string_view name, const TensorBox& box,
              std::int64_t begin, std::int64_t end, std::span<std::byte> out);

}  // namespace tessera
